"""What a text is split into, before special tokens are added."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Side(StrEnum):
    """Which end of an over-long text is given up."""

    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tokens of one text, special ones of the template not included."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None = None
    """Characters [start, end) of the text that each token covers; None unless asked for."""
    words: list[int | None] | None = None
    """The number of the word that each token belongs to, rising; None unless asked for."""
    complete: bool = True
    """False when the text has more tokens than these: it was so long that only an end of it was looked at."""

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Pieces:
        """Tokens [start, stop)."""
        return Pieces(
            ids=self.ids[start:stop],
            offsets=None if self.offsets is None else self.offsets[start:stop],
            words=None if self.words is None else self.words[start:stop],
            complete=self.complete,
        )

    def keep(self, count: int, side: Side) -> Pieces:
        """`count` tokens, the others given up at `side`; all of them when there are no more than that."""
        if count >= len(self.ids):
            return self
        return self.part(0, count) if side is Side.RIGHT else self.part(len(self.ids) - count, len(self.ids))
