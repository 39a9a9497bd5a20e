"""The merges of a BPE vocabulary with scores of pieces, as in sentencepiece. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def merges_of(scored: Iterable[tuple[str, float]], ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of two pieces into one, that with the highest score of the result first. `ids`: of all pieces."""
    merges = []
    for piece, score in dict(scored).items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in halves if left in ids and right in ids]
        merges += [(left, right, score) for left, right in sorted(known, key=lambda both: (ids[both[0]], ids[both[1]]))]
    merges.sort(key=lambda one: (one[2], len(one[0]), len(one[1])), reverse=True)
    return [(left, right) for left, right, _ in merges]
