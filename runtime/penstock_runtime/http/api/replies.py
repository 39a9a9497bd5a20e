"""Values as responses: JSON, the timing headers, errors in the shape that a route's clients read."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from penstock_runtime.errors import MethodNotAllowed, NotReady, Overloaded, RequestError, Unauthorized
from penstock_runtime.http.transport.message import Dialect, Response
from penstock_runtime.serving.predictor import Answer

OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""By status; other 4xx are `invalid_request_error`, 5xx `server_error`."""


def dumps(value: Any) -> bytes:
    """JSON; float32 arrays as lists, without a detour through Python floats."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    """What orjson leaves to us: arrays that are not contiguous or not native."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def json_response(value: Any, *, status: int = 200, headers: bytes = b"") -> Response:
    """A value as JSON."""
    return Response(dumps(value), status=status, headers=headers)


def timing_headers(answer: Answer) -> bytes:
    """Milliseconds with three decimals; docs/reference/http.md says what each holds."""
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
    return lines


def answer_response(answer: Answer, value: Any) -> Response:
    """A model's answer: `value` in the route's shape, with the timings of the request."""
    return Response(dumps(value), headers=timing_headers(answer))


def error_response(error: RequestError, dialect: Dialect) -> Response:
    """An error in the shape that the route's clients read."""
    if dialect is Dialect.OPENAI:
        message = f"{error.message}. {error.remedy}" if error.remedy else error.message
        kind = OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
        value: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": error.field or None, "code": error.error_type}
        }
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
    return json_response(value, status=error.status, headers=headers)
