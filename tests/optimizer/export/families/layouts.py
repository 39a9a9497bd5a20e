"""Layouts of names and configurations in which models with the same weights are published.

The models were saved by transformers 5 with random weights (`saved.py`): GTE and NomicBERT in its configuration with
the authors' names of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.tasks import Head
from tests.optimizer.export.families.saved import Tensors

GTE_NAMES = {
    "encoder.layer": "layers", "attention.o_proj": "self_attn.o_proj", "attn_ln": "post_attention_layernorm",
    "mlp_ln": "post_mlp_layernorm", "lm_head.norm": "lm_head.layer_norm",
}  # fmt: skip
"""The authors' names of weights, and those of transformers 5."""
GTE_PARTS = {
    "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
}
GTE_BY_AUTHORS: dict[str, Any] = {
    "model_type": "new",
    "rope_parameters": None,
    "rope_theta": 160000.0,
    "rope_scaling": None,
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "auto_map": {"AutoModel": "modeling.NewModel"},
}


def gte_with_newer_names(tensors: Tensors) -> Tensors:
    renamed: Tensors = {}
    for authors, tensor in tensors.items():
        name = authors
        for old, new in GTE_NAMES.items():
            name = name.replace(old, new)
        old = next((one for one in GTE_PARTS if one in name), "")
        if not old:
            renamed[name] = tensor
            continue
        for new, part in zip(GTE_PARTS[old], np.split(tensor, len(GTE_PARTS[old])), strict=True):
            renamed[name.replace(old, new)] = part.copy()
    return renamed


def gte_by_authors(tensors: Tensors) -> Tensors:
    return {f"new.{name.removeprefix('gte.')}" if "gte." in name else name: array for name, array in tensors.items()}


NOMIC_NAMES = {
    "encoder.layers": "layers", "emb_ln": "embeddings.LayerNorm", "attn.out_proj": "self_attn.o_proj",
    "fc11": "up_proj", "fc12": "gate_proj", "fc2": "down_proj", "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}  # fmt: skip
"""The authors' names of weights, and those of transformers 5."""
MORE_WORDS = 3
"""To make their number a multiple of 64."""
AUTHORS_INNER = 256
"""The authors' code makes the inner width a multiple of it."""


def nomic_with_newer_names(tensors: Tensors) -> Tensors:
    renamed: Tensors = {}
    for authors, tensor in tensors.items():
        name = authors
        for old, new in NOMIC_NAMES.items():
            name = name.replace(old, new)
        if "attn.Wqkv" in name:
            for part, array in zip("qkv", np.split(tensor, 3), strict=True):
                renamed[name.replace("attn.Wqkv", f"self_attn.{part}_proj")] = array.copy()
        else:
            renamed[name] = tensor
    return renamed


def nomic_by_authors(tensors: Tensors) -> Tensors:
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


NOMIC_BY_AUTHORS: dict[str, Any] = {
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

EUROBERT_BY_AUTHORS: dict[str, Any] = {
    "rope_parameters": None,
    "rope_theta": 10000.0,
    "classifier_pooling": None,
    "clf_pooling": "late",
    "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"},
}


@dataclass(frozen=True)
class Layout:
    """A saved model, and how it is changed into the layout."""

    family: str
    """The folder next to this file."""
    heads: Mapping[Head, str]
    """The folders in it."""
    change: Callable[[Tensors], Tensors] = dict
    config: Mapping[str, Any] = field(default_factory=dict)

    def saved(self, head: Head) -> Path:
        """The folder of a head."""
        return Path(__file__).parent / self.family / self.heads[head]


BERT_HEADS = {Head.SEQUENCE: "sequence", Head.TOKEN: "token", Head.MASKED_LM: "masked", Head.ENCODER: "masked"}
LAYOUTS: Mapping[str, Layout] = {
    "GTE": Layout("gte", BERT_HEADS),
    "GTE with the names of transformers 5": Layout("gte", BERT_HEADS, gte_with_newer_names),
    "GTE by its authors": Layout("gte", BERT_HEADS, gte_by_authors, GTE_BY_AUTHORS),
    "NomicBERT": Layout("nomic_bert", BERT_HEADS),
    "NomicBERT with the names of transformers 5": Layout("nomic_bert", BERT_HEADS, nomic_with_newer_names),
    "NomicBERT by its authors": Layout("nomic_bert", BERT_HEADS, nomic_by_authors, NOMIC_BY_AUTHORS),
    "EuroBERT": Layout("eurobert", {**BERT_HEADS, Head.TOKEN: "token"}),
    "EuroBERT by its authors": Layout("eurobert", {**BERT_HEADS, Head.TOKEN: "token"}, dict, EUROBERT_BY_AUTHORS),
    "Gemma 3": Layout("gemma3", {Head.ENCODER: "encoder"}),
    "Qwen3": Layout("qwen3", {Head.ENCODER: "encoder", Head.SEQUENCE: "sequence"}),
}
