"""Linux timing for load clients: a precise timer, the time slice of a thread, the CPU time and memory of processes.

Event loops round timers to milliseconds, as long as a short inference takes; `PreciseTimer` fires within some 50
microseconds (timerfd). A short time slice lets a thread run soon after it wakes: a client that waits for a core counts
that wait as the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

_CLOCK_MONOTONIC = 1  # the clock of time.perf_counter() on Linux
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class PreciseTimer:
    """Calls a function once, at a time of `time.perf_counter()`."""

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
        """Cancel the timer and free it."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _fired(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return
        self._callback()


USUAL_NANOSECONDS = 0
"""The kernel's default, around 1 to 3 ms: it grows with the number of cores."""
SHORTEST_NANOSECONDS = 100_000
"""The shortest slice that the kernel accepts (sched_setattr(2), kernel/sched/syscalls.c)."""

_NUMBERS = {
    "x86_64": {"sched_setattr": 314, "sched_getattr": 315},
    "aarch64": {"sched_setattr": 274, "sched_getattr": 275},
}
"""Numbers of system calls that the C library does not have before glibc 2.41."""


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of linux/sched/types.h, first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def set_time_slice(nanoseconds: int) -> bool:
    """Set the time slice of the calling thread, from 0.1 to 100 ms, or 0 for the kernel's default. Linux 6.12 and
    later; no privilege is needed. False, and nothing changed, where it is not supported: an older kernel, a sandbox
    that forbids the call, another scheduling class than the usual one."""
    attributes = _read()
    if attributes is None or attributes.policy not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return False
    attributes.flags = 0
    attributes.runtime = nanoseconds
    if _call("sched_setattr", ctypes.byref(attributes), ctypes.c_long(0)) != 0:
        return False
    # An older kernel reports success, but returns no slice when it is read.
    kept = time_slice_nanoseconds()
    return kept is not None and nanoseconds in (kept, USUAL_NANOSECONDS)


def time_slice_nanoseconds() -> int | None:
    """The time slice of the calling thread; None where the kernel does not support it."""
    attributes = _read()
    return attributes.runtime or None if attributes is not None else None


def _read() -> _Attributes | None:
    size = ctypes.sizeof(_Attributes)
    attributes = _Attributes(size=size)
    failed = _call("sched_getattr", ctypes.byref(attributes), ctypes.c_long(size), ctypes.c_long(0))
    return None if failed else attributes


def _call(name: str, *arguments: object) -> int:
    """Make a system call on the calling thread; 0 for success."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return -1
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(numbers[name]), ctypes.c_long(0), *arguments))


@dataclass(frozen=True)
class ResourceUsage:
    """Usage of some processes together, without those that have ended."""

    seconds: float
    """CPU time, user and system."""
    resident_bytes: int

    @classmethod
    def of(cls, pids: Iterable[int]) -> ResourceUsage:
        """Read the current usage."""
        seconds, resident = 0.0, 0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                times = process.cpu_times()
                seconds += times.user + times.system
                resident += process.memory_info().rss
        return cls(seconds, resident)


def process_tree(pid: int) -> tuple[int, ...]:
    """A process and all its descendants; empty when there is no such process."""
    try:
        process = psutil.Process(pid)
        return (pid, *(child.pid for child in process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()
