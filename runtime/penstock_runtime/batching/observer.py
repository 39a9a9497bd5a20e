"""What the batching tells about itself while it works."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Called from the event loop: must be quick."""

    def batch(self, rows: int, real_tokens: int, padded_tokens: int) -> None:
        """A batch has run: `real_tokens` of its rows, in a rectangle of `padded_tokens`."""
        ...

    def cache(self, name: str, *, hit: bool) -> None:
        """A cache was asked; `name` is `answers` or `tokens`."""
        ...


class Unobserved:
    """Nobody looks."""

    def batch(self, rows: int, real_tokens: int, padded_tokens: int) -> None:
        """See `Observer`."""

    def cache(self, name: str, *, hit: bool) -> None:
        """See `Observer`."""
