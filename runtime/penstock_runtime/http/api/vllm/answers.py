"""Answers of `/classify`: labels of texts, or spans."""

from __future__ import annotations

import time
from typing import Any

from penstock_runtime.http.api.core.bodies import answer_response
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.tasks.fields import JsonSchema


def distributions(answer: Answer) -> list[list[dict[str, Any]]]:
    """For each text its labels as strings, with their scores."""
    return [[{"label": str(one["label"]), "score": one["score"]} for one in found] for found in answer.value]


def spans_of(answer: Answer, inputs: str | list[str]) -> list[dict[str, Any]]:
    """For each text its spans, and where it was cut. Offsets count code points, and `text` is the text between them."""
    texts, found = (inputs, answer.value) if isinstance(inputs, list) else ([inputs], [answer.value])
    cuts = answer.cut_at or [None] * len(texts)
    answers: list[dict[str, Any]] = []
    for text, entities, cut in zip(texts, found, cuts, strict=True):
        end = len(text) if cut is None else cut
        spans = [
            {
                "label": one["entity_group"],
                # A mean of float32 scores may be above 1 by rounding.
                "score": min(one["score"], 1.0),
                "text": text[one["start"] : one["end"]],
                "start": one["start"],
                "end": one["end"],
            }
            for one in entities
            if one["start"] < one["end"] <= end
        ]
        answers.append({"spans": spans} if cut is None else {"spans": spans, "truncated_at": cut})
    return answers


def vllm_answer(service: ModelService, request: Request, answer: Answer) -> Response:
    """The answer of vLLM's `/classify`: for each text its best label and all probabilities, in the model's order."""
    order = {label: index for index, label in enumerate(service.status.labels)}
    data = []
    for index, found in enumerate(answer.value):
        scores = sorted(found, key=lambda one: order.get(str(one["label"]), len(order)))
        probabilities = [one["score"] for one in scores]
        data.append(
            {"index": index, "label": str(found[0]["label"]), "probs": probabilities, "num_classes": len(probabilities)}
        )
    value = {
        "id": f"classify-{request.identifier.decode('ascii')}",
        "object": "list",
        "created": int(time.time()),
        "model": service.status.name,
        "data": data,
        "usage": {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens, "completion_tokens": 0},
    }
    return answer_response(answer, value)


LABELS: JsonSchema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"label": {"type": "string"}, "score": {"type": "number"}},
        "required": ["label", "score"],
    },
}
SPANS: JsonSchema = {
    "type": "object",
    "properties": {
        "spans": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "label": {"type": "string"},
                    "score": {"type": "number", "minimum": 0, "maximum": 1},
                    "text": {"type": "string"},
                    "start": {"type": "integer", "minimum": 0},
                    "end": {"type": "integer", "minimum": 1},
                },
                "required": ["label", "score", "text", "start", "end"],
            },
        },
        "truncated_at": {"type": "integer", "minimum": 0, "description": "Code points that were read, if not all."},
    },
    "required": ["spans"],
}
VLLM: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "list"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "index": {"type": "integer"},
                    "label": {"type": "string"},
                    "probs": {"type": "array", "items": {"type": "number"}},
                    "num_classes": {"type": "integer"},
                },
                "required": ["index", "label", "probs", "num_classes"],
            },
        },
        "usage": {"type": "object"},
    },
    "required": ["id", "object", "created", "model", "data", "usage"],
}
