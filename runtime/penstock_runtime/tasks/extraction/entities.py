"""Token scores to entities: the five aggregation strategies of transformers' token-classification pipeline.

Pure functions over a window's tokens, independent of requests and rows. Computed for all tokens at once where possible;
words are joined only for the returned entities, since most tokens have no entity (`O`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from penstock_runtime.rows import Float

Join = Callable[[Sequence[str]], str]
"""Joins tokens of the vocabulary to a text."""


class Aggregation(StrEnum):
    """Aggregation strategies of tokens to entities."""

    NONE = "none"
    """Each token separately."""
    SIMPLE = "simple"
    """Adjacent tokens of one tag, by B- and I- prefixes."""
    FIRST = "first"
    """As simple, but a word has the label of its first token."""
    AVERAGE = "average"
    """As simple, but a word has the label with the highest mean score."""
    MAX = "max"
    """As simple, but a word has the label of its token with the highest score."""

    @property
    def by_word(self) -> bool:
        """True if the tokens of a word get one label."""
        return self in {Aggregation.FIRST, Aggregation.AVERAGE, Aggregation.MAX}


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens of one row, without special ones; one entry for each token in each field."""

    words: Sequence[str]
    """Tokens of the vocabulary; the text itself for an unknown token."""
    scores: Float
    """[tokens, labels], each row summing to 1."""
    places: Sequence[tuple[int, int]]
    """Characters [start, end) of the text."""
    continues: Sequence[bool]
    """True if it continues the word of the previous token."""
    first: int
    """Position in the row of the first token."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A token, or the tokens of a word, under one label."""

    label: str
    score: float
    begin: int
    end: int
    """Tokens [begin, end) of the window."""


def entities(
    window: Window, aggregation: Aggregation, labels: Sequence[str], *, ignored: Collection[str], join: Join
) -> list[dict[str, Any]]:
    """The entities of one window in order, without those with `ignored` labels (for groups: tags).

    Keys: `entity`, `score`, `index`, `word`, `start`, `end` for `NONE`; else `entity_group` instead of `entity`, and
    no `index`.
    """
    units = _units(window, aggregation, labels)
    if aggregation is Aggregation.NONE:
        return [
            {
                "entity": unit.label,
                "score": unit.score,
                "index": window.first + unit.begin,
                "word": window.words[unit.begin],
                "start": window.places[unit.begin][0],
                "end": window.places[unit.begin][1],
            }
            for unit in units
            if unit.label not in ignored
        ]
    found = []
    for group in _groups(units):
        tag = group[0].label.split("-", 1)[-1]
        if tag in ignored:
            continue
        words = [_word(window, unit, join) if aggregation.by_word else window.words[unit.begin] for unit in group]
        found.append(
            {
                "entity_group": tag,
                "score": sum(unit.score for unit in group) / len(group),
                "word": join(words),
                "start": window.places[group[0].begin][0],
                "end": window.places[group[-1].end - 1][1],
            }
        )
    return found


def merge_windows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the entities of overlapping windows of a text: of overlapping ones the longer, then the higher score."""
    merged: list[dict[str, Any]] = []
    for entity in sorted(found, key=lambda entity: int(entity["start"])):
        last = merged[-1] if merged else None
        if last is None or not last["start"] <= entity["start"] < last["end"]:
            merged.append(entity)
            continue
        longer = (entity["end"] - entity["start"]) - (last["end"] - last["start"])
        if longer > 0 or (longer == 0 and entity["score"] > last["score"]):
            merged[-1] = entity
    return merged


def _units(window: Window, aggregation: Aggregation, labels: Sequence[str]) -> list[_Unit]:
    """Tokens, or words, each with its best label."""
    count = len(window.words)
    if not count:
        return []
    begins = list(range(count))
    scores = window.scores
    if aggregation.by_word:
        # A window may begin inside a word: its first token begins a unit in any case.
        begins = [index for index in begins if index == 0 or not window.continues[index]]
    ends = [*begins[1:], count]
    if aggregation is Aggregation.FIRST:
        scores = scores[begins]
    elif aggregation is Aggregation.AVERAGE:
        sizes = np.array([end - begin for begin, end in zip(begins, ends, strict=True)], dtype=np.float32)
        sums: Float = np.add.reduceat(scores, begins, axis=0)
        scores = sums / sizes[:, np.newaxis]
    elif aggregation is Aggregation.MAX:
        surest = scores.max(axis=1).tolist()
        scores = scores[
            [max(range(begin, end), key=surest.__getitem__) for begin, end in zip(begins, ends, strict=True)]
        ]
    best = scores.argmax(axis=1)
    values = scores[np.arange(len(begins)), best].tolist()
    return [
        _Unit(labels[label], value, begin, end)
        for label, value, begin, end in zip(best.tolist(), values, begins, ends, strict=True)
    ]


def _word(window: Window, unit: _Unit, join: Join) -> str:
    return join(window.words[unit.begin : unit.end])


def _groups(units: Sequence[_Unit]) -> list[list[_Unit]]:
    groups: list[list[_Unit]] = []
    last = ""
    for unit in units:
        begins, tag = _tag(unit.label)
        if groups and not begins and tag == last:
            groups[-1].append(unit)
        else:
            groups.append([unit])
        last = tag
    return groups


def _tag(label: str) -> tuple[bool, str]:
    """Whether the label begins an entity, and its tag; a label without a prefix continues one."""
    if label.startswith(("B-", "I-")):
        return label[0] == "B", label[2:]
    return False, label
