"""Keep the process on its cores, and each thread that computes on one of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import HostError
from penstock_runtime.host.files import spoken

STREAM_NICENESS = 5
"""What threads that compute give way by to the event loop: it wakes for 0.1 ms, and they take what is left."""


def pin_process(cpus: Iterable[int]) -> None:
    """Let every thread of this process run on these CPUs only; threads started later inherit it.

    Call it before engines start: they size and place their pools by the affinity that they find.
    HostError when the kernel refuses (a CPU outside the cpuset, or a sandbox).
    """
    wanted = set(cpus)
    try:
        # 0 means the calling thread, not the process: threads that libraries started on import would stay behind.
        for thread in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), wanted)
            except ProcessLookupError:
                continue
    except (OSError, ValueError) as error:
        raise HostError(
            f"this process cannot be kept on CPUs {spoken(wanted) or '(none)'}: {error}",
            remedy=f"Allowed are CPUs {spoken(os.sched_getaffinity(0))}: ask for cores among them",
        ) from error


def is_on_one_core() -> bool:
    """Whether this thread, and what it starts, has one CPU only."""
    return len(os.sched_getaffinity(0)) == 1


def place_stream(thread: int, stream: int, streams: int) -> None:
    """Give a thread (its native id), which computes as number `stream` of `streams`, one of the process's cores for
    itself, and let the event loop go before it. For threads of which there is one for each core.

    Else the kernel now and then puts two of them on one core, in turns of 4 ms, and leaves the other one to the loop.
    Only where the process is kept on as many CPUs as there are streams: elsewhere the scheduler finds free ones better
    than we do. A kernel that refuses is left alone: answers are the same.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) != streams or streams == 1:
        return
    with contextlib.suppress(OSError):
        # The first stream, which does all at low load, on the last core: interrupts mostly come to the first.
        os.sched_setaffinity(thread, {cpus[-1 - stream]})
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + STREAM_NICENESS)
        # Niceness is a share, no order: a stream that has slept longer than the loop would cut in on it all the same.
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
