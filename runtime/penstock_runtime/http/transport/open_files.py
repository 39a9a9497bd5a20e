"""How many connections a process may have: each is an open file, and those are limited."""

from __future__ import annotations

import resource

SPARE = 128
"""Open files beside connections: the model's, the event loop's, and connections that are being refused."""


def room_for(connections: int) -> int:
    """How many of so many connections this process may have open at once; its limit is raised as far as that takes and
    the system lets it. Of a small limit half."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE
    if _is_less(soft, needed):
        soft = hard if _is_less(hard, needed) else needed
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError):  # a sandbox may forbid it
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft - SPARE, soft // 2) if _is_less(soft, needed) else connections


def _is_less(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed
