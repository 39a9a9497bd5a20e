"""What a fetch tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """One step of a fetch."""

    source: str
    """As the endpoint states it."""
    file: str
    """The file that is being fetched, or was last."""
    bytes_done: int
    bytes_total: int
    note: str = ""
    """A sentence for people, such as why a cached copy is used; mostly empty."""


OnProgress = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """For callers that do not watch."""
