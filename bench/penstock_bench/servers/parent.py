"""A process that must not outlive the one that started it, however that ends: killed, it tidies up nothing, and what
is stopped (SIGSTOP) receives no other signal and does not notice the end of its input."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded here: between fork and exec nothing may be."""


def end_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when its parent's thread that started it ends. What this process starts
    itself is not meant.

    `parent`: the process id that the parent is known by, which may have ended before it was asked for.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
