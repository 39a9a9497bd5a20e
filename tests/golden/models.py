"""Small models that are the same for ever: weights from numpy's frozen generator, tokenizers from files.

Not from torch: its random numbers and transformers' initialisation change between versions, and no torch is needed to
run these tests. What the weights mean is nothing; that they mean the same on every machine is all.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from penstock.tasks import HEAD_OF_TASK, Head, TaskName

TOKENIZERS = Path(__file__).parent / "tokenizers"
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
LABELS = {
    TaskName.TEXT_CLASSIFICATION: ("joy", "love", "anger", "fear"),
    TaskName.TOKEN_CLASSIFICATION: ENTITIES,
    TaskName.ZERO_SHOT_CLASSIFICATION: ("contradiction", "neutral", "entailment"),
    TaskName.TEXT_RANKING: ("relevance",),
}
LOUD = 1.0
QUIET = 0.12
"""Standard deviations: words differ much and layers mix little, so that no answer depends on a tie."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Sizes:
    """How large a model is."""

    width: int = 32
    layers: int = 2
    heads: int = 4
    inner: int = 48
    positions: int = 48
    """The longest sequence: short texts make several windows."""


SMALL = Sizes()


@dataclass(frozen=True)
class Kind:
    """One family: the names that its files use."""

    name: str
    prefix: str
    """Of the classes of transformers: `Bert` of `BertForMaskedLM`."""
    pad: int
    offset: int = 0
    """Positions that are kept free before the first."""
    types: int = 0


BERT = Kind("bert", "Bert", pad=0, types=2)
DISTILBERT = Kind("distilbert", "DistilBert", pad=0)
ROBERTA = Kind("roberta", "Roberta", pad=1, offset=2, types=1)
MPNET = Kind("mpnet", "MPNet", pad=1, offset=2)
KINDS = (BERT, DISTILBERT, ROBERTA, MPNET)

CLASSES = {
    Head.ENCODER: "Model",
    Head.SEQUENCE: "ForSequenceClassification",
    Head.TOKEN: "ForTokenClassification",
    Head.SPAN: "ForQuestionAnswering",
    Head.MASKED_LM: "ForMaskedLM",
}


def write_model(
    path: Path, task: TaskName, kind: Kind = BERT, sizes: Sizes = SMALL, *, pooled: bool = False, seed: int = 0
) -> Path:
    """A model folder that the task fits, as transformers would save it. `pooled`: with sentence-transformers' mean
    pooling and normalisation around it."""
    path.mkdir(parents=True, exist_ok=True)
    for file in sorted((TOKENIZERS / kind.name).iterdir()):
        shutil.copy(file, path)
    _limit_tokenizer(path, sizes)
    head = HEAD_OF_TASK[task]
    labels = LABELS.get(task, ("LABEL_0", "LABEL_1"))
    vocabulary = _vocabulary(path)
    _write(path / "config.json", _config(kind, head, labels, sizes, vocabulary))
    shapes = dict(_tensors(kind, head, len(labels), sizes, vocabulary))
    save_file(
        {name: _weights(name, shape, seed) for name, shape in shapes.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    if pooled:
        _write_pooling(path, sizes)
    return path


def _weights(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Each tensor from its own name: one more tensor changes none of the others."""
    # numpy promises that RandomState's numbers never change; those of its newer generators may.
    draw = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
    values = draw.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return 1 + 0.02 * values if "norm" in name.lower() and name.endswith("weight") else 0.02 * values
    loud = "word_embeddings" in name or name.startswith(("classifier", "qa_outputs"))
    return values * np.float32(LOUD if loud else QUIET)


def _config(kind: Kind, head: Head, labels: tuple[str, ...], sizes: Sizes, vocabulary: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": kind.name,
        "architectures": [kind.prefix + CLASSES[head]],
        "vocab_size": vocabulary,
        "pad_token_id": kind.pad,
        "max_position_embeddings": sizes.positions + kind.offset,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "torch_dtype": "float32",
    }
    if kind is DISTILBERT:
        config |= {"dim": sizes.width, "n_layers": sizes.layers, "n_heads": sizes.heads, "hidden_dim": sizes.inner}
        return config | {"activation": "gelu"}
    config |= {
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.inner,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    if kind.types:
        config["type_vocab_size"] = kind.types
    return config


def _tensors(kind: Kind, head: Head, labels: int, sizes: Sizes, vocabulary: int) -> Shapes:
    base = "" if head is Head.ENCODER else f"{kind.name}."
    for name, shape in _encoder(kind, head, sizes, vocabulary):
        yield base + name, shape
    width = sizes.width
    if head is Head.TOKEN:
        yield from _dense("classifier", width, labels)
    elif head is Head.SPAN:
        yield from _dense("qa_outputs", width, 2)
    elif head is Head.SEQUENCE:
        first, last = {
            BERT: ("", "classifier"), DISTILBERT: ("pre_classifier", "classifier"),
            ROBERTA: ("classifier.dense", "classifier.out_proj"), MPNET: ("classifier.dense", "classifier.out_proj"),
        }[kind]  # fmt: skip
        if first:
            yield from _dense(first, width, width)
        yield from _dense(last, width, labels)
    elif head is Head.MASKED_LM:
        dense, norm, bias = {
            BERT: ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
            DISTILBERT: ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
            ROBERTA: ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
            MPNET: ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
        }[kind]
        yield from _dense(dense, width, width)
        yield from _norm(norm, width)
        yield bias, (vocabulary,)


def _encoder(kind: Kind, head: Head, sizes: Sizes, vocabulary: int) -> Shapes:
    width = sizes.width
    yield "embeddings.word_embeddings.weight", (vocabulary, width)
    yield "embeddings.position_embeddings.weight", (sizes.positions + kind.offset, width)
    if kind.types:
        yield "embeddings.token_type_embeddings.weight", (kind.types, width)
    yield from _norm("embeddings.LayerNorm", width)
    if kind is MPNET:
        yield "encoder.relative_attention_bias.weight", (32, sizes.heads)
    for index in range(sizes.layers):
        yield from _distilbert_layer(index, sizes) if kind is DISTILBERT else _bert_layer(kind, index, sizes)
    if kind is not DISTILBERT and (head is Head.ENCODER or (kind is BERT and head is Head.SEQUENCE)):
        yield from _dense("pooler.dense", width, width)


def _bert_layer(kind: Kind, index: int, sizes: Sizes) -> Shapes:
    layer, width = f"encoder.layer.{index}", sizes.width
    attention = (
        ("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o", "attention.LayerNorm")
        if kind is MPNET
        else (
            *(f"attention.self.{name}" for name in ("query", "key", "value")),
            "attention.output.dense",
            "attention.output.LayerNorm",
        )
    )
    *products, norm = attention
    for name in products:
        yield from _dense(f"{layer}.{name}", width, width)
    yield from _norm(f"{layer}.{norm}", width)
    yield from _dense(f"{layer}.intermediate.dense", width, sizes.inner)
    yield from _dense(f"{layer}.output.dense", sizes.inner, width)
    yield from _norm(f"{layer}.output.LayerNorm", width)


def _distilbert_layer(index: int, sizes: Sizes) -> Shapes:
    layer, width = f"transformer.layer.{index}", sizes.width
    for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
        yield from _dense(f"{layer}.attention.{name}", width, width)
    yield from _norm(f"{layer}.sa_layer_norm", width)
    yield from _dense(f"{layer}.ffn.lin1", width, sizes.inner)
    yield from _dense(f"{layer}.ffn.lin2", sizes.inner, width)
    yield from _norm(f"{layer}.output_layer_norm", width)


def _dense(name: str, before: int, after: int) -> Shapes:
    yield f"{name}.weight", (after, before)
    yield f"{name}.bias", (after,)


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _vocabulary(path: Path) -> int:
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    return int(max(ids)) + 1


def _limit_tokenizer(path: Path, sizes: Sizes) -> None:
    file = path / "tokenizer_config.json"
    _write(file, json.loads(file.read_text(encoding="utf-8")) | {"model_max_length": sizes.positions})


def _write_pooling(path: Path, sizes: Sizes) -> None:
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    _write(
        path / "modules.json",
        [
            {"idx": index, "name": str(index), "path": where, "type": f"sentence_transformers.models.{step}"}
            for index, (where, step) in enumerate(steps)
        ],
    )
    _write(
        path / "1_Pooling" / "config.json",
        {"word_embedding_dimension": sizes.width, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
    )


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
