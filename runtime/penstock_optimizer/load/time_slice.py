"""The time slice of a thread: how long the kernel lets it run on before others of its rank, and so also how soon it
goes before them once it wakes. Linux 6.12 and later (EEVDF's custom slices); no privilege is needed.

A client that waits behind another program for a core counts that wait as the server's.
"""

from __future__ import annotations

import ctypes
import os
import platform

USUAL_NANOSECONDS = 0
"""The kernel's own choice, around 1 to 3 ms: it grows with the number of cores."""
SHORTEST_NANOSECONDS = 100_000
"""That the kernel takes (sched_setattr(2), kernel/sched/syscalls.c)."""

_NUMBERS = {
    "x86_64": {"sched_setattr": 314, "sched_getattr": 315},
    "aarch64": {"sched_setattr": 274, "sched_getattr": 275},
}
"""Of system calls that the C library does not have before glibc 2.41."""


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
    """Of the calling thread, from 0.1 to 100 ms, or 0 for the kernel's own. False where it has no such thing, which
    leaves all as it was: an older kernel, a sandbox that forbids the call, another class than that of usual programs.
    """
    attributes = _read()
    if attributes is None or attributes.policy not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return False
    attributes.flags = 0
    attributes.runtime = nanoseconds
    if _call("sched_setattr", ctypes.byref(attributes), ctypes.c_long(0)) != 0:
        return False
    # An older kernel says that it was done, too, and knows of nothing when it is asked.
    kept = time_slice_nanoseconds()
    return kept is not None and nanoseconds in (kept, USUAL_NANOSECONDS)


def time_slice_nanoseconds() -> int | None:
    """Of the calling thread; None where the kernel has no such thing."""
    attributes = _read()
    return attributes.runtime or None if attributes is not None else None


def _read() -> _Attributes | None:
    size = ctypes.sizeof(_Attributes)
    attributes = _Attributes(size=size)
    failed = _call("sched_getattr", ctypes.byref(attributes), ctypes.c_long(size), ctypes.c_long(0))
    return None if failed else attributes


def _call(name: str, *arguments: object) -> int:
    """On the calling thread. 0: done."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return -1
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(numbers[name]), ctypes.c_long(0), *arguments))
