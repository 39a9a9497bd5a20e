"""Scores of tokens into entities: the five aggregation strategies of transformers' token-classification pipeline.

Pure functions over lists of tokens; knows nothing of requests or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from penstock_runtime.rows import Float

Join = Callable[[Sequence[str]], str]
"""Tokens, as the vocabulary spells them, into text."""


class Aggregation(StrEnum):
    """How tokens become entities."""

    NONE = "none"
    """Each token by itself."""
    SIMPLE = "simple"
    """Neighbouring tokens of one tag, by B- and I- prefixes."""
    FIRST = "first"
    """As simple, but a word has the label of its first token."""
    AVERAGE = "average"
    """As simple, but a word has the label with the highest mean score."""
    MAX = "max"
    """As simple, but a word has the label of its most certain token."""

    @property
    def by_word(self) -> bool:
        """Whether the tokens of a word are judged together."""
        return self in {Aggregation.FIRST, Aggregation.AVERAGE, Aggregation.MAX}


@dataclass(slots=True)
class Token:
    """One token of a window, special ones left out."""

    word: str
    """As the vocabulary spells it; the text itself for an unknown token."""
    scores: Float
    """[labels], summing to 1."""
    start: int
    end: int
    """Characters [start, end) of the text."""
    index: int
    """Position in the window, special tokens counted."""
    is_subword: bool
    """Whether it continues the word of the token before it."""


@dataclass(slots=True)
class Labelled:
    """A token or a word with its label."""

    label: str
    score: Float
    """A float32 scalar: means are taken in float32, as transformers takes them."""
    word: str
    start: int
    end: int
    index: int = 0


def entities(
    tokens: Sequence[Token], aggregation: Aggregation, labels: Sequence[str], join: Join
) -> list[dict[str, Any]]:
    """The entities of one window in order, those without a meaning (`O`) included.

    Keys: `entity`, `score`, `index`, `word`, `start`, `end` for `NONE`; else `entity_group` instead of `entity`, and
    no `index`.
    """
    if aggregation.by_word:
        labelled = [_word(group, aggregation, labels, join) for group in _words(tokens)]
    else:
        labelled = [_token(token, labels) for token in tokens]
    if aggregation is Aggregation.NONE:
        return [
            {
                "entity": one.label,
                "score": float(one.score),
                "index": one.index,
                "word": one.word,
                "start": one.start,
                "end": one.end,
            }
            for one in labelled
        ]
    return [_group(group, join) for group in _groups(labelled)]


def merge_windows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entities of overlapping windows of one text, each place of the text once: the longer one, then the surer one."""
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


def _token(token: Token, labels: Sequence[str]) -> Labelled:
    best = int(token.scores.argmax())
    return Labelled(labels[best], token.scores[best], token.word, token.start, token.end, token.index)


def _words(tokens: Sequence[Token]) -> list[list[Token]]:
    words: list[list[Token]] = []
    for token in tokens:
        if words and token.is_subword:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _word(tokens: list[Token], aggregation: Aggregation, labels: Sequence[str], join: Join) -> Labelled:
    if aggregation is Aggregation.AVERAGE:
        scores = np.mean([token.scores for token in tokens], axis=0)
    elif aggregation is Aggregation.MAX:
        scores = max(tokens, key=lambda token: float(token.scores.max())).scores
    else:
        scores = tokens[0].scores
    best = int(scores.argmax())
    word = join([token.word for token in tokens])
    return Labelled(labels[best], scores[best], word, tokens[0].start, tokens[-1].end)


def _groups(labelled: Sequence[Labelled]) -> list[list[Labelled]]:
    groups: list[list[Labelled]] = []
    for one in labelled:
        begins, tag = _tag(one.label)
        if groups and not begins and tag == _tag(groups[-1][-1].label)[1]:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _group(group: list[Labelled], join: Join) -> dict[str, Any]:
    return {
        "entity_group": group[0].label.split("-", 1)[-1],
        "score": float(np.mean([one.score for one in group])),
        "word": join([one.word for one in group]),
        "start": group[0].start,
        "end": group[-1].end,
    }


def _tag(label: str) -> tuple[bool, str]:
    """Whether the label begins an entity, and its tag; a label without a prefix continues one."""
    if label.startswith(("B-", "I-")):
        return label[0] == "B", label[2:]
    return False, label
