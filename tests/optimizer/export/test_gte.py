"""GTE in both of its layouts answers as transformers 5 does.

The folder `gte` has three models with random weights, as transformers 5.24 saved them: its configuration with the
authors' names of weights.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import UnsupportedModel
from penstock.tasks import Head
from penstock_optimizer.export import export
from penstock_optimizer.export.gte import Gte
from tests.optimizer.export.saved import Tensors, assert_answers, saved_model

SAVED = Path(__file__).parent / "gte"
HEADS = {Head.SEQUENCE: "sequence", Head.TOKEN: "token", Head.MASKED_LM: "masked", Head.ENCODER: "masked"}
NEWER = {
    "encoder.layer": "layers", "attention.o_proj": "self_attn.o_proj", "attn_ln": "post_attention_layernorm",
    "mlp_ln": "post_mlp_layernorm", "lm_head.norm": "lm_head.layer_norm",
}  # fmt: skip
"""The authors' names of weights, and those of transformers 5."""
SPLIT = {
    "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
}
AUTHORS: dict[str, Any] = {
    "model_type": "new",
    "rope_parameters": None,
    "rope_theta": 160000.0,
    "rope_scaling": None,
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "auto_map": {"AutoModel": "modeling.NewModel"},
}


def with_newer_names(tensors: Tensors) -> Tensors:
    renamed: Tensors = {}
    for authors, tensor in tensors.items():
        name = authors
        for old, new in NEWER.items():
            name = name.replace(old, new)
        old = next((one for one in SPLIT if one in name), "")
        if not old:
            renamed[name] = tensor
            continue
        for new, part in zip(SPLIT[old], np.split(tensor, len(SPLIT[old])), strict=True):
            renamed[name.replace(old, new)] = part.copy()
    return renamed


def by_authors(tensors: Tensors) -> Tensors:
    return {f"new.{name.removeprefix('gte.')}" if "gte." in name else name: array for name, array in tensors.items()}


@pytest.mark.parametrize("head", list(HEADS))
def test_the_configuration_of_transformers_5_with_the_authors_names_of_weights(head: Head, tmp_path: Path) -> None:
    folder = saved_model(SAVED / HEADS[head], tmp_path / "model", dict)

    assert_answers(folder, SAVED / HEADS[head], head, tmp_path / "out")


@pytest.mark.parametrize("head", list(HEADS))
def test_the_names_of_weights_in_transformers_5(head: Head, tmp_path: Path) -> None:
    folder = saved_model(SAVED / HEADS[head], tmp_path / "model", with_newer_names)

    assert_answers(folder, SAVED / HEADS[head], head, tmp_path / "out")


@pytest.mark.parametrize("head", list(HEADS))
def test_the_authors_layout_is_built_without_their_code(head: Head, tmp_path: Path) -> None:
    folder = saved_model(SAVED / HEADS[head], tmp_path / "model", by_authors, **AUTHORS)
    (folder.path / "modeling.py").write_text("raise RuntimeError('this code must not run')")

    assert_answers(folder, SAVED / HEADS[head], head, tmp_path / "out")


def test_angles_are_scaled_as_the_authors_publish_it(tmp_path: Path) -> None:
    fields = {**AUTHORS, "rope_theta": 20000.0, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    folder = saved_model(SAVED / "masked", tmp_path / "model", by_authors, **fields)

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
        SAVED / "masked", tmp_path / "model", by_authors, **{**AUTHORS, "architectures": ["NewModel"], field: value}
    )
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))

    with pytest.raises(UnsupportedModel, match=why):
        export(folder, Head.ENCODER, tmp_path / "out")
