"""What NomicBERT has of its own; `test_saved_models.py` compares its answers with those of transformers 5."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UnsupportedModel
from penstock.tasks import Head
from penstock_optimizer.export import export
from tests.optimizer.export.families.layouts import NOMIC_BY_AUTHORS, nomic_by_authors
from tests.optimizer.export.families.saved import saved_model

SAVED = Path(__file__).parent / "nomic_bert"


@pytest.mark.parametrize(
    ("field", "value"),
    [("rotary_scaling_factor", 2), ("prenorm", True), ("num_experts", 8), ("activation_function", "gelu")],
)
def test_what_the_builder_does_not_know_is_named(
    field: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved_model(SAVED / "masked", tmp_path / "model", nomic_by_authors, **{**NOMIC_BY_AUTHORS, field: value})
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))

    with pytest.raises(UnsupportedModel, match=f"its {field} is {value}"):
        export(folder, Head.ENCODER, tmp_path / "out")


def test_the_code_of_a_model_does_not_run_in_the_export_by_torch_either(tmp_path: Path) -> None:
    folder = saved_model(
        SAVED / "masked", tmp_path / "model", nomic_by_authors, **{**NOMIC_BY_AUTHORS, "rotary_scaling_factor": 2}
    )
    (folder.path / "modeling_hf_nomic_bert.py").write_text("raise RuntimeError('this code must not run')")

    with pytest.raises(UnsupportedModel):
        export(folder, Head.ENCODER, tmp_path / "out")
