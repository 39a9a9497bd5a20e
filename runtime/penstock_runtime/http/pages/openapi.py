"""The OpenAPI document of one endpoint: made from its routes, its task's schemas and the table of errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from penstock import __version__
from penstock.tasks import TaskName
from penstock_runtime import errors
from penstock_runtime.errors import RequestError
from penstock_runtime.http.api.core.bodies import status_of
from penstock_runtime.http.transport.message import ErrorFormat, Route
from penstock_runtime.tasks.fields import JsonSchema

OF_ANY: tuple[type[RequestError], ...] = (
    errors.MalformedRequest,
    errors.UnsupportedRoute,
    errors.MethodNotAllowed,
    errors.RequestTimeout,
    errors.HeadersTooLarge,
    errors.BodyTooLarge,
    errors.NotReady,
    RequestError,
)
"""Errors of any request."""
OF_BODIES: tuple[type[RequestError], ...] = (
    errors.MalformedBody,
    errors.UnsupportedMediaType,
    errors.InvalidInput,
)
"""Errors of any request with a body."""
OF_INFERENCE: tuple[type[RequestError], ...] = (
    errors.Overloaded,
    errors.InferenceFailed,
    errors.DeadlineExceeded,
)
"""Errors of any request to the model."""

TIMINGS = {
    "x-compute-time": "Pre-processing, forward passes and post-processing of this request, milliseconds.",
    "x-queue-time": "Waiting for a core, milliseconds.",
    "x-tokenization-time": "Tokenising, milliseconds.",
    "x-inference-time": "Forward passes that this request took part in, and GLiNER's head, milliseconds.",
    "x-compute-tokens": "Tokens computed for this request, special ones included; 0 when the answer was remembered.",
    "x-vector-space": "Of vectors: the identifier of their space, then dimensions (d), normalisation (n), prompt (p).",
    "x-artefact": "Of vectors: the first digits of the digest of the artefact that computed them.",
}
"""Headers of every answer of the model."""
OF_VECTORS = ("x-vector-space", "x-artefact")
"""Those of answers with vectors alone."""

ERROR: JsonSchema = {
    "type": "object",
    "properties": {
        "error": {"type": "string", "description": "What is wrong, and where."},
        "error_type": {"type": "string", "description": "For programs; see docs/reference/http.md."},
        "field": {"type": "string", "description": "The field, such as inputs[3]."},
        "remedy": {"type": "string", "description": "What to do next."},
    },
    "required": ["error", "error_type"],
    "additionalProperties": False,
}
OPENAI_ERROR: JsonSchema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


ANTHROPIC_ERROR: JsonSchema = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
ERROR_SCHEMAS = {
    ErrorFormat.PENSTOCK: ("Error", ERROR),
    ErrorFormat.OPENAI: ("OpenAIError", OPENAI_ERROR),
    ErrorFormat.ANTHROPIC: ("AnthropicError", ANTHROPIC_ERROR),
}


def document(routes: Iterable[Route], *, name: str, task: TaskName, wants_token: bool) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    tags: list[str] = []
    for route in routes:
        if route.tag not in tags:
            tags.append(route.tag)
        paths.setdefault(route.path, {}).setdefault(
            route.method.lower(), _operation(route, name, wants_token=wants_token)
        )
    components: dict[str, Any] = {"schemas": dict(ERROR_SCHEMAS.values())}
    if wants_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"{name}: {task.value}",
            "version": __version__,
            "description": f"A Penstock endpoint for {task.value}. Times in headers are milliseconds.",
        },
        "tags": [{"name": tag} for tag in tags],
        "paths": paths,
        "components": components,
    }


def error_types(route: Route, *, wants_token: bool) -> list[type[RequestError]]:
    """The errors of a route, sorted by status."""
    found = [*OF_ANY, *route.errors]
    if route.request is not None:
        found += OF_BODIES
    if route.inference:
        found += OF_INFERENCE
    if wants_token and not route.public:
        found.append(errors.Unauthorized)
    return sorted(set(found), key=lambda error: (status_of(error, route.error_format), error.error_type))


def _operation(route: Route, name: str, *, wants_token: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": [*_path_parameters(route.path, name), *_header_parameters(route)],
        "responses": _responses(route, wants_token=wants_token),
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _content(route.request)}}
    if wants_token and not route.public:
        operation["security"] = [{"token": []}]
    return operation


def _content(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with its examples where OpenAPI wants them."""
    examples = schema.get("examples", [])
    content: dict[str, Any] = {"schema": {key: value for key, value in schema.items() if key != "examples"}}
    if examples:
        content["examples"] = {f"example_{index + 1}": {"value": value} for index, value in enumerate(examples)}
    return content


def _path_parameters(path: str, name: str) -> Iterable[dict[str, Any]]:
    for parameter in re.findall(r"\{(\w+)\}", path):
        example = "1" if parameter == "version" else name
        yield {
            "name": parameter, "in": "path", "required": True, "example": example,
            "schema": {"type": "string", "minLength": 1},
        }  # fmt: skip


def _header_parameters(route: Route) -> Iterable[dict[str, Any]]:
    if route.inference:
        yield {
            "name": "x-deadline-ms", "in": "header", "required": False,
            "description": "Do not start later than this many milliseconds from now: answer 504 instead.",
            "schema": {"type": "number", "exclusiveMinimum": 0},
        }  # fmt: skip


def _responses(route: Route, *, wants_token: bool) -> dict[str, Any]:
    content = {route.content_type: _content(route.response)}
    if route.binary:
        content["application/octet-stream"] = {"schema": {}}
    if route.streams:
        content[route.stream_type] = {"schema": {}}
    success: dict[str, Any] = {"description": "The answer", "content": content}
    if route.inference:
        success["headers"] = {
            header: {
                "description": text,
                "required": not route.streams and header not in OF_VECTORS,
                "schema": {"type": "string"}
                if header in OF_VECTORS
                else {"type": "integer" if header.endswith("tokens") else "number", "minimum": 0},
            }
            for header, text in TIMINGS.items()
        }
    responses: dict[str, Any] = {"200": success}
    reference, _ = ERROR_SCHEMAS[route.error_format]
    for error in error_types(route, wants_token=wants_token):
        status = str(status_of(error, route.error_format))
        text = f"{error.error_type}: {sentence(error)}"
        if status in responses:
            responses[status]["description"] += f" {text}"
        else:
            schema = {"$ref": f"#/components/schemas/{reference}"}
            responses[status] = {"description": text, "content": {"application/json": {"schema": schema}}}
    return responses


def sentence(error: type[RequestError]) -> str:
    """The meaning of an error: the first paragraph of its class."""
    if error is RequestError:
        return "The server failed on this request; its log has the details under the request id."
    return " ".join((error.__doc__ or "").split("\n\n")[0].split())
