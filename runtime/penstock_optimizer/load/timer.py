"""A timer that fires within some 50 microseconds: event loops round theirs to milliseconds, which is as long as a
short inference takes. Linux's timerfd, read by the loop like a socket."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_CLOCK_MONOTONIC = 1  # the clock of time.perf_counter() on Linux
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class PreciseTimer:
    """Calls back once, at a time of `time.perf_counter()`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = int(self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC))
        if self._descriptor < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"timerfd_create: {os.strerror(code)}")
        self._loop = loop
        self._callback = callback
        loop.add_reader(self._descriptor, self._fired)

    def set(self, at: float) -> None:
        """Fire at `at`, seconds of `time.perf_counter()`; at once when that has passed."""
        nanoseconds = max(1, round(at * 1e9))
        value = _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        request = _Itimerspec(_Timespec(0, 0), value)
        if self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(request), None) < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"timerfd_settime: {os.strerror(code)}")

    def close(self) -> None:
        """Never fire again."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _fired(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return
        self._callback()
