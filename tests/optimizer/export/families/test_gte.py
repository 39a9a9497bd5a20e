"""What GTE has of its own; `test_saved_models.py` compares its answers with those of transformers 5."""

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
from tests.optimizer.export.families.layouts import GTE_BY_AUTHORS, gte_by_authors
from tests.optimizer.export.families.saved import saved_model

SAVED = Path(__file__).parent / "gte"


def test_angles_are_scaled_as_the_authors_publish_it(tmp_path: Path) -> None:
    fields = {**GTE_BY_AUTHORS, "rope_theta": 20000.0, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    folder = saved_model(SAVED / "masked", tmp_path / "model", gte_by_authors, **fields)

    angles = Gte(folder).encoder().layers[0].rotary

    assert angles is not None
    frequencies = (20000.0 * 8.0) ** (-np.arange(0, 8, 2) / 8) / 8.0 ** (2 / 8)
    np.testing.assert_allclose(angles.cos, np.cos(np.arange(40)[:, np.newaxis] * frequencies), atol=1e-5)
    np.testing.assert_allclose(angles.sin, np.sin(np.arange(40)[:, np.newaxis] * frequencies), atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("rope_scaling", {"type": "yarn", "factor": 2.0}, "positions are scaled"),
        ("layer_norm_type", "rms_norm", "its layer_norm_type is rms_norm"),
        ("position_embedding_type", "absolute", "its position_embedding_type is absolute"),
    ],
)
def test_what_the_builder_does_not_know_is_named(
    field: str, value: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved_model(
        SAVED / "masked",
        tmp_path / "model",
        gte_by_authors,
        **{**GTE_BY_AUTHORS, "architectures": ["NewModel"], field: value},
    )
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))

    with pytest.raises(UnsupportedModel, match=why):
        export(folder, Head.ENCODER, tmp_path / "out")
