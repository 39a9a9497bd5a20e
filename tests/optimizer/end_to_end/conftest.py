from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.optimizer.end_to_end.small_model import write_small_bert
from tests.shortened import shortened


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model. Read-only."""
    return write_small_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def short_points() -> Iterator[None]:
    """Few points of the capacity curve, of a second."""
    with shortened():
        yield
