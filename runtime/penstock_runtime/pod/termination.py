"""The last words of a pod's process: what the kubelet keeps of it, and its exit code."""

from __future__ import annotations

import contextlib
from pathlib import Path

from penstock.errors import PenstockError
from penstock.resources.job_summary import Failure
from penstock.resources.result import cut

DEFAULT_LOG = Path("/dev/termination-log")
"""Where a kubelet looks, unless the pod says otherwise. Outside of Kubernetes it is not there."""
LIMIT_BYTES = 4096
"""What a kubelet reads."""
FAILED = 1
"""Somebody has to put something right first."""
TRY_AGAIN = 75
"""The same may succeed later; EX_TEMPFAIL of sysexits.h."""


def exit_code(error: BaseException) -> int:
    """Of a process that ends with this error. One that is not ours may pass by itself, for all that is known."""
    temporary = error.temporary if isinstance(error, PenstockError) else True
    return TRY_AGAIN if temporary else FAILED


def failure_message(error: BaseException) -> str:
    """An error as JSON (`reason`, `message`, `remedy`, `retryable`) that fits."""
    whole = Failure.of(error)
    text = whole.model_dump_json(by_alias=True)
    for characters in (1200, 500, 200):
        if len(text.encode()) <= LIMIT_BYTES:
            break
        shorter = {"message": cut(whole.message, characters), "remedy": cut(whole.remedy, characters // 2)}
        text = whole.model_copy(update=shorter).model_dump_json(by_alias=True)
    return text


def leave_word(log: Path, text: str) -> None:
    """Write the last words. Where they cannot be written (not in a pod), the process's own log has to do."""
    # Opened as it is, never created: outside of a pod nothing is to appear in /dev.
    with contextlib.suppress(OSError), log.open("r+b") as file:
        file.truncate()
        file.write(text.encode()[:LIMIT_BYTES])
