"""NomicBERT in both of its layouts answers as transformers 5 does, which the tests do not install.

The folder `nomic_bert` has three models with random weights, as transformers 5.24 saved them: its configuration with
the authors' names of weights. Their rows and answers are in `answers.safetensors`.
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
from tests.optimizer.export.saved import Tensors, assert_answers, saved_model

SAVED = Path(__file__).parent / "nomic_bert"
HEADS = {Head.SEQUENCE: "sequence", Head.TOKEN: "token", Head.MASKED_LM: "masked", Head.ENCODER: "masked"}
NEWER = {
    "encoder.layers": "layers", "emb_ln": "embeddings.LayerNorm", "attn.out_proj": "self_attn.o_proj",
    "fc11": "up_proj", "fc12": "gate_proj", "fc2": "down_proj", "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}  # fmt: skip
"""The authors' names of weights, and those of transformers 5."""
MORE_WORDS = 3
"""To make their number a multiple of 64."""
AUTHORS_INNER = 256
"""The authors' code makes the inner width a multiple of it."""


def with_newer_names(tensors: Tensors) -> Tensors:
    renamed: Tensors = {}
    for authors, tensor in tensors.items():
        name = authors
        for old, new in NEWER.items():
            name = name.replace(old, new)
        if "attn.Wqkv" in name:
            for part, array in zip("qkv", np.split(tensor, 3), strict=True):
                renamed[name.replace("attn.Wqkv", f"self_attn.{part}_proj")] = array.copy()
        else:
            renamed[name] = tensor
    return renamed


def by_authors(tensors: Tensors) -> Tensors:
    """The same model as the authors' code would save it: wider and with more words by zeros, with biases of zero."""
    renamed = {name.replace("nomic_bert.", "bert."): tensor for name, tensor in tensors.items()}
    for name in list(renamed):
        stem = name.removesuffix(".weight")
        if name.endswith(("fc11.weight", "fc12.weight")):
            missing = AUTHORS_INNER - len(renamed[name])
            renamed[name] = np.pad(renamed[name], ((0, missing), (0, 0)))
            renamed[f"{stem}.bias"] = np.zeros(AUTHORS_INNER, np.float32)
        elif name.endswith("fc2.weight"):
            renamed[name] = np.pad(renamed[name], ((0, 0), (0, AUTHORS_INNER - renamed[name].shape[1])))
        elif name == "cls.predictions.bias":
            renamed["cls.predictions.decoder.bias"] = np.pad(renamed.pop(name), (0, MORE_WORDS))
        elif name.endswith("word_embeddings.weight"):
            renamed[name] = np.pad(renamed[name], ((0, MORE_WORDS), (0, 0)))
    return renamed


AUTHORS: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings",
         "hidden_act", "layer_norm_eps", "rope_parameters", "head_dim")
    ),
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 40,
    "n_positions": 40,
    "pad_vocab_size_multiple": 64,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": False,
    "auto_map": {"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"},
}  # fmt: skip


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
    (folder.path / "modeling_hf_nomic_bert.py").write_text("raise RuntimeError('this code must not run')")

    assert_answers(folder, SAVED / HEADS[head], head, tmp_path / "out")


@pytest.mark.parametrize(
    ("field", "value"),
    [("rotary_scaling_factor", 2), ("prenorm", True), ("num_experts", 8), ("activation_function", "gelu")],
)
def test_what_the_builder_does_not_know_is_named(
    field: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved_model(SAVED / "masked", tmp_path / "model", by_authors, **{**AUTHORS, field: value})
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))

    with pytest.raises(UnsupportedModel, match=f"its {field} is {value}"):
        export(folder, Head.ENCODER, tmp_path / "out")


def test_the_code_of_a_model_does_not_run_in_the_export_by_torch_either(tmp_path: Path) -> None:
    folder = saved_model(SAVED / "masked", tmp_path / "model", by_authors, **{**AUTHORS, "rotary_scaling_factor": 2})
    (folder.path / "modeling_hf_nomic_bert.py").write_text("raise RuntimeError('this code must not run')")

    with pytest.raises(UnsupportedModel):
        export(folder, Head.ENCODER, tmp_path / "out")
