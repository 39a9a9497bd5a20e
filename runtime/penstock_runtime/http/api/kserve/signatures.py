"""Conversion between each task's requests and answers and tensors of the Open Inference Protocol.

Tasks with numbers as answers give tensors of numbers; other tasks give one JSON text for each input, as `/predict`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.api.core.bodies import dumps
from penstock_runtime.http.api.kserve.tensors import OutputTensor, TensorSpec

TEXT = TensorSpec("text", "BYTES", (-1,))
ANSWER = TensorSpec("answer", "BYTES", (-1,))
SCORES = TensorSpec("score", "FP32", (-1,))
TEXTS = {r"inputs(?:\[(\d+)\])?": "text"}
"""Path of the texts of most tasks."""


@dataclass(frozen=True)
class Signature:
    """Tensors of a task's request and answer."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    to_inputs: Callable[[Mapping[str, list[str]]], tuple[Any, dict[str, Any]]]
    """Converts texts by tensor name to the task's inputs, and to parameters that are sent as tensors."""
    to_outputs: Callable[[Any, int], list[OutputTensor]]
    """Converts the answer and the number of texts to tensors."""
    places: Mapping[str, str]
    """Patterns of the task's field paths, with the index of an element, and the tensor of that field."""

    def place(self, field: str, order: Sequence[str]) -> str:
        """The client's path of a field of the task: `inputs[0].data[2]`. `order`: tensors of its request."""
        for pattern, name in self.places.items():
            found = re.fullmatch(pattern, field)
            if found is None:
                continue
            tensor = f"inputs[{order.index(name)}]"
            single = any(spec.name == name and spec.shape == (1,) for spec in self.inputs)
            element = "0" if single else found[1]
            return tensor if element is None else f"{tensor}.data[{element}]"
        return field


def _texts(tensors: Mapping[str, list[str]]) -> tuple[Any, dict[str, Any]]:
    return tensors["text"], {}


def _similarity(tensors: Mapping[str, list[str]]) -> tuple[Any, dict[str, Any]]:
    return {"source_sentence": _single(tensors, "source_sentence"), "sentences": tensors["sentences"]}, {}


def _ranking(tensors: Mapping[str, list[str]]) -> tuple[Any, dict[str, Any]]:
    query = _single(tensors, "query")
    return [[query, text] for text in tensors["texts"]], {}


def _questions(tensors: Mapping[str, list[str]]) -> tuple[Any, dict[str, Any]]:
    questions, contexts = tensors["question"], tensors["context"]
    if len(questions) != len(contexts):
        raise InvalidInput(
            f"there are {len(questions)} questions and {len(contexts)} contexts",
            field="inputs",
            remedy="Send a context for each question",
        )
    return [{"question": one, "context": other} for one, other in zip(questions, contexts, strict=True)], {}


def _zero_shot(tensors: Mapping[str, list[str]]) -> tuple[Any, dict[str, Any]]:
    return tensors["text"], {"candidate_labels": tensors["candidate_labels"]}


def _single(tensors: Mapping[str, list[str]], name: str) -> str:
    if len(tensors[name]) != 1:
        raise InvalidInput(
            f"input {name} has {len(tensors[name])} elements, not one", field="inputs", remedy="Send one"
        )
    return tensors[name][0]


def _vectors(value: Any, count: int) -> list[OutputTensor]:
    if isinstance(value, dict):
        raise InvalidInput(
            "the answer has a field for each output, and a tensor holds one",
            field="parameters.outputs",
            remedy="Leave the parameter outputs out, or send the request to /predict",
        )
    if isinstance(value, list):
        if not isinstance(value[0], np.ndarray):
            raise InvalidInput(
                "this model's vectors are sparse, and a tensor holds dense ones",
                field="parameters.sparse_format",
                remedy="Set the parameter sparse_format to dense, or send the request to /embed_sparse",
            )
        if len(value) > 1:
            raise InvalidInput(
                "vectors of single tokens fit into a tensor for one text only",
                field="inputs",
                remedy="Send one text at a time, or set the parameter pooling",
            )
        value = value[0]
    vectors = np.asarray(value, dtype=np.float32)
    _ = count
    return [OutputTensor("embedding", vectors.shape, numbers=vectors)]


def _scores(value: Any, count: int) -> list[OutputTensor]:
    scores = np.asarray(value, dtype=np.float32)
    return [OutputTensor("score", (count,) if scores.size == count else scores.shape, numbers=scores)]


def _labels(value: Any, count: int) -> list[OutputTensor]:
    """Answers as [{label, score}] or {labels, scores} for each text."""
    rows = [
        (row["labels"], row["scores"])
        if isinstance(row, dict)
        else ([one["label"] for one in row], [one["score"] for one in row])
        for row in value
    ]
    shape = (count, len(rows[0][0]))
    return [
        OutputTensor("label", shape, texts=[str(label) for labels, _ in rows for label in labels]),
        OutputTensor("score", shape, numbers=np.asarray([scores for _, scores in rows], dtype=np.float32)),
    ]


def _json(value: Any, count: int) -> list[OutputTensor]:
    return [OutputTensor("answer", (count,), texts=[dumps(one).decode() for one in value])]


LABELS = (TensorSpec("label", "BYTES", (-1, -1)), TensorSpec("score", "FP32", (-1, -1)))
SIGNATURES: dict[TaskName, Signature] = {
    TaskName.FEATURE_EXTRACTION: Signature(
        (TEXT,), (TensorSpec("embedding", "FP32", (-1, -1)),), _texts, _vectors, TEXTS
    ),
    TaskName.SENTENCE_SIMILARITY: Signature(
        (TensorSpec("source_sentence", "BYTES", (1,)), TensorSpec("sentences", "BYTES", (-1,))),
        (SCORES,), _similarity, _scores,
        {r"inputs\.source_sentence": "source_sentence", r"inputs\.sentences(?:\[(\d+)\])?": "sentences"},
    ),
    TaskName.TEXT_RANKING: Signature(
        (TensorSpec("query", "BYTES", (1,)), TensorSpec("texts", "BYTES", (-1,))), (SCORES,), _ranking, _scores,
        {r"inputs\[\d+\]\[0\]": "query", r"inputs(?:\[(\d+)\](?:\[1\])?)?": "texts"},
    ),
    TaskName.TEXT_CLASSIFICATION: Signature((TEXT,), LABELS, _texts, _labels, TEXTS),
    TaskName.ZERO_SHOT_CLASSIFICATION: Signature(
        (TEXT, TensorSpec("candidate_labels", "BYTES", (-1,))), LABELS, _zero_shot, _labels,
        {**TEXTS, r"parameters\.candidate_labels(?:\[(\d+)\])?": "candidate_labels"},
    ),
    TaskName.TOKEN_CLASSIFICATION: Signature((TEXT,), (ANSWER,), _texts, _json, TEXTS),
    TaskName.QUESTION_ANSWERING: Signature(
        (TensorSpec("question", "BYTES", (-1,)), TensorSpec("context", "BYTES", (-1,))), (ANSWER,), _questions, _json,
        {r"inputs\[(\d+)\]\.question": "question", r"inputs(?:\[(\d+)\]\.context)?": "context"},
    ),
    TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION: Signature(
        (TEXT, TensorSpec("candidate_labels", "BYTES", (-1,))), (ANSWER,), _zero_shot, _json,
        {**TEXTS, r"parameters\.candidate_labels(?:\[(\d+)\])?": "candidate_labels"},
    ),
    TaskName.FILL_MASK: Signature((TEXT,), (ANSWER,), _texts, _json, TEXTS),
    TaskName.TEXT_GENERATION: Signature((TEXT,), (ANSWER,), _texts, _json, TEXTS),
}  # fmt: skip
"""Signatures by task."""
