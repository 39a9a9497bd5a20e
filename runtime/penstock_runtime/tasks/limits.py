"""How large one request may be: what a task refuses before it costs anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Counts that no request may exceed."""

    items: int = 1024
    """Entries of any list in a request: texts, pairs, labels, targets. Clients send a page of documents at a time."""

    rows: int = 1024
    """Token sequences that one request may turn into: windows of long texts, labels times texts."""


DEFAULT_LIMITS = Limits()
