"""Request errors: one table of statuses and error types, from which responses, documentation and tests are made.

RequestError                  error_type, status, field, remedy
├── InvalidInput              422 validation
├── MalformedBody             400 malformed
├── MalformedRequest          400 bad_request (HTTP itself)
├── PromptTooLong             400 context_length_exceeded
├── UnsupportedOption         400 unsupported_option
├── Unauthorized              401 unauthorized
├── UnsupportedRoute          404 not_found
│   └── UnknownModel          404 model_not_found
├── MethodNotAllowed          405 method (allow)
├── RequestTimeout            408 timeout
├── OtherVectorSpace          412 other_vector_space
├── BodyTooLarge              413 too_large
├── UnsupportedMediaType      415 media_type
├── HeadersTooLarge           431 headers_too_large
├── Overloaded                429 overloaded (retry_after_seconds)
├── DeadlineExceeded          504 deadline
├── ClientGone                499 cancelled (never sent: the client has gone)
├── NotReady                  503 not_ready (retry_after_seconds)
│   └── NotClassified         503 unavailable
│       └── ClassifierFailed  503 classifier_failed
└── InferenceFailed           500 inference
"""

from __future__ import annotations

from typing import ClassVar


class RequestError(Exception):
    """A request cannot be answered. The class decides the status; the instance has message, field and remedy."""

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal"

    def __init__(self, message: str, *, field: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.remedy = remedy


class InvalidInput(RequestError):
    """The body is JSON, but a field is missing, of the wrong type, out of range or unknown."""

    status = 422
    error_type = "validation"


class MalformedBody(RequestError):
    """The body is not JSON, or not UTF-8."""

    status = 400
    error_type = "malformed"


class PromptTooLong(RequestError):
    """Prompt and continuation have more tokens than the model's context or the memory for its cache can ever hold."""

    status = 400
    error_type = "context_length_exceeded"


class UnsupportedOption(RequestError):
    """The API has this field or value, and this server does not support it."""

    status = 400
    error_type = "unsupported_option"


class BodyTooLarge(RequestError):
    """The body is over the limit."""

    status = 413
    error_type = "too_large"


class MalformedRequest(RequestError):
    """The data received is not an HTTP/1.1 request; the connection is closed."""

    status = 400
    error_type = "bad_request"


class Unauthorized(RequestError):
    """The endpoint wants a bearer token, or another one."""

    status = 401
    error_type = "unauthorized"


class MethodNotAllowed(RequestError):
    """The route exists, but not with this method."""

    status = 405
    error_type = "method"

    def __init__(self, message: str, *, allow: tuple[str, ...]) -> None:
        super().__init__(message, remedy=f"Use {' or '.join(allow)}")
        self.allow = allow


class RequestTimeout(RequestError):
    """The client took too long to send its headers or its body; the connection is closed."""

    status = 408
    error_type = "timeout"


class OtherVectorSpace(RequestError):
    """The request expects another vector space than this model's."""

    status = 412
    error_type = "other_vector_space"


class UnsupportedMediaType(RequestError):
    """The body's content type or encoding is not supported."""

    status = 415
    error_type = "media_type"


class HeadersTooLarge(RequestError):
    """The request line and headers are over the limit; the connection is closed."""

    status = 431
    error_type = "headers_too_large"


class UnsupportedRoute(RequestError):
    """There is no such route, or this endpoint's task does not have it."""

    status = 404
    error_type = "not_found"


class UnknownModel(UnsupportedRoute):
    """The request names another model than the endpoint's."""

    error_type = "model_not_found"


class Overloaded(RequestError):
    """The queue is full: try again after `retry_after_seconds`."""

    status = 429
    error_type = "overloaded"

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message, remedy=f"Try again in {retry_after_seconds} s, or add replicas")
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(RequestError):
    """By its deadline the request had not started to run, or not all of it; the rest was dropped."""

    status = 504
    error_type = "deadline"


class ClientGone(RequestError):
    """The client closed the connection before its request ran."""

    status = 499
    error_type = "cancelled"


class NotReady(RequestError):
    """The model is still loading, or the server is draining."""

    status = 503
    error_type = "not_ready"

    def __init__(self, message: str, *, retry_after_seconds: int = 1, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy or f"Try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class NotClassified(NotReady):
    """A gateway's request was not classified, because the queue is full."""

    error_type = "unavailable"


class ClassifierFailed(NotClassified):
    """A gateway's request was not classified, because the server failed on it; the log has the details."""

    error_type = "classifier_failed"


class InferenceFailed(RequestError):
    """The engine failed on this request; the log has the details."""

    status = 500
    error_type = "inference"


def for_gateway(error: RequestError) -> RequestError:
    """The error as a gateway of language models gets it. Gateways take 503 and 504 for a guard that cannot be reached,
    for which their users have chosen what follows; 429 and 500 become 503 therefore."""
    if isinstance(error, Overloaded):
        return NotClassified(error.message, retry_after_seconds=error.retry_after_seconds, remedy=error.remedy)
    if error.status == RequestError.status:
        return ClassifierFailed(error.message, remedy=error.remedy)
    return error


def deadline_exceeded() -> DeadlineExceeded:
    """The error of a request that did not start in time."""
    return DeadlineExceeded(
        "the request waited longer than its deadline and was not run",
        remedy="Try again later, allow more time, or add replicas",
    )
