"""Models of every family at its base size, with random weights: what speed depends on, without any download.

The weights have the names and shapes that the builder of the optimiser asks for, so that no framework is needed to
write them. Each folder has MiniLM's tokenizer and, as a sentence-transformers model, pooling and normalisation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.models import MOST_TOKENS, made_once, write_tokenizer
from penstock.tasks import Head
from penstock_optimizer.export.families import family_of
from penstock_optimizer.export.reader import Tensors, Weights
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float

SEED = 20261127
VOCABULARY = 30_522
"""That of the tokenizer: its size changes the memory, not the time of an embedding."""
BASE: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": VOCABULARY,
}
DECODER: Mapping[str, Any] = {
    **BASE,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "max_position_embeddings": 8192,
}
"""A decoder as large as BERT-base; the smallest that is in use as an embedder is larger, except those below."""
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bert": {"model_type": "bert", **BASE, "intermediate_size": 3072, "max_position_embeddings": 512},
    "roberta": {
        "model_type": "roberta", **BASE, "intermediate_size": 3072, "max_position_embeddings": 514,
        "type_vocab_size": 1, "pad_token_id": 1,
    },
    "mpnet": {"model_type": "mpnet", **BASE, "intermediate_size": 3072, "max_position_embeddings": 514},
    "modernbert": {
        "model_type": "modernbert", **BASE, "num_hidden_layers": 22, "intermediate_size": 1152, "pad_token_id": 0,
        "max_position_embeddings": 8192, "local_attention": 128, "global_attn_every_n_layers": 3,
    },
    "nomic": {
        "model_type": "nomic_bert", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": 3072, "n_positions": 2048,
        "vocab_size": VOCABULARY, "activation_function": "swiglu", "rotary_emb_fraction": 1.0, "rotary_emb_base": 1000,
        "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False, "type_vocab_size": 2,
    },
    "gte": {
        "model_type": "new", **BASE, "intermediate_size": 3072, "position_embedding_type": "rope",
        "max_position_embeddings": 8192, "type_vocab_size": 1, "rope_theta": 20000,
    },
    "jina": {
        "model_type": "bert", **BASE, "intermediate_size": 3072, "position_embedding_type": "alibi",
        "feed_forward_type": "geglu", "max_position_embeddings": 8192,
    },
    "deberta": {
        "model_type": "deberta-v2", **BASE, "intermediate_size": 3072, "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"], "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "position_biased_input": False, "type_vocab_size": 0, "max_position_embeddings": 512,
    },
    "t5": {
        "model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12,
        "vocab_size": VOCABULARY, "feed_forward_proj": "relu", "architectures": ["T5EncoderModel"],
    },
    "eurobert": {
        "model_type": "eurobert", **BASE, "num_key_value_heads": 12, "intermediate_size": 3072,
        "max_position_embeddings": 8192, "rope_theta": 250000, "pad_token_id": 0,
    },
    "llama": {"model_type": "llama", **DECODER},
    "mistral": {"model_type": "mistral", **DECODER, "sliding_window": None},
    "qwen2": {
        "model_type": "qwen2", **BASE, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "max_position_embeddings": 8192,
    },
    "qwen3": {
        "model_type": "qwen3", **BASE, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 8192,
    },
    "qwen3-base": {"model_type": "qwen3", **DECODER, "head_dim": 64},
    "gemma3": {
        "model_type": "gemma3_text", **BASE, "num_hidden_layers": 24, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "intermediate_size": 1152,
        "sliding_window": 512, "sliding_window_pattern": 6, "use_bidirectional_attention": True,
        "max_position_embeddings": 2048,
    },
}  # fmt: skip
"""By name: config.json. The sizes are those of the family's base model: qwen2 has those of Qwen2-0.5B, qwen3 those of
Qwen3-Embedding-0.6B, gemma3 those of EmbeddingGemma-300M, llama, mistral and qwen3-base those of BERT-base."""
LAST_TOKEN = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3-base"})
"""Families whose embedders take the last token's vector; others take the mean."""


class _RandomWeights(Weights):
    """Makes every tensor that is asked for."""

    def __init__(self, folder: ModelFolder, *, seed: int, deviation: float) -> None:
        super().__init__(folder)
        self._random = np.random.default_rng(seed)
        self._deviation = deviation
        self.made: dict[str, Float] = {}

    def take(self, name: str, shape: Sequence[int]) -> Float:
        """A matrix around 0, a norm's weight around 1, a bias around 0."""
        if name not in self.made:
            centre = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
            noise = self._random.standard_normal(tuple(shape), np.float32)
            self.made[name] = np.float32(centre) + np.float32(self._deviation) * noise
        return self.made[name]


def write_model(
    path: Path, config: Mapping[str, Any], *, head: Head = Head.ENCODER, seed: int = SEED, deviation: float = 0.02
) -> ModelFolder:
    """A folder with this config.json and random weights. `deviation`: of the weights.

    NotBuildable for a family that the builder does not know.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(dict(config), indent=2))
    save_file({"none": np.zeros(1, np.float32)}, path / "model.safetensors")
    folder = ModelFolder.open(path)
    family_class = family_of(folder)
    if family_class is None:
        raise ValueError(f"{folder.model_type} is no family of the builder")
    family = family_class(folder)
    weights = _RandomWeights(folder, seed=seed, deviation=deviation)
    family.reader.weights = weights
    family.reader.body = Tensors(weights, f"{family.base}." if head is not Head.ENCODER else "")
    family.reader.top = Tensors(weights, "")
    family.top(head, family.encoder())
    save_file({name: np.ascontiguousarray(array) for name, array in weights.made.items()}, path / "model.safetensors")
    return ModelFolder.open(path)


def family_model(name: str) -> Path:
    """The family's base model as an embedder of texts of up to 512 tokens; written once."""

    def write(path: Path) -> None:
        config = FAMILIES[name]
        write_model(path, config)
        width = config.get("hidden_size") or config.get("n_embd") or config["d_model"]
        write_pooling(path, width=width, last_token=name in LAST_TOKEN)
        limits = {"model_max_length": MOST_TOKENS, "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
        (path / "tokenizer_config.json").write_text(json.dumps(limits))
        (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MOST_TOKENS}))

    return made_once(f"family-{name}", write)


def write_pooling(path: Path, *, width: int, last_token: bool) -> None:
    """The files of a sentence-transformers model: pooling and normalisation."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    pooling = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_mean_tokens": not last_token,
        "pooling_mode_lasttoken": last_token,
    }
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
