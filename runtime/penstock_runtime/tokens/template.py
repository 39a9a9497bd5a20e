"""Where special tokens and token types go around one text or two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.errors import UnsupportedModel
from penstock_runtime.rows import Pooling, Row

_PROBES = ("a", "the", "1", "一", "!")
"""Texts of which at least one is not normalised away by any tokenizer we know."""


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
        """Token types of texts of so many tokens; None when the template has type zero everywhere."""
        if not self.has_types:
            return None
        before, first_type, between, second_type, after = self.types
        return [*before, *[first_type] * first, *between, *[second_type] * second, *after]

    def row(self, first: list[int], second: list[int] | None = None, *, pooling: Pooling | None = None) -> Row:
        """`fill` and `fill_types` as a row, to be pooled so."""
        types = self.fill_types(len(first), 0 if second is None else len(second))
        return Row(self.fill(first, second), types, pooling)


def probe(backend: Any, *, pair: bool, type_ids: bool) -> Template:
    """Learn the template from what the tokenizer does: post-processors come in too many kinds to read each one's JSON.

    `type_ids` False gives type zero everywhere, for models without token types. UnsupportedModel when special tokens
    do not simply stand around the texts in order.
    """
    for text in _PROBES:
        encoding = backend.encode(text, text) if pair else backend.encode(text)
        texts = encoding.sequence_ids
        if 0 in texts and (1 in texts or not pair):
            types = encoding.type_ids if type_ids else [0] * len(texts)
            return _read(encoding.ids, types, texts)
    raise UnsupportedModel(
        f"the tokenizer makes no token of any of {', '.join(map(repr, _PROBES))}",
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
