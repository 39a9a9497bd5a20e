"""What the names of an ONNX graph stand for while it is read for the native engine, and the buffers it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Per = Literal["token", "row", "chosen"]
"""What a buffer has a line for: each token, each row, or each token of one id."""


@dataclass(frozen=True, eq=False)
class GraphValue:
    """A buffer, times factors for each of its channels."""

    buffer: int
    width: int
    per: Per
    factors: str = ""
    used: int = 0
    """How many numbers of a line count, where a product was filled up; 0: all."""


@dataclass(frozen=True, eq=False)
class TableSum:
    """Tables whose rows are added up for each token: not computed yet."""

    words: str = ""
    positions: str = ""
    types: str = ""
    padding: int = -1


class Mask:
    """What is computed of the attention mask."""


@dataclass(frozen=True)
class Same:
    """Which tokens have an id."""

    number: int


@dataclass(frozen=True)
class Where:
    """Where they are: two numbers for each of them, or two lines of numbers."""

    number: int
    turned: bool = False


@dataclass(frozen=True)
class Counted:
    """Positions that count from the padding id."""

    padding: int


@dataclass(frozen=True)
class Distances:
    """A bias on the scores by how far a key is behind its query."""

    table: str
    """A tensor of the file."""
    positions: int
    first: bool = False
    """For the first token's query alone."""


@dataclass(frozen=True)
class Part:
    """One of the equal parts of a buffer's lines: queries, keys or values, or one of the numbers."""

    whole: GraphValue
    index: int
    count: int


@dataclass(frozen=True)
class Column:
    """One number of each line of a buffer."""

    whole: GraphValue
    index: int


class Buffers:
    """Hands out buffers; one whose readers are through is used again for what has the same shape."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int, Per]] = []
        self.count = 0

    def take(self, width: int, per: Per) -> GraphValue:
        """One with lines of `width` numbers."""
        for index, (buffer, *shape) in enumerate(self._free):
            if shape == [width, per]:
                del self._free[index]
                return GraphValue(buffer, width, per)
        self.count += 1
        return GraphValue(self.count - 1, width, per)

    def give(self, value: GraphValue) -> None:
        """What it holds is not needed any more."""
        self._free.append((value.buffer, value.width, value.per))
