"""`/classify`: classifiers for gateways of language models, such as guards, intents and personal data.

`{"inputs": text}` is what vLLM's semantic router posts (`http_classify`). A text classifier answers with all its labels
(`label_distribution.v1`), or its one score (`score.v1`); a token classifier with spans of the text (`token_spans.v1`).
`{"input": text}` is the API of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.coverage import Coverage
from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.api.core.bodies import answer_response, checked, fields_named, read_json
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.guard.routes import TAG
from penstock_runtime.http.api.guard.verdicts import windows_of
from penstock_runtime.http.api.vllm.answers import LABELS, SPANS, VLLM, distributions, spans_of, vllm_answer
from penstock_runtime.http.api.vllm.requests import distribution_body, labelled_spans_body, spans_body, vllm_body
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.classification.text_classification import Function
from penstock_runtime.tasks.extraction import zero_shot_token_classification
from penstock_runtime.tasks.fields import JsonSchema

SPAN_TASKS = frozenset({TaskName.TOKEN_CLASSIFICATION, TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION})
TASKS = SPAN_TASKS | {TaskName.TEXT_CLASSIFICATION}


class Classify:
    """The handler."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        self.distribution_body = distribution_body(limits)
        zero_shot = service.status.task is TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION
        self.spans_body = labelled_spans_body(limits) if zero_shot else spans_body(limits)
        self.vllm_body = vllm_body(limits)

    async def classify(self, request: Request) -> Response:
        """Labels or spans, in the form for the body."""
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
        answer = await self._predict(request, inputs, _given(parameters))
        value = spans_of(answer, inputs) if spans else distributions(answer)
        return answer_response(answer, value if isinstance(inputs, list) else value[0])

    async def _vllm(self, request: Request, body: dict[str, Any]) -> Response:
        parameters = {} if body["use_activation"] is not False else {"function_to_apply": str(Function.NONE)}
        with fields_named({"inputs": "input"}, absent=["truncate"]):
            answer = await self._predict(request, body["input"], parameters)
        return vllm_answer(self._service, request, answer)

    async def _predict(self, request: Request, inputs: Any, parameters: dict[str, Any]) -> Answer:
        """With the policy's windows for long texts, if the endpoint has one."""
        policy, task = self._service.status.guard_policy, self._service.status.task
        texts = inputs if isinstance(inputs, list) else [inputs]
        if policy is not None and task is not TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION and "stride" not in parameters:
            windows = windows_of(policy, self._service.status.limits.get("max_input_tokens", 0))
            if task is TaskName.TEXT_CLASSIFICATION:
                # Of one window, so that the scores still add up to 1, as the semantic router requires.
                windows["window_labels"] = list(policy.labels)
            if all(isinstance(one, str) for one in texts):
                parameters = {**windows, **parameters}
        answer = await self._service.predict(request, inputs, parameters)
        if answer.truncated:
            request.coverage = Coverage.PARTIAL
        return answer


def _given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


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
            inference=True, classifies=True, request=request | {"examples": [example]},
            response={"anyOf": answer},
        ),
    )  # fmt: skip
