"""The API of OpenAI: `/v1/embeddings` and `/v1/models`."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np

from penstock.tasks import TaskName
from penstock_runtime.http.api.bodies import answer_response, checked, fields_named, json_response, read_json
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.api.token_ids import ABOUT_IDS, TextsOrIds
from penstock_runtime.http.transport.message import ErrorFormat, Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.embeddings.feature_extraction import AUTO, WIDEST
from penstock_runtime.tasks.fields import Choice, Integer, JsonSchema, Object, Others, Text
from penstock_runtime.tasks.prompts import PROMPT, PROMPT_NOTES

TAG = "OpenAI"


def embeddings_body(limits: RequestLimits) -> Object:
    """The body of `/v1/embeddings`."""
    return Object(
        required={"input": TextsOrIds(limits)},
        optional={
            "model": (Text("the name of a model"), None),
            "encoding_format": (Choice(("float", "base64")), "float"),
            "dimensions": (Integer(1, WIDEST), None),
            "user": (Text("the name of a user"), None),
            **PROMPT,
        },
        notes={
            "model": "Not used: an endpoint has one model.",
            "encoding_format": "base64: little-endian float32 numbers, a third of the size and faster to read.",
            "dimensions": "Keep this many first values (for models trained so).",
            "user": "Not used.",
            "input": ABOUT_IDS,
            **PROMPT_NOTES,
        },
        others=Others.IGNORED,
    )


class OpenAI:
    """The handlers."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        self._embeddings = embeddings_body(limits)
        self._started = int(time.time())

    async def embeddings(self, request: Request) -> Response:
        """`/v1/embeddings`."""
        body = checked(self._embeddings, read_json(request))
        # Length 1, also where the model's files do not ask for it: as OpenAI and text-embeddings-inference do.
        parameters = {"pooling": AUTO, "normalize": True}
        parameters |= {name: body[name] for name in ("dimensions", "prompt_name") if body[name] is not None}
        with fields_named({"inputs": "input", "parameters.": ""}, absent=["truncate"]):
            answer = await self._service.predict(request, body["input"], parameters)
        vectors = answer.value
        data: list[dict[str, Any]] = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(map(_base64, vectors) if body["encoding_format"] == "base64" else vectors)
        ]
        value = {
            "object": "list",
            "data": data,
            "model": self._service.status.name,
            "usage": {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens},
        }
        return answer_response(answer, value)

    def models(self, _: Request) -> Response:
        """`/v1/models`."""
        return json_response({"object": "list", "data": [self._model()], "models": [self._service.status.name]})

    def model(self, request: Request) -> Response:
        """`/v1/models/{model}`."""
        self._service.require_name(request.parameters["model"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        # `name`, `ready` and `models` are what KServe's V1 protocol has on the same paths.
        name = self._service.status.name
        opened = {"id": name, "object": "model", "created": self._started, "owned_by": "penstock"}
        return {**opened, "name": name, "ready": self._service.ready}


def _base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")


MODEL: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "name": {"type": "string"},
        "ready": {"type": "boolean"},
    },
    "required": ["id", "object", "created", "owned_by", "name", "ready"],
}
EMBEDDINGS: JsonSchema = {
    "type": "object",
    "properties": {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "object": {"const": "embedding"},
                    "index": {"type": "integer"},
                    "embedding": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]},
                },
                "required": ["object", "index", "embedding"],
            },
        },
        "model": {"type": "string"},
        "usage": {
            "type": "object",
            "properties": {"prompt_tokens": {"type": "integer"}, "total_tokens": {"type": "integer"}},
            "required": ["prompt_tokens", "total_tokens"],
        },
    },
    "required": ["object", "data", "model", "usage"],
}


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    openai = OpenAI(service, limits)
    return (
        Route(
            "POST", "/v1/embeddings", openai.embeddings, "Texts to vectors, OpenAI's shape", TAG,
            tasks=frozenset({TaskName.FEATURE_EXTRACTION}), inference=True, error_format=ErrorFormat.OPENAI,
            request=embeddings_body(limits).schema() | {"examples": [{"input": "I like you. I love you."}]},
            response=EMBEDDINGS,
        ),
        Route(
            "GET", "/v1/models", openai.models, "The one model", TAG, error_format=ErrorFormat.OPENAI,
            response={
                "type": "object",
                "properties": {
                    "object": {"const": "list"},
                    "data": {"type": "array", "items": MODEL},
                    "models": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["object", "data", "models"],
            },
        ),
        Route(
            "GET", "/v1/models/{model}", openai.model, "The one model", TAG, error_format=ErrorFormat.OPENAI,
            response=MODEL,
        ),
    )  # fmt: skip
