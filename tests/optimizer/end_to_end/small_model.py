"""Encoders of a few small layers with random weights and a real tokenizer: optimised in seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock_optimizer.load.workload import EVERYDAY_WORDS

HIDDEN, LAYERS, HEADS, FEED_FORWARD, POSITIONS = 128, 2, 4, 256, 64
Weights = NDArray[np.float32]
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_small_bert(path: Path, *, seed: int = 0) -> Path:
    """Write the folder as transformers' save_pretrained would, without torch: plain safetensors."""
    vocabulary = _write_tokenizer_and_modules(path)
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "num_hidden_layers": LAYERS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    return _write_model(path, config, vocabulary, _bert_weights(vocabulary, seed))


def write_small_modernbert(path: Path, *, seed: int = 0) -> Path:
    """As `write_small_bert`. Its configuration is as transformers 5 writes it; of its three layers one is global."""
    vocabulary = _write_tokenizer_and_modules(path)
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = {
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "local_attention": 16,
        "rope_parameters": {
            "full_attention": {"rope_theta": 160000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
    return _write_model(path, config, vocabulary, _modernbert_weights(vocabulary, len(kinds), seed))


def write_small_deberta(path: Path, *, seed: int = 0) -> Path:
    """As `write_small_bert`, with DeBERTa-v3's attention."""
    vocabulary = _write_tokenizer_and_modules(path)
    config = {
        "model_type": "deberta-v2",
        "architectures": ["DebertaV2Model"],
        "num_hidden_layers": LAYERS,
        "relative_attention": True,
        "pos_att_type": "p2c|c2p",
        "position_buckets": 16,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
    }
    tensors = _bert_weights(vocabulary, seed)
    renamed = {
        re.sub(r"(attention.self.\w+)\.", r"\1_proj.", name): tensor
        for name, tensor in tensors.items()
        if not re.search("position_embeddings|token_type|pooler", name)
    }
    distances = {
        "encoder.rel_embeddings.weight": _matrices(seed + 1)(32, HIDDEN),
        "encoder.LayerNorm.weight": _vector(HIDDEN, 1.0),
        "encoder.LayerNorm.bias": _vector(HIDDEN),
    }
    return _write_model(path, config, vocabulary, renamed | distances)


def write_small_nomic(path: Path, *, seed: int = 0) -> Path:
    """As `write_small_bert`, with NomicBERT's weights and configuration as transformers 5 has them."""
    vocabulary = _write_tokenizer_and_modules(path)
    config = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "num_hidden_layers": LAYERS,
        "type_vocab_size": 2,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    }
    matrix = _matrices(seed)
    tensors = {
        "embeddings.word_embeddings.weight": matrix(vocabulary, HIDDEN),
        "embeddings.token_type_embeddings.weight": matrix(2, HIDDEN),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        prefix = f"layers.{layer}"
        norms += [f"{prefix}.post_attention_layernorm", f"{prefix}.post_mlp_layernorm"]
        tensors |= {f"{prefix}.self_attn.{part}_proj.weight": matrix(HIDDEN, HIDDEN) for part in "qkvo"}
        tensors |= {f"{prefix}.mlp.{part}_proj.weight": matrix(FEED_FORWARD, HIDDEN) for part in ("up", "gate")}
        tensors[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, FEED_FORWARD)
    for norm in norms:
        tensors |= {f"{norm}.weight": _vector(HIDDEN, 1.0), f"{norm}.bias": _vector(HIDDEN)}
    return _write_model(path, config, vocabulary, tensors)


def write_small_splade(path: Path, *, seed: int = 0) -> Path:
    """A BERT for masked words with the modules of a SparseEncoder, and vocab.txt instead of tokenizer.json."""
    vocabulary = _write_tokenizer_and_modules(path)
    words = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    (path / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(words, key=words.__getitem__)))
    (path / "tokenizer.json").unlink()
    kinds = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    modules = [{"path": where, "type": f"sentence_transformers.models.{kind}"} for where, kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    config = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "num_hidden_layers": LAYERS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    head = "cls.predictions"
    tensors = {
        f"bert.{name}": tensor for name, tensor in _bert_weights(vocabulary, seed).items() if "pooler" not in name
    }
    tensors |= {
        f"{head}.bias": _vector(vocabulary),
        f"{head}.transform.dense.weight": _matrices(seed + 1)(HIDDEN, HIDDEN),
        f"{head}.transform.dense.bias": _vector(HIDDEN),
        f"{head}.transform.LayerNorm.weight": _vector(HIDDEN, 1.0),
        f"{head}.transform.LayerNorm.bias": _vector(HIDDEN),
    }
    return _write_model(path, config, vocabulary, tensors)


def write_small_gte(path: Path, *, seed: int = 0) -> Path:
    """As `write_small_bert`, with GTE's weights and configuration as its authors have them, with a single type."""
    vocabulary = _write_tokenizer_and_modules(path)
    config = {
        "model_type": "new",
        "architectures": ["NewModel"],
        "num_hidden_layers": LAYERS,
        "type_vocab_size": 1,
        "rope_theta": 20000.0,
        "rope_scaling": {"type": "ntk", "factor": 8.0},
    }
    matrix = _matrices(seed)
    tensors = {
        "embeddings.word_embeddings.weight": matrix(vocabulary, HIDDEN),
        "embeddings.token_type_embeddings.weight": matrix(1, HIDDEN),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}"
        norms += [f"{prefix}.attn_ln", f"{prefix}.mlp_ln"]
        for name, rows, columns in (
            ("attention.qkv_proj", 3 * HIDDEN, HIDDEN),
            ("attention.o_proj", HIDDEN, HIDDEN),
            ("mlp.up_gate_proj", 2 * FEED_FORWARD, HIDDEN),
            ("mlp.down_proj", HIDDEN, FEED_FORWARD),
        ):
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns)
            tensors[f"{prefix}.{name}.bias"] = _vector(rows)
        del tensors[f"{prefix}.mlp.up_gate_proj.bias"]
    for norm in norms:
        tensors |= {f"{norm}.weight": _vector(HIDDEN, 1.0), f"{norm}.bias": _vector(HIDDEN)}
    return _write_model(path, config, vocabulary, tensors)


def _write_model(path: Path, config: dict[str, Any], vocabulary: int, weights: Mapping[str, Weights]) -> Path:
    from safetensors.numpy import save_file

    sizes = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "intermediate_size": FEED_FORWARD,
        "max_position_embeddings": POSITIONS,
        "vocab_size": vocabulary,
        "pad_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps({**config, **sizes}))
    save_file(dict(weights), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _write_tokenizer_and_modules(path: Path) -> int:
    """The size of the vocabulary."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    words = [*SPECIALS, *letters, *(f"##{letter}" for letter in letters), *EVERYDAY_WORDS]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "mask_token": "[MASK]", "model_max_length": POSITIONS})
    )
    (path / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True})
    )
    return len(vocabulary)


def _matrices(seed: int) -> Callable[[int, int], Weights]:
    random = np.random.default_rng(seed)
    return lambda rows, columns: (random.standard_normal((rows, columns)) * 0.05).astype(np.float32)


def _vector(size: int, value: float = 0.0) -> Weights:
    return np.full(size, value, dtype=np.float32)


def _modernbert_weights(vocabulary: int, layers: int, seed: int) -> dict[str, Weights]:
    matrix = _matrices(seed)
    tensors = {
        "embeddings.tok_embeddings.weight": matrix(vocabulary, HIDDEN),
        "embeddings.norm.weight": _vector(HIDDEN, 1.0),
        "final_norm.weight": _vector(HIDDEN, 1.0),
    }
    for layer in range(layers):
        prefix = f"layers.{layer}"
        tensors |= {
            f"{prefix}.attn.Wqkv.weight": matrix(3 * HIDDEN, HIDDEN),
            f"{prefix}.attn.Wo.weight": matrix(HIDDEN, HIDDEN),
            f"{prefix}.mlp.Wi.weight": matrix(2 * FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.Wo.weight": matrix(HIDDEN, FEED_FORWARD),
            f"{prefix}.mlp_norm.weight": _vector(HIDDEN, 1.0),
        }
        if layer:
            tensors[f"{prefix}.attn_norm.weight"] = _vector(HIDDEN, 1.0)
    return tensors


def _bert_weights(vocabulary: int, seed: int) -> dict[str, Weights]:
    matrix, vector = _matrices(seed), _vector
    tensors = {
        "embeddings.word_embeddings.weight": matrix(vocabulary, HIDDEN),
        "embeddings.position_embeddings.weight": matrix(POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": matrix(2, HIDDEN),
        "embeddings.LayerNorm.weight": vector(HIDDEN, 1.0),
        "embeddings.LayerNorm.bias": vector(HIDDEN),
        "pooler.dense.weight": matrix(HIDDEN, HIDDEN),
        "pooler.dense.bias": vector(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}"
        for name, rows, columns in (
            ("attention.self.query", HIDDEN, HIDDEN),
            ("attention.self.key", HIDDEN, HIDDEN),
            ("attention.self.value", HIDDEN, HIDDEN),
            ("attention.output.dense", HIDDEN, HIDDEN),
            ("intermediate.dense", FEED_FORWARD, HIDDEN),
            ("output.dense", HIDDEN, FEED_FORWARD),
        ):
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, columns)
            tensors[f"{prefix}.{name}.bias"] = vector(rows)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            tensors[f"{prefix}.{name}.weight"] = vector(HIDDEN, 1.0)
            tensors[f"{prefix}.{name}.bias"] = vector(HIDDEN)
    return tensors
