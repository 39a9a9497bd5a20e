"""Start-up, signals and error output of every Penstock process: closed standard streams, SIGTERM, `error:` lines.

The kernel ignores signals that the first process of a container has no handler for. Without `exit_on_signal`, a pod
that is deleted while its process still imports libraries would ignore SIGTERM and be killed at the end of its grace
period; `docker stop` would wait ten seconds and kill it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from penstock.errors import PenstockError


def open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream (`<&-`, some supervisors). Call it before opening anything else.

    Otherwise the next file or socket gets that number: libuv aborts when it closes one of them, and the output of a
    library would go to a client.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one. Child processes inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            # Python has None there.
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - stays open


def python_module(name: str) -> list[str]:
    """The command of a child process that runs this module with the interpreter of this process.

    The child imports nothing from the current folder, which may be a model's; in an isolated process (`python -I`)
    nothing from PYTHON* variables either.
    """
    return [sys.executable, "-I" if sys.flags.isolated else "-P", "-m", name]


def exit_on_signal(*numbers: signal.Signals) -> None:
    """Exit at once on these signals until other handlers are installed. Default: SIGTERM and SIGINT.

    The exit code is as if the signal had ended the process: 128 plus its number.
    """
    for number in numbers or (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM while the block runs, as Ctrl-C does, so that clean-up code runs.

    The same for SIGHUP (a closed terminal), unless it is ignored (`nohup`).
    No effect outside the main thread, the only one that receives signals.
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


@contextmanager
def without_collections() -> Iterator[None]:
    """No garbage collections in the block. For imports, which make many objects and no garbage: a tenth of their CPU
    time is collections."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def print_error(error: PenstockError) -> None:
    """Print `error: what and where. What to do next` to standard error, in colour on a terminal that has colours.

    NO_COLOR and TERM=dumb switch the colour off.
    """
    stream = sys.stderr
    coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    prefix = "\x1b[31m\x1b[1merror:\x1b[0m" if coloured else "error:"
    stream.write(f"{prefix} {error}\n")
    stream.flush()
