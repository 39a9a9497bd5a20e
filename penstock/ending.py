"""How a process ends that is told to by a signal before, or without, handlers of its own.

The kernel passes over signals that the first process of a container has not asked for. A pod that is deleted while its
process still imports its libraries would ignore that, go on, and be killed a minute later; `docker stop` of a search
would wait its ten seconds and kill it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


def end_when_told(*numbers: signal.Signals) -> None:
    """From now on these signals end the process at once, until it has handlers of its own. Default: SIGTERM and SIGINT.

    The exit code is that of a process which the signal ended: 128 and its number.
    """
    for number in numbers or (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """While the block runs SIGTERM is what Ctrl-C is: KeyboardInterrupt, and with it whatever is tidied up and said.

    So is SIGHUP, of a terminal that was closed, unless it is ignored (`nohup`).
    Without effect outside of the main thread, which is the only one that signals get to.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
