"""The first process of a serving pod: it imports, forks the server, and forks it again after a crash.

A crash is an end by a signal: a fault in a native library, or the kernel's out-of-memory killer. The new server need
not import, which takes longer than loading a small model, and Kubernetes waits ten seconds and more before it starts a
container for the third time. An exit with a status is not a crash: it has a reason, which Kubernetes reports.

The first process has one thread, no port and no model. It forwards signals, and reaps the processes that the kernel
gives to the first process of a container.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from penstock.errors import PenstockError
from penstock.logs import log_event
from penstock_runtime.host.forks import end_with_parent
from penstock_runtime.host.termination import DEFAULT_LOG, TRY_AGAIN, failure_message, write_termination_message
from penstock_runtime.logs import configure_logs

logger = logging.getLogger("penstock.pod")

FORWARDED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
MOST_CRASHES = 3
"""More of them within `WINDOW_SECONDS` end the pod."""
WINDOW_SECONDS = 600.0


def may_restart(crashes: Sequence[float], now: float) -> bool:
    """Whether a server that crashed at these times, seconds, the last one included, is to be started again."""
    return sum(now - crash < WINDOW_SECONDS for crash in crashes) <= MOST_CRASHES


def supervise(serve: Callable[[int], NoReturn]) -> NoReturn:
    """Run `serve(crashes)` in a child process, again after each crash, and end with its exit status.

    `crashes`: how many servers of this pod crashed before. Call it after the imports, from the only thread.
    """
    configure_logs("info")
    crashes: list[float] = []
    first = os.getpid()
    signals = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    gc.collect()
    gc.freeze()  # the collector of the child would write to, and so copy, the memory that both share
    ending: int | None = None
    while True:
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            # Outside of a container, where the end of the first process does not end the others.
            end_with_parent(first)
            serve(len(crashes))
        status: int | None = None
        while status is None:
            number = signal.sigwait(signals)
            if number == signal.SIGCHLD:
                status = _reap(child)
            else:
                ending = number
                os.kill(child, number)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0 or ending is not None:
            os._exit(code if code >= 0 else 128 - code)
        crashes.append(time.monotonic())
        _go_on_or_end(signal.Signals(-code), crashes)


def _reap(child: int) -> int | None:
    """Collect the processes that have ended; the wait status of `child` if it is among them."""
    found: int | None = None
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if process == 0:
            return found
        found = status if process == child else found


def _go_on_or_end(number: signal.Signals, crashes: Sequence[float]) -> None:
    """Log the crash. Ends the process after too many, with the reason in the termination message."""
    hint = ", as the kernel does when memory runs out" if number is signal.SIGKILL else ""
    if may_restart(crashes, crashes[-1]):
        logger.error(
            "the server was ended by %s%s: it is started again",
            number.name,
            hint,
            extra=log_event("ServerCrashed", reason=number.name),
        )
        return
    error = ServerCrashed(
        f"the server was ended by {number.name}{hint}, for the {len(crashes)}th time in this pod",
        remedy="Look at the log before it; after SIGKILL raise the pod's memory, otherwise report the crash",
    )
    logger.critical("the pod ends: %s", error, extra=log_event("PodFailed", reason=error))
    log = Path(os.environ.get("PENSTOCK_TERMINATION_LOG", DEFAULT_LOG))
    write_termination_message(log, failure_message(error))
    os._exit(TRY_AGAIN)


class ServerCrashed(PenstockError):
    """The server of a pod crashes again and again."""

    temporary = True
