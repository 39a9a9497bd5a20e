"""Bodies of requests and responses: JSON to checked values, answers and errors to JSON.

Every refusal names the field and a remedy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import orjson

from penstock.errors import closest
from penstock_runtime.errors import (
    InvalidInput,
    MalformedBody,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unauthorized,
    UnsupportedMediaType,
)
from penstock_runtime.http.transport.message import ErrorFormat, Request, Response
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.tasks.fields import FieldKind, JsonSchema, json_words, shortened_name

WRITTEN_LEVELS = 254
"""Levels of nesting that orjson writes. It reads 1,024."""
MOST_LEVELS = 200
"""Levels of nesting of a body. An answer may repeat a part of the body, some levels deeper."""
MOST_VALUES = 200_000
"""Values of a body. They take 7 ms to parse, in which nothing else is served; 900,000 numbers in 1.9 MB take 30 ms. The
queue has room for fewer token ids."""
LARGE_FLOATS = 16_384
"""An answer with more numbers is written in pieces: these take 2 ms."""
PIECE_SECONDS = 0.0005
LOOKED_AT = 100
"""Fields of a body that are searched for a mistyped name: there may be a hundred thousand."""
JSON = frozenset({"application/json"})
PLAIN = b"text/plain; charset=utf-8"
JSON_REMEDY = "Send JSON with the header content-type: application/json"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status; other 4xx are `invalid_request_error`, 5xx `api_error`."""
OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's error types by status; other 4xx are `invalid_request_error`, 5xx `server_error`."""


def read_json(request: Request, kinds: Collection[str] = JSON) -> Any:
    """Parse the body. `kinds`: accepted content types, in addition to those that end in +json.

    UnsupportedMediaType for another content type or a compressed body; MalformedBody names line and column.
    Lone surrogates, NaN and Infinity are not JSON. Of duplicate keys the last one counts.
    """
    content_type = request.headers.get(b"content-type", b"application/json")
    if content_type != b"application/json":
        _check_content_type(content_type, kinds)
    refuse_compressed(request)
    value = parse_json(request.body)
    if isinstance(value, dict):
        _read_lane(request, value)
    return value


def _read_lane(request: Request, body: Mapping[str, Any]) -> None:
    """Note whether a body asks for the bulk lane: OpenAI's `service_tier` flex, or vLLM's `priority` above 0."""
    tier, priority = body.get("service_tier"), body.get("priority")
    request.tier = tier if isinstance(tier, str) else ""
    request.asks_for_bulk = tier == "flex" or (type(priority) is int and priority > 0)


def tier_of(request: Request) -> dict[str, str]:
    """The field `service_tier` of an answer in OpenAI's form, if the request had one: the lane that it was in."""
    if not request.tier:
        return {}
    return {"service_tier": "flex" if request.is_bulk else "default"}


def parse_json(data: bytes) -> Any:
    """The value of a JSON text. MalformedBody names line and column, or the limit of `MOST_LEVELS` or `MOST_VALUES`."""
    if len(data) > 2 * MOST_VALUES and _has_more_values(data):
        raise MalformedBody(
            f"the body has more than {MOST_VALUES:,} values", remedy="Send fewer texts or token ids at a time"
        )
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _malformed(data, error) from None
    if _holds(data, b"[", MOST_LEVELS // 2) or _holds(data, b"{", MOST_LEVELS // 2):
        outer = value
        for _ in range(WRITTEN_LEVELS - MOST_LEVELS):
            outer = [outer]
        try:
            orjson.dumps(outer)  # several times faster than a walk in Python
        except orjson.JSONEncodeError:
            raise MalformedBody(
                f"the body is nested too deeply: more than {MOST_LEVELS} levels", remedy="Send a flatter one"
            ) from None
    return value


def _holds(data: bytes, byte: bytes, count: int) -> bool:
    """Whether a byte occurs so often. `bytes.count` takes longer than the parser."""
    at = -1
    for _ in range(count):
        at = data.find(byte, at + 1)
        if at < 0:
            return False
    return True


def _has_more_values(data: bytes) -> bool:
    """Whether a JSON text has more than `MOST_VALUES` values, by the commas outside of strings."""
    found = np.frombuffer(data, np.uint8)
    # In pieces that stay in the cache: ten times as fast.
    pieces = (found[at : at + 2**16] for at in range(0, len(found), 2**16))
    if sum(int(np.count_nonzero(piece == ord(","))) for piece in pieces) < MOST_VALUES:
        return False
    found = np.frombuffer(data.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    outside = np.cumsum(found == ord('"'), dtype=np.uint8) % 2 == 0
    return int(np.count_nonzero((found == ord(",")) & outside)) >= MOST_VALUES


def refuse_compressed(request: Request) -> None:
    """UnsupportedMediaType for a compressed body."""
    if b"content-encoding" in request.headers:
        encoding = request.headers[b"content-encoding"].decode("latin-1").strip().lower()
        if encoding not in {"", "identity"}:
            raise UnsupportedMediaType(f"the body is compressed ({encoding})", remedy="Send it uncompressed")


def _malformed(body: bytes, error: orjson.JSONDecodeError) -> MalformedBody:
    """The error for a body that is not JSON."""
    if not body:
        return MalformedBody("the body is empty", remedy='Send JSON such as {"inputs": "some text"}')
    reason = error.msg.split(": line", 1)[0]
    remedy = JSON_REMEDY
    if reason in {"depth limit exceeded", "failed to allocate memory"}:
        # orjson reports the second for brackets that are never closed: its buffer depends on the body's length.
        reason = "it is nested too deeply"
    elif "surrogate" in reason and "UTF-8" not in reason:
        remedy = "Send characters outside the basic plane as a pair of escapes, or as UTF-8"
    elif "BOM" in reason:
        remedy = "Begin the body with the JSON, without a byte order mark"
    elif "UTF-8" in reason:
        remedy = "Encode the body as UTF-8"
    elif "infinity" in reason or body[error.pos : error.pos + 3] in {b"NaN", b"Inf", b"-In"}:
        remedy = "JSON has no NaN and no Infinity: send null or leave the field out"
    return MalformedBody(f"the body is not JSON: {reason} at line {error.lineno}, column {error.colno}", remedy=remedy)


def _check_content_type(value: bytes, kinds: Collection[str]) -> None:
    kind, _, parameters = value.decode("latin-1").partition(";")
    kind = kind.strip().lower()
    if kind and kind not in kinds and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"the body is {kind}, not JSON", remedy=JSON_REMEDY)
    for parameter in parameters.split(";"):
        name, _, charset = parameter.partition("=")
        if name.strip().lower() == "charset" and charset.strip(' "').lower() not in {"utf-8", "utf8", "us-ascii"}:
            raise UnsupportedMediaType(f"the body's charset is {charset.strip()}", remedy="Encode the body as UTF-8")


@contextmanager
def fields_named(names: Mapping[str, str], *, absent: Iterable[str] = ()) -> Iterator[None]:
    """Rename the field of an error about inputs to the one that the API's client sent: `inputs.query` is its `query`.

    `names`: beginnings of the task's paths, and what to write instead; the first that fits is taken. `absent`: names of
    parameters that the API does not have, which the remedy must not advise.
    """
    try:
        yield
    except (InvalidInput, PromptTooLong) as error:
        for name in absent:
            error.remedy = error.remedy.replace(f", or set parameters.{name} to true", "")
        error.remedy = error.remedy.replace("parameters.", names.get("parameters.", "parameters."))
        for begin, instead in names.items():
            if error.field.startswith(begin):
                rename_field(error, (instead + error.field.removeprefix(begin)).lstrip("."))
                break
        raise


def rename_field(error: RequestError, field: str) -> None:
    """Rename the field of an error, in its message as well."""
    error.message = error.message.replace(error.field, field, 1)
    error.field = field


def checked(kind: FieldKind, body: Any) -> Any:
    """The body, checked by `kind`; InvalidInput has the client's name of the field."""
    try:
        return kind.parse(body, "body")
    except InvalidInput as error:
        error.field = error.field.removeprefix("body").lstrip(".")
        raise


def missing_field(name: str, unknown: Iterable[str] = ()) -> InvalidInput:
    """The error for a missing field; suggests renaming a similar one."""
    close = closest(name, islice(unknown, LOOKED_AT))
    if close:
        return InvalidInput(
            f"body has no field '{name}'; did you mean it instead of '{shortened_name(close)}'?",
            field=name,
            remedy=f"Rename '{shortened_name(close)}' to '{name}'",
        )
    return InvalidInput(f"body has no field '{name}'", field=name, remedy=f"Add '{name}' (/docs has an example)")


def unknown_field(name: str, free: Sequence[str], known: Sequence[str], *, what: str = "field") -> InvalidInput:
    """The error for an unknown field. `free`: known fields that were not given, suggested first for a typo."""
    shown = shortened_name(name)
    close = closest(shown, free) or closest(shown, known)
    remedy = f"Did you mean '{close}'?" if close else f"Known here: {', '.join(known) or 'none'}"
    return InvalidInput(f"there is no {what} '{shown}'", field=shown, remedy=remedy)


def not_an_object(value: Any, name: str, remedy: str) -> InvalidInput:
    """The error for a field (or `body`) that is not an object."""
    return InvalidInput(
        f"{name} must be an object, not {json_words(value)}", field="" if name == "body" else name, remedy=remedy
    )


def dumps(value: Any) -> bytes:
    """JSON; float32 arrays are written as lists directly, without Python floats."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    """Converts what orjson does not: arrays that are not contiguous or not of native byte order."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def json_response(value: Any, *, status: int = 200, headers: bytes = b"") -> Response:
    """A value as JSON."""
    return Response(dumps(value), status=status, headers=headers)


def timing_headers(answer: Answer) -> bytes:
    """Headers with the timings in milliseconds, three decimals; docs/reference/http.md describes them."""
    timings = answer.timings
    lines = (
        b"x-compute-time: %.3f\r\nx-queue-time: %.3f\r\nx-tokenization-time: %.3f\r\nx-inference-time: %.3f\r\n"
        b"x-compute-tokens: %d\r\n"
        % (
            timings.compute_milliseconds,
            timings.queue_milliseconds,
            timings.tokenization_milliseconds,
            timings.inference_milliseconds,
            answer.computed_tokens,
        )
    )
    if answer.truncated:
        lines += b"x-truncated: %d\r\n" % answer.truncated
    return lines + answer.identity


def answer_response(answer: Answer, value: Any) -> Response:
    """The response with a model's answer: `value` in the route's format, with the timings of the request."""
    if _floats(value) > LARGE_FLOATS:
        return LargeResponse(value, timing_headers(answer))
    return Response(dumps(value), headers=timing_headers(answer))


class LargeResponse(Response):
    """A response whose body is not written yet: that takes too long for one iteration of the event loop."""

    def __init__(self, value: Any, headers: bytes) -> None:
        super().__init__(headers=headers)
        self._value = value

    async def write(self) -> None:
        """Write the body, and let other requests run between its pieces."""
        written = []
        begin = perf_counter()
        for piece in _pieces(self._value):
            written.append(piece)
            if perf_counter() - begin > PIECE_SECONDS:
                await asyncio.sleep(0)
                begin = perf_counter()
        self.body = b"".join(written)


def _floats(value: Any) -> int:
    """Numbers in the arrays of a value."""
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(_floats, value))


def _pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a value, as `dumps` writes it: a piece has an array of one axis."""
    if isinstance(value, dict):
        between = b"{"
        for name, one in value.items():
            yield between + dumps(name) + b":"
            yield from _pieces(one)
            between = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim > 1):
        between = b"["
        for one in value:
            yield between
            yield from _pieces(one)
            between = b","
        yield b"]" if len(value) else b"[]"
    else:
        yield dumps(value)


def status_of(error: RequestError | type[RequestError], error_format: ErrorFormat) -> int:
    """The status of an error. OpenAI, Anthropic and their clients have 400 for what is 422 elsewhere."""
    is_own = error_format is ErrorFormat.PENSTOCK
    return 400 if not is_own and error.status == InvalidInput.status else error.status


def error_response(error: RequestError, error_format: ErrorFormat) -> Response:
    """The response for an error, in the format of the route."""
    status = status_of(error, error_format)
    message = f"{error.message}. {error.remedy}" if error.remedy else error.message
    value: dict[str, Any]
    if error_format is ErrorFormat.ANTHROPIC:
        kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        value = {"type": "error", "error": {"type": kind, "message": message}}
    elif error_format is ErrorFormat.OPENAI:
        kind = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        value = {"error": {"message": message, "type": kind, "param": error.field or None, "code": error.error_type}}
    else:
        value = {"error": error.message, "error_type": error.error_type}
        if error.field:
            value["field"] = error.field
        if error.remedy:
            value["remedy"] = error.remedy
    headers = b""
    if isinstance(error, Overloaded | NotReady):
        headers = b"retry-after: %d\r\n" % error.retry_after_seconds
    elif isinstance(error, MethodNotAllowed):
        headers = b"allow: %b\r\n" % ", ".join(error.allow).encode()
    elif isinstance(error, Unauthorized):
        headers = b'www-authenticate: Bearer realm="penstock"\r\n'
    return json_response(value, status=status, headers=headers)


OPTIONS = ("use_cache", "wait_for_model", "use_gpu", "dont_load_model")
"""Options of Hugging Face's hosted API. Its clients send them; they have no effect here."""


@dataclass(frozen=True)
class Envelope:
    """The body of a request: inputs, parameters and options."""

    schema: JsonSchema
    """The task's schema: inputs and parameters."""
    top_level_parameters: bool = False
    """Parameters may also be on the level of `inputs`."""

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
