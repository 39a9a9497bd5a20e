"""The base models of all families, as endpoints with random weights: what speed depends on, without any download.

Each folder has a tokenizer and, as a sentence-transformers model, pooling and normalisation.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.resources.base import API_VERSION
from penstock.tasks import TaskName

MOST_TOKENS = 512
"""Of every model here: each family takes this many."""
VOCABULARY = 30_522
"""BERT's: its size changes the memory, not the time of an embedding."""
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
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
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
    "bart": {
        "model_type": "bart", "d_model": 768, "vocab_size": VOCABULARY, "max_position_embeddings": 1024,
        **{f"{half}_layers": 6 for half in ("encoder", "decoder")},
        **{f"{half}_ffn_dim": 3072 for half in ("encoder", "decoder")},
        **{f"{half}_attention_heads": 12 for half in ("encoder", "decoder")},
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
"""By name: config.json. Sizes are as in the family's base model: qwen2 as Qwen2-0.5B, qwen3 as
Qwen3-Embedding-0.6B, gemma3 as EmbeddingGemma-300M, llama, mistral and qwen3-base as BERT-base."""
LAST_TOKEN = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3-base"})
"""Families with embedders that take the last token's vector; the other families take the mean."""


def write_family(path: Path, name: str, *, tokenizer: Callable[[Path], None] | None = None) -> None:
    """The family's base model as an embedder of texts of up to `MOST_TOKENS` tokens, into a new folder.

    `tokenizer` writes tokenizer.json; None: one of everyday words.
    """
    from penstock_bench.random_models.writer import write_model, write_pooling  # the exporter: a second

    config = CONFIGURATIONS[name]
    write_model(path, config, tokenizer=tokenizer)
    width = config.get("hidden_size") or config.get("n_embd") or config["d_model"]
    write_pooling(path, width=width, last_token=name in LAST_TOKEN)
    limits = {"model_max_length": MOST_TOKENS, "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (path / "tokenizer_config.json").write_text(json.dumps(limits))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MOST_TOKENS}))


def family_endpoint(name: str, models: Path) -> Path:
    """A ModelEndpoint file of the family's base model; the model's folder is below `models` and written once."""
    folder = (models / "random" / name).resolve()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{name}-") as scratch:
            write_family(Path(scratch) / "model", name)
            # Whole or not at all: an interrupted run leaves nothing that looks finished.
            (Path(scratch) / "model").rename(folder)
    endpoint = {
        "apiVersion": API_VERSION,
        "kind": "ModelEndpoint",
        "metadata": {"name": f"random-{name}"},
        "spec": {"model": f"file://{folder}", "task": TaskName.FEATURE_EXTRACTION.value, "cores": 1},
    }
    file = folder.with_name(f"{name}.yaml")
    file.write_text(yaml.safe_dump(endpoint, sort_keys=False), encoding="utf-8")
    return file
