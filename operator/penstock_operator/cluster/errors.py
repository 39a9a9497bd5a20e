"""Errors between the operator and the API server, and the back-off between retries.

    ClusterError            status: the HTTP status, 0 without an answer
    ├── NotFound            404: the object or its kind does not exist
    ├── Conflict            409: another client changed or created the object
    ├── WatchExpired        410: a watch or a page of a list starts too far back
    ├── Forbidden           401, 403: RBAC denies it
    ├── Refused             400, 413, 415, 422: the API server rejects the object
    ├── Unavailable         429, 5xx, no connection, time-out: temporary
    └── NotLeading          this process does not hold the lease

`penstock_operator.cluster.kubernetes` maps the exceptions of aiohttp and the client to these.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from penstock.errors import PenstockError


class ClusterError(PenstockError):
    """A request to the API server failed."""

    def __init__(self, message: str, *, remedy: str = "", status: int = 0, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class NotFound(ClusterError):
    """The object, or its kind, does not exist."""


class Conflict(ClusterError):
    """Another client changed the object: read and decide again."""

    temporary = True


class WatchExpired(ClusterError):
    """The requested history is no longer available: list again."""

    temporary = True


class Forbidden(ClusterError):
    """The operator's service account lacks the right."""


class Refused(ClusterError):
    """The API server rejects the object."""


class Unavailable(ClusterError):
    """No answer, or a temporary error: the same request may succeed later."""

    temporary = True


class NotLeading(ClusterError):
    """The lease is not held: another replica may be writing."""


_BY_STATUS: dict[int, type[ClusterError]] = {
    400: Refused,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: WatchExpired,
    413: Refused,
    415: Refused,
    422: Refused,
    429: Unavailable,
}
_REMEDIES: dict[type[ClusterError], str] = {
    Forbidden: "Grant the operator's service account this verb (the chart's ClusterRole has them all)"
}


def from_status(status: int, body: bytes, *, what: str, retry_after: str = "") -> ClusterError:
    """The error for an answer of the API server; `what` is the attempted operation, such as `apply Deployment a/b`."""
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
            # Kubernetes repeats the header in the body, which helps when a proxy drops headers.
            details = answer.get("details") or {}
            seconds = seconds or _seconds(str(details.get("retryAfterSeconds") or ""))
            ending = any(cause.get("reason") == "NamespaceTerminating" for cause in details.get("causes") or ())
    kind = _BY_STATUS.get(status, Unavailable if status >= 500 else Refused)
    return kind(
        f"{what}: HTTP {status}{': ' if message else ''}{message}",
        # Creating an object in a namespace that is being deleted is forbidden too: no right is missing.
        remedy="" if ending else _REMEDIES.get(kind, ""),
        status=status,
        retry_after_seconds=seconds,
    )


def _seconds(text: str) -> float:
    # An HTTP date is allowed too; API servers and their proxies send numbers.
    return float(text) if text.isdigit() else 0.0


@dataclass(frozen=True)
class Backoff:
    """Doubling delays with jitter."""

    first_seconds: float
    limit_seconds: float
    attempts: int = 0
    """Attempts in total; 0: unlimited."""

    def seconds(self, failures: int, *, at_least: float = 0.0) -> float:
        """The delay after this many failures (from 1): half to all of the doubled time, so that clients spread.

        `at_least` is the server's Retry-After; the delay is at most a quarter longer.
        """
        # 2.0 ** 1024 overflows, and a limit is reached long before 2 ** 30.
        wait = min(self.limit_seconds, self.first_seconds * 2.0 ** min(failures - 1, 30))
        return max(wait * random.uniform(0.5, 1.0), at_least * random.uniform(1.0, 1.25))  # noqa: S311

    def allows(self, failures: int) -> bool:
        """Whether to retry after this many failures."""
        return self.attempts == 0 or failures < self.attempts
