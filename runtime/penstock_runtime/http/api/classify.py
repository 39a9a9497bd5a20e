"""`/classify`: classifiers for gateways of language models, such as guards, intents and personal data.

`{"inputs": text}` is what vLLM's semantic router posts (`http_classify`). A text classifier answers with all its labels
(`label_distribution.v1`), or its one score (`score.v1`); a token classifier with spans of the text (`token_spans.v1`).
`{"input": text}` is the API of vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.api.bodies import answer_response, checked, fields_named, read_json
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.classification import text_classification
from penstock_runtime.tasks.classification.text_classification import Function
from penstock_runtime.tasks.extraction import token_classification, zero_shot_token_classification
from penstock_runtime.tasks.extraction.entities import Aggregation
from penstock_runtime.tasks.fields import Boolean, Choice, Either, JsonSchema, ListOf, Object, Others, Text

TAG = "LLM gateways"
SPAN_TASKS = frozenset({TaskName.TOKEN_CLASSIFICATION, TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION})
TASKS = SPAN_TASKS | {TaskName.TEXT_CLASSIFICATION}


def distribution_body(limits: RequestLimits) -> Object:
    """The semantic router's body for a text classifier."""
    return Object(
        required={"inputs": text_classification.inputs(limits)},
        optional={"parameters": (_ignoring_others(text_classification.PARAMETERS), {})},
        others=Others.IGNORED,
    )


def spans_body(limits: RequestLimits) -> Object:
    """The semantic router's body for a token classifier."""
    kinds = token_classification.parameter_kinds(limits)
    groups = tuple(str(way) for way in Aggregation if way is not Aggregation.NONE)
    strategy = {"aggregation_strategy": (Choice(groups), str(Aggregation.SIMPLE))}
    parameters = Object(required={}, optional={**kinds.optional, **strategy}, notes=kinds.notes, others=Others.IGNORED)
    return Object(
        required={"inputs": token_classification.inputs(limits)},
        optional={"parameters": (parameters, parameters.parse({}, "parameters"))},
        others=Others.IGNORED,
    )


def labelled_spans_body(limits: RequestLimits) -> Object:
    """The same for the labels of a request."""
    kinds = zero_shot_token_classification.parameter_kinds(limits)
    return Object(
        required={"inputs": token_classification.inputs(limits), "parameters": _ignoring_others(kinds)},
        others=Others.IGNORED,
    )


def vllm_body(limits: RequestLimits) -> Object:
    """The body of vLLM's `/classify`."""
    return Object(
        required={"input": Either((Text(), ListOf(Text(), limits.items)))},
        optional={"model": (Text("the name of a model"), None), "use_activation": (Boolean(), None)},
        notes={"model": "Not used: an endpoint has one model.", "use_activation": "false: logits. Default: true."},
        others=Others.IGNORED,
    )


def _ignoring_others(kinds: Object) -> Object:
    return Object(required=kinds.required, optional=kinds.optional, notes=kinds.notes, others=Others.IGNORED)


class Classify:
    """The handler."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        self.distribution_body = distribution_body(limits)
        zero_shot = service.status.task is TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION
        self.spans_body = labelled_spans_body(limits) if zero_shot else spans_body(limits)
        self.vllm_body = vllm_body(limits)

    async def classify(self, request: Request) -> Response:
        """Labels or spans, in the form that the body asks for."""
        body = read_json(request)
        task = self._service.status.task
        spans = task in SPAN_TASKS
        if isinstance(body, Mapping) and "input" in body and "inputs" not in body:
            if spans:
                raise InvalidInput(
                    f"'input' is for classifiers of texts, and this endpoint does {task.value}",
                    field="input",
                    remedy="Rename 'input' to 'inputs' to get spans",
                )
            return await self._vllm(request, checked(self.vllm_body, body))
        given = checked(self.spans_body if spans else self.distribution_body, body)
        inputs, parameters = given["inputs"], given["parameters"]
        answer = await self._service.predict(request, inputs, _given(parameters))
        value = _spans(answer, inputs) if spans else _distributions(answer)
        return answer_response(answer, value if isinstance(inputs, list) else value[0])

    async def _vllm(self, request: Request, body: dict[str, Any]) -> Response:
        parameters = {} if body["use_activation"] is not False else {"function_to_apply": str(Function.NONE)}
        with fields_named({"inputs": "input"}, absent=["truncate"]):
            answer = await self._service.predict(request, body["input"], parameters)
        order = {label: index for index, label in enumerate(self._service.status.labels)}
        data = []
        for index, found in enumerate(answer.value):
            scores = sorted(found, key=lambda one: order.get(str(one["label"]), len(order)))
            probabilities = [one["score"] for one in scores]
            data.append(
                {
                    "index": index,
                    "label": str(found[0]["label"]),
                    "probs": probabilities,
                    "num_classes": len(probabilities),
                }
            )
        value = {
            "id": f"classify-{request.identifier.decode('ascii')}",
            "object": "list",
            "created": int(time.time()),
            "model": self._service.status.name,
            "data": data,
            "usage": {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens, "completion_tokens": 0},
        }
        return answer_response(answer, value)


def _given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


def _distributions(answer: Answer) -> list[list[dict[str, Any]]]:
    """For each text its labels as strings, with their scores."""
    return [[{"label": str(one["label"]), "score": one["score"]} for one in found] for found in answer.value]


def _spans(answer: Answer, inputs: str | list[str]) -> list[dict[str, Any]]:
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


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    classify = Classify(service, limits)
    example: JsonSchema = {"inputs": "I like you. I love you."}
    if service.status.task is TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION:
        example = dict(zero_shot_token_classification.EXAMPLES[0])
    if service.status.task in SPAN_TASKS:
        request, answer = classify.spans_body.schema(), [SPANS, {"type": "array", "items": SPANS}]
    else:
        request = {"anyOf": [classify.distribution_body.schema(), classify.vllm_body.schema()]}
        answer = [LABELS, {"type": "array", "items": LABELS}, VLLM]
    return (
        Route(
            "POST", "/classify", classify.classify, "Labels or spans, for LLM gateways", TAG, tasks=TASKS,
            inference=True, request=request | {"examples": [example]},
            response={"anyOf": answer},
        ),
    )  # fmt: skip
