"""Reads small files of `/proc` and `/sys`, below any root for tests. Unreadable files count as absent."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

MOST_CPUS = 65_536
"""More than any machine has; keeps a damaged list from filling the memory."""


def read_text(root: Path, path: str) -> str | None:
    """The text of `path` (absolute) below `root`; None if it cannot be read."""
    try:
        return (root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(root: Path, path: str) -> int | None:
    """The integer in a file; None if it cannot be read or is none."""
    return number(read_text(root, path))


def number(text: str | None) -> int | None:
    """An integer (decimal, or hexadecimal with 0x); None for anything else."""
    try:
        return int(text.strip(), 0) if text else None
    except ValueError:
        return None


def read_cpus(root: Path, path: str) -> tuple[int, ...] | None:
    """The CPU list in a file; None if it cannot be read or is none."""
    return cpu_list(read_text(root, path))


def cpu_list(text: str | None) -> tuple[int, ...] | None:
    """`0-3,8` as numbers, sorted; an empty list for an empty text; None for anything else."""
    if text is None:
        return None
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if match is None or int(match[2] or match[1]) >= MOST_CPUS:
            return None
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """CPU numbers in the kernel's format: `0-3,8`; the inverse of `cpu_list`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def key_values(text: str | None) -> dict[str, int]:
    """Lines such as `nr_throttled 3` or `MemTotal: 12 kB` as numbers by name; other lines are skipped."""
    values: dict[str, int] = {}
    for line in (text or "").splitlines():
        fields = line.split()
        if len(fields) >= 2 and (value := number(fields[1])) is not None:
            values[fields[0].rstrip(":")] = value
    return values
