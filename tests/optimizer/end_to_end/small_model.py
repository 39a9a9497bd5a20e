"""A BERT of two small layers with random weights, and a real tokenizer: optimised in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock_optimizer.load.texts import EVERYDAY_WORDS

HIDDEN, LAYERS, HEADS, FEED_FORWARD, POSITIONS = 128, 2, 4, 256, 64
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_small_bert(path: Path, *, seed: int = 0) -> Path:
    """Write the folder as transformers' save_pretrained would, without torch: plain safetensors."""
    from safetensors.numpy import save_file

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
    (path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "bert",
                "architectures": ["BertModel"],
                "hidden_size": HIDDEN,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "intermediate_size": FEED_FORWARD,
                "max_position_embeddings": POSITIONS,
                "type_vocab_size": 2,
                "vocab_size": len(vocabulary),
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-12,
                "pad_token_id": 0,
            }
        )
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
    save_file(_weights(len(vocabulary), seed), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _weights(vocabulary: int, seed: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return (random.standard_normal((rows, columns)) * 0.05).astype(np.float32)

    def vector(size: int, value: float = 0.0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.full(size, value, dtype=np.float32)

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
