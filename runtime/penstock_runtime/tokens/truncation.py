"""How much of a text, or of two, stays when there is not room for all: counts, as the tokenizers library has them."""

from __future__ import annotations

from penstock_runtime.tokens.pieces import Side


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each of two texts stay in `room` tokens: the longer one gives up first.

    A text that fits into half of the room stays whole. What is left over by an odd room goes to the longer text.
    """
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(first, second)
    longer = shorter if shorter > room else max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = shorter + room % 2
    # With equal lengths the first text counts as the shorter one.
    return (longer, shorter) if first > second else (shorter, longer)


def windows(tokens: int, room: int, overlap: int, side: Side = Side.RIGHT) -> list[tuple[int, int]]:
    """Token ranges [start, stop) of at most `room` tokens that cover all of `tokens`, neighbours sharing `overlap`.

    The last one is shorter where it must be; a text that fits is one window. Where the left is given up first, they
    are counted from the end of the text, the last first. Needs 0 <= overlap < room.
    """
    if not 0 <= overlap < room:
        raise ValueError(f"an overlap of {overlap} tokens does not leave a step in windows of {room}")
    ranges = [(0, min(room, tokens))]
    while ranges[-1][1] < tokens:
        start = ranges[-1][0] + room - overlap
        ranges.append((start, min(start + room, tokens)))
    return ranges if side is Side.RIGHT else [(tokens - stop, tokens - start) for start, stop in ranges]


def count_windows(tokens: int, room: int, overlap: int) -> int:
    """How many ranges `windows` gives, without making them."""
    return 1 if tokens <= room else 1 + -(-(tokens - room) // (room - overlap))
