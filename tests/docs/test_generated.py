"""The documents say what the code says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_parts_of_the_documents_are_fresh() -> None:
    specification = importlib.util.spec_from_file_location("make_docs", ROOT / "dev" / "tools" / "make_docs.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)

    assert module.PARTS
    assert module.stale() == [], "run `make docs`"
