"""Models that transformers 5 saved answer as they do there, in every layout in which they are published."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tasks import Head
from tests.optimizer.export.families.layouts import LAYOUTS
from tests.optimizer.export.families.saved import assert_answers, saved_model


@pytest.mark.parametrize(("layout", "head"), [(name, head) for name, one in LAYOUTS.items() for head in one.heads])
def test_a_saved_model_answers_as_in_transformers_5(layout: str, head: Head, tmp_path: Path) -> None:
    chosen = LAYOUTS[layout]
    folder = saved_model(chosen.saved(head), tmp_path / "model", chosen.change, **chosen.config)
    (folder.path / "modeling.py").write_text("raise RuntimeError('this code must not run')")

    assert_answers(folder, chosen.saved(head), head, tmp_path / "out")
