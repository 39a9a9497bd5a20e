"""What can go wrong between the operator and the API server.

    ClusterError            status: the HTTP status, 0 without an answer
    ├── NotFound            404: the object, or its kind, is not there
    ├── Conflict            409: changed or made by somebody else meanwhile
    ├── Expired             410: a watch or a page of a list begins too far back
    ├── Forbidden           401, 403: RBAC says no
    ├── Refused             400, 413, 415, 422: the API server does not take this object
    ├── Unavailable         429, 5xx, no connection, no answer in time: temporary
    └── NotLeading          this process may not write (any more)

Third-party exceptions end at `penstock_operator.cluster.kubernetes`: nothing above sees aiohttp's or the client's.
"""

from __future__ import annotations

import json

from penstock.errors import PenstockError


class ClusterError(PenstockError):
    """The API server did not do what was asked."""

    def __init__(self, message: str, *, remedy: str = "", status: int = 0, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class NotFound(ClusterError):
    """There is no such object, or no such kind."""


class Conflict(ClusterError):
    """Somebody else was faster: read again, then decide again."""

    temporary = True


class Expired(ClusterError):
    """The history that was asked for is gone: list again."""

    temporary = True


class Forbidden(ClusterError):
    """The operator's service account may not do this."""


class Refused(ClusterError):
    """The object is not one that the API server takes."""


class Unavailable(ClusterError):
    """No answer, or none for now: the same call may succeed later."""

    temporary = True


class NotLeading(ClusterError):
    """The lease is not held: another replica may be writing."""


_BY_STATUS: dict[int, type[ClusterError]] = {
    400: Refused,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    413: Refused,
    415: Refused,
    422: Refused,
    429: Unavailable,
}

_REMEDIES: dict[type[ClusterError], str] = {
    Forbidden: "Grant the operator's service account this verb (the chart's ClusterRole has them all)",
}


def from_status(status: int, body: bytes, *, what: str, retry_after: str = "") -> ClusterError:
    """The error for an answer of the API server; `what` says what was tried, such as `apply Deployment a/b`."""
    message = ""
    ending = False
    seconds = _seconds(retry_after)
    try:
        answer = json.loads(body)
    except ValueError:
        message = body[:300].decode(errors="replace").strip()
    else:
        if isinstance(answer, dict):
            message = str(answer.get("message") or answer.get("reason") or "")
            # Kubernetes repeats the header in the body, and only there when a proxy drops headers.
            details = answer.get("details") or {}
            seconds = seconds or _seconds(str(details.get("retryAfterSeconds") or ""))
            ending = any(cause.get("reason") == "NamespaceTerminating" for cause in details.get("causes") or ())
    kind = _BY_STATUS.get(status, Unavailable if status >= 500 else Refused)
    return kind(
        f"{what}: HTTP {status}{': ' if message else ''}{message}",
        # Forbidden, too, is whatever would be made in a namespace that is being deleted: nobody's rights are missing.
        remedy="" if ending else _REMEDIES.get(kind, ""),
        status=status,
        retry_after_seconds=seconds,
    )


def _seconds(text: str) -> float:
    # An HTTP date is allowed there as well; API servers and their proxies send numbers.
    return float(text) if text.isdigit() else 0.0
