"""The peak of a process's memory.

Not `ru_maxrss`: it keeps the peak of the process that a process was forked from, and cannot be reset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def memory_kilobytes(process: int | str, name: str) -> int:
    """`VmRSS`, what is resident now, or `VmHWM`, the most that was."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1])


@contextmanager
def growth_kilobytes(process: int | str = "self") -> Iterator[Callable[[], int]]:
    """Gives a function for the peak since the beginning of the block, over the memory that was resident then."""
    Path(f"/proc/{process}/clear_refs").write_text("5")  # resets the peak
    before = memory_kilobytes(process, "VmRSS")
    yield lambda: memory_kilobytes(process, "VmHWM") - before
