"""Models that transformers 5 saved answer as they do there, in every layout in which they are published."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import UnsupportedModel
from penstock.tasks import Head
from penstock_optimizer.export import export
from penstock_optimizer.export.families.gte import Gte
from penstock_runtime.models.folder import ModelFolder
from tests.optimizer.export.families.layouts import LAYOUTS
from tests.optimizer.export.families.saved import assert_answers, saved_model

GTE, NOMIC = "GTE by its authors", "NomicBERT by its authors"


def published(layout: str, head: Head, path: Path, **changes: Any) -> ModelFolder:
    """A saved model in a layout, with the authors' code next to it."""
    chosen = LAYOUTS[layout]
    folder = saved_model(chosen.saved(head), path, chosen.change, **{**chosen.config, **changes})
    (folder.path / "modeling.py").write_text("raise RuntimeError('this code must not run')")
    return folder


@pytest.mark.parametrize(("layout", "head"), [(name, head) for name, one in LAYOUTS.items() for head in one.heads])
def test_a_saved_model_answers_as_in_transformers_5(layout: str, head: Head, tmp_path: Path) -> None:
    folder = published(layout, head, tmp_path / "model")

    assert_answers(folder, LAYOUTS[layout].saved(head), head, tmp_path / "out")


def test_angles_are_scaled_as_the_authors_of_gte_publish_it(tmp_path: Path) -> None:
    scaling = {"type": "ntk", "factor": 8.0}
    folder = published(GTE, Head.MASKED_LM, tmp_path / "model", rope_theta=20000.0, rope_scaling=scaling)

    angles = Gte(folder).encoder().layers[0].rotary

    assert angles is not None
    frequencies = (20000.0 * 8.0) ** (-np.arange(0, 8, 2) / 8) / 8.0 ** (2 / 8)
    np.testing.assert_allclose(angles.cos, np.cos(np.arange(40)[:, np.newaxis] * frequencies), atol=1e-5)
    np.testing.assert_allclose(angles.sin, np.sin(np.arange(40)[:, np.newaxis] * frequencies), atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "changes", "why"),
    [
        (GTE, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "positions are scaled"),
        (GTE, {"layer_norm_type": "rms_norm"}, "its layer_norm_type is rms_norm"),
        (GTE, {"position_embedding_type": "absolute"}, "its position_embedding_type is absolute"),
        (NOMIC, {"rotary_scaling_factor": 2}, "its rotary_scaling_factor is 2"),
        (NOMIC, {"prenorm": True}, "its prenorm is True"),
        (NOMIC, {"num_experts": 8}, "its num_experts is 8"),
        (NOMIC, {"activation_function": "gelu"}, "its activation_function is gelu"),
    ],
)
def test_what_the_builder_does_not_know_is_named(
    layout: str, changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"architectures": ["NewModel"]} if layout == GTE else {}
    folder = published(layout, Head.MASKED_LM, tmp_path / "model", **named, **changes)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))

    with pytest.raises(UnsupportedModel, match=why):
        export(folder, Head.ENCODER, tmp_path / "out")


def test_the_code_of_a_model_does_not_run_in_the_export_by_torch_either(tmp_path: Path) -> None:
    folder = published(NOMIC, Head.MASKED_LM, tmp_path / "model", rotary_scaling_factor=2)
    (folder.path / "modeling_hf_nomic_bert.py").write_text("raise RuntimeError('this code must not run')")

    with pytest.raises(UnsupportedModel):
        export(folder, Head.ENCODER, tmp_path / "out")
