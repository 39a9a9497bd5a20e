"""`POST /predict` and `POST /`: the format of Hugging Face's tasks, {"inputs", "parameters"?, "options"?}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput, PromptTooLong, UnsupportedOption
from penstock_runtime.http.api.bodies import answer_response, missing_field, not_an_object, read_json, unknown_field
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.factory import request_schema, response_schema
from penstock_runtime.tasks.fields import JsonSchema

TAG = "Hugging Face"
GENERATION_ERRORS = (PromptTooLong, UnsupportedOption)
OPTIONS = ("use_cache", "wait_for_model", "use_gpu", "dont_load_model")
"""Options of Hugging Face's hosted API. Its clients send them; they have no effect here."""


HUB = re.compile(rb"\bhf_hub/(\d+)\.(\d+)")
"""The version in the user-agent of huggingface_hub's client."""
HUB_OF_LISTS = (1, 2)
"""From this version on, huggingface_hub expects labels of zero-shot-classification as a list of {label, score}; older
ones the object of transformers' pipeline, with `labels` and `scores`."""


@dataclass(frozen=True)
class Envelope:
    """The body of a request: inputs, parameters and options."""

    schema: JsonSchema
    """The task's schema: inputs and parameters."""
    top_level_parameters: bool = False
    """Parameters may also be on the level of `inputs`, where the official client puts those of feature-extraction."""

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The task's parameters by name."""
        return frozenset(self.schema["properties"]["parameters"]["properties"])

    @cached_property
    def takes_text(self) -> bool:
        """A JSON string is accepted as inputs, as in the old format of the hosted API."""
        return "parameters" not in self.schema["required"] and _accepts_text(self.schema["properties"]["inputs"])

    def document(self) -> JsonSchema:
        """The complete schema of the body."""
        properties = dict(self.schema["properties"])
        properties["options"] = {
            "type": ["object", "null"],
            "description": "Of Hugging Face's hosted API; accepted and without effect.",
            "properties": {name: {} for name in OPTIONS},
            "additionalProperties": False,
        }
        if self.top_level_parameters:
            properties |= self.schema["properties"]["parameters"]["properties"]
        whole = self.schema | {"properties": properties}
        if not self.takes_text:
            return whole
        examples = whole.pop("examples", [])
        text = {"type": "string", "minLength": 1, "description": "The inputs alone."}
        return {"anyOf": [whole, text], "examples": examples}

    def open(self, body: Any) -> tuple[Any, Mapping[str, Any]]:
        """Inputs and parameters of a body; InvalidInput for any other content."""
        if isinstance(body, str) and self.takes_text:
            return body, {}
        if not isinstance(body, dict):
            raise not_an_object(body, "body", 'Send {"inputs": …}')
        if "inputs" not in body:
            raise missing_field("inputs", (name for name in body if name not in self.parameters))
        if len(body) == 1:
            return body["inputs"], {}
        parameters = body.get("parameters")
        if parameters is None:
            parameters = {}
        elif not isinstance(parameters, dict):
            raise not_an_object(parameters, "parameters", "Give an object of parameters, or leave it out")
        top_level = {}
        for name, value in body.items():
            if name == "options":
                _check_options(value)
            elif name not in {"inputs", "parameters"}:
                self._check_top_level(name, body, parameters)
                top_level[name] = value
        return body["inputs"], {**parameters, **top_level} if top_level else parameters

    def _check_top_level(self, name: str, body: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        if name not in self.parameters:
            free = [known for known in ("parameters", "options", *sorted(self.parameters)) if known not in body]
            raise unknown_field(name, free, ["inputs", "parameters", "options"])
        if not self.top_level_parameters:
            raise InvalidInput(
                f"'{name}' is a parameter", field=name, remedy=f"Put it into 'parameters': {{\"{name}\": …}}"
            )
        if name in parameters:
            raise InvalidInput(f"'{name}' is both next to 'inputs' and in 'parameters'", field=name, remedy="Give one")


def _accepts_text(schema: JsonSchema) -> bool:
    return schema.get("type") == "string" or any(_accepts_text(one) for one in schema.get("anyOf", ()))


def _check_options(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise not_an_object(value, "options", "Leave it out")
    for name in value:
        if name not in OPTIONS:
            raise unknown_field(name, [n for n in OPTIONS if n not in value], OPTIONS, what="option")


class Predict:
    """The handlers."""

    def __init__(self, service: ModelService, envelope: Envelope) -> None:
        self._service = service
        self._envelope = envelope

    async def predict(self, request: Request) -> Response:
        """The output of the transformers pipeline, which Hugging Face's clients parse."""
        inputs, parameters = self._envelope.open(read_json(request))
        answer = await self._service.predict(request, inputs, parameters)
        value = answer.value
        if self._service.status.task is TaskName.ZERO_SHOT_CLASSIFICATION and expects_lists(request):
            value = _pairs(value) if isinstance(value, dict) else [_pairs(one) for one in value]
        return answer_response(answer, value)


def expects_lists(request: Request) -> bool:
    """The client is a huggingface_hub that expects lists of labels."""
    found = HUB.search(request.headers.get(b"user-agent", b""))
    return found is not None and (int(found[1][:9]), int(found[2][:9])) >= HUB_OF_LISTS


def _pairs(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    scores = zip(answer["labels"], answer["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in scores]


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    task = service.status.task
    envelope = Envelope(request_schema(task, limits), top_level_parameters=task is TaskName.FEATURE_EXTRACTION)
    predict = Predict(service, envelope)
    return tuple(
        Route(
            "POST", path, predict.predict, f"Ask the model: {task.value}", TAG, inference=True,
            request=envelope.document(), response=response_schema(task),
            errors=GENERATION_ERRORS if task is TaskName.TEXT_GENERATION else (),
        )
        # On the root, text-generation answers as text-generation-inference does.
        for path in (("/predict",) if task is TaskName.TEXT_GENERATION else ("/predict", "/"))
    )  # fmt: skip
