"""Tokens of a text: truncation, windows, and the template of special tokens around one text or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import islice
from typing import Any

from penstock.errors import UnsupportedModel
from penstock_runtime.rows import AnyPooling, Row

_PROBES = ("a", "the", "1", "一", "!")
"""Nearly every tokenizer gives at least one token for at least one of these texts."""
_MORE_PROBES = 100
"""Tokens of the vocabulary that are tried after these, for small vocabularies."""


class Side(StrEnum):
    """The end at which a text that is too long is cut."""

    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tokens of one text, without the special tokens of the template."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None = None
    """Characters [start, end) of the text that each token covers; None unless requested."""
    words: list[int | None] | None = None
    """The number of the word that each token belongs to, rising; None unless requested."""
    complete: bool = True
    """False if the text has more tokens than these: only one end of a very long text is tokenised."""

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
        """`count` tokens, the rest cut at `side`; all of them if there are no more."""
        if count >= len(self.ids):
            return self
        return self.part(0, count) if side is Side.RIGHT else self.part(len(self.ids) - count, len(self.ids))


@dataclass(frozen=True)
class Template:
    """`before` FIRST `after`, or `before` FIRST `between` SECOND `after`: special tokens, and each part's type."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    """Empty for a single text."""
    after: tuple[int, ...]
    types: tuple[tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]]
    """Token types of `before`, of the first text, of `between`, of the second text, of `after`."""

    @cached_property
    def specials(self) -> int:
        """Special tokens."""
        return len(self.before) + len(self.between) + len(self.after)

    @cached_property
    def has_types(self) -> bool:
        """Not everything is of type zero."""
        before, first, between, second, after = self.types
        return bool(first or second or any(before) or any(between) or any(after))

    def second_start(self, first: int) -> int:
        """Position of the second text's first token after a first text of `first` tokens."""
        return len(self.before) + first + len(self.between)

    def fill(self, first: list[int], second: list[int] | None = None) -> list[int]:
        """The whole sequence of ids; `second` is for a pair's template only."""
        if second is None:
            return [*self.before, *first, *self.after]
        return [*self.before, *first, *self.between, *second, *self.after]

    def fill_types(self, first: int, second: int = 0) -> list[int] | None:
        """Token types of texts of `first` and `second` tokens; None if the template has type zero everywhere."""
        if not self.has_types:
            return None
        before, first_type, between, second_type, after = self.types
        return [*before, *[first_type] * first, *between, *[second_type] * second, *after]

    def row(self, first: list[int], second: list[int] | None = None, *, pooling: AnyPooling | None = None) -> Row:
        """`fill` and `fill_types` as a row, to be pooled by `pooling`."""
        types = self.fill_types(len(first), 0 if second is None else len(second))
        return Row(self.fill(first, second), types, pooling)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each of two texts fit into `room` tokens: the longer text is cut first.

    A text that fits into half of the room is not cut. The odd token of an odd room goes to the longer text.
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

    The last one may be shorter; a text that fits is one window. With `side` left, they are counted from the end of the
    text, the last first. Needs 0 <= overlap < room.
    """
    if not 0 <= overlap < room:
        raise ValueError(f"an overlap of {overlap} tokens does not leave a step in windows of {room}")
    ranges = [(0, min(room, tokens))]
    while ranges[-1][1] < tokens:
        start = ranges[-1][0] + room - overlap
        ranges.append((start, min(start + room, tokens)))
    return ranges if side is Side.RIGHT else [(tokens - stop, tokens - start) for start, stop in ranges]


def count_windows(tokens: int, room: int, overlap: int) -> int:
    """The number of ranges of `windows`."""
    return 1 if tokens <= room else 1 + -(-(tokens - room) // (room - overlap))


def _probes(backend: Any) -> Iterator[str]:
    yield from _PROBES
    yield from islice(backend.get_vocab(with_added_tokens=False), _MORE_PROBES)  # takes 0.3 s for the largest


def probe(backend: Any, *, pair: bool, type_ids: bool) -> Template:
    """Find the template from the tokenizer's output: there are too many kinds of post-processors to read their JSON.

    `type_ids` False gives type zero everywhere, for models without token types. UnsupportedModel if the special tokens
    are not simply around the texts, in order.
    """
    for text in _probes(backend):
        try:
            encoding = backend.encode(text, text) if pair else backend.encode(text)
        except Exception:  # noqa: S112 - the library's plain one: the vocabulary has neither the text nor an unknown token
            continue
        texts = encoding.sequence_ids
        if 0 in texts and (1 in texts or not pair):
            types = encoding.type_ids if type_ids else [0] * len(texts)
            return _read(encoding.ids, types, texts)
    raise UnsupportedModel(
        f"the tokenizer makes no token of any of {', '.join(map(repr, _PROBES))}, nor of those of its vocabulary",
        remedy="Check tokenizer.json: its vocabulary does not belong to its normaliser",
    )


def _read(ids: list[int], types: list[int], texts: Sequence[int | None]) -> Template:
    first = [index for index, text in enumerate(texts) if text == 0]
    second = [index for index, text in enumerate(texts) if text == 1]
    ordered = first == list(range(first[0], first[-1] + 1)) and (
        not second or (second == list(range(second[0], second[-1] + 1)) and first[-1] < second[0])
    )
    if not ordered:
        raise UnsupportedModel(
            "the tokenizer's template does not keep each text in one piece, the first before the second",
            remedy="Use a model with a usual template, such as [CLS] A [SEP] B [SEP]",
        )
    last = second or first
    between = range(first[-1] + 1, second[0]) if second else range(0)
    return Template(
        before=tuple(ids[: first[0]]),
        between=tuple(ids[index] for index in between),
        after=tuple(ids[last[-1] + 1 :]),
        types=(
            tuple(types[: first[0]]),
            types[first[0]],
            tuple(types[index] for index in between),
            types[second[0]] if second else 0,
            tuple(types[last[-1] + 1 :]),
        ),
    )
