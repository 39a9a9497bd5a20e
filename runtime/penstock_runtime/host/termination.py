"""The termination message of a pod's container, which the kubelet keeps, and its exit code."""

from __future__ import annotations

import contextlib
from pathlib import Path

from penstock.errors import PenstockError
from penstock.resources.job_summary import Failure
from penstock.resources.result import cut

DEFAULT_LOG = Path("/dev/termination-log")
"""Kubernetes' default path. It does not exist outside of Kubernetes."""
LIMIT_BYTES = 4096
"""The kubelet reads no more."""
FAILED = 1
"""The error must be corrected first."""
TRY_AGAIN = 75
"""The same may succeed later; EX_TEMPFAIL of sysexits.h."""


def exit_code(error: BaseException) -> int:
    """The exit code of a process that ends with this error. Unknown errors count as temporary."""
    temporary = error.temporary if isinstance(error, PenstockError) else True
    return TRY_AGAIN if temporary else FAILED


def failure_message(error: BaseException) -> str:
    """An error as JSON (`reason`, `message`, `remedy`, `retryable`), shortened to `LIMIT_BYTES`."""
    whole = Failure.of(error)
    text = whole.model_dump_json(by_alias=True)
    for characters in (1200, 500, 200):
        if len(text.encode()) <= LIMIT_BYTES:
            break
        shorter = {"message": cut(whole.message, characters), "remedy": cut(whole.remedy, characters // 2)}
        text = whole.model_copy(update=shorter).model_dump_json(by_alias=True)
    return text


def write_termination_message(log: Path, text: str) -> None:
    """Write the termination message; does nothing where the file does not exist, outside of a pod."""
    # Opened but never created: outside of a pod no file must appear in /dev.
    with contextlib.suppress(OSError), log.open("r+b") as file:
        file.truncate()
        file.write(text.encode()[:LIMIT_BYTES])
