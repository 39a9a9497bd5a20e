"""Large pages of memory for weights: one read of a model's weights touches thousands of small ones.

With small pages (4 KiB) a short run waits for address translation, within a virtual machine twice over: MiniLM in int8
takes 6 to 10 % longer at 8 tokens (docs/decisions/huge-pages.md). The C library asks the kernel for large ones (2 MiB)
when it is told so before it starts, which is by an environment variable: so the process starts once more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def wanted(environment: Mapping[str, str], policy: str) -> dict[str, str] | None:
    """The environment to start again with; None: stay. `policy`: the kernel's, such as `always [madvise] never`.

    Nothing is changed where the kernel gives large pages by itself, where it gives none, or where somebody has set the
    tunable already, to whatever.
    """
    tunables = environment.get(VARIABLE, "")
    if "[madvise]" not in policy or TUNABLE in tunables:
        return None
    return {**environment, VARIABLE: ":".join(filter(None, (tunables, f"{TUNABLE}=1")))}


def start_again_with_huge_pages() -> None:
    """Replace this process by itself with large pages, where that is of use; else return."""
    try:
        environment = wanted(os.environ, POLICY.read_text(encoding="ascii"))
    except OSError:
        return  # a kernel without large pages, or no Linux
    if environment is not None:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, environment)  # noqa: S606 - ourselves, once more
