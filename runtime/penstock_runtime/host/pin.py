"""Keep the process on its cores."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import HostError
from penstock_runtime.host.files import spoken


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
