"""Start and end scores to answers: the best spans of a window, and of several windows.

Pure functions, independent of requests and rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_runtime.rows import Float
from penstock_runtime.tasks.scores import highest


@dataclass(frozen=True, slots=True)
class WindowSpans:
    """The best spans of one window."""

    spans: list[tuple[float, int, int]]
    """Score, first and last token (positions in the window's context), the best first."""
    null_score: float
    """The score of no answer."""


def best_spans(
    start: Float, end: Float, context: slice, others: NDArray[np.bool_] | None, *, count: int, longest: int
) -> WindowSpans:
    """The `count` best spans of at most `longest` tokens within the context.

    `start`, `end`: logits [tokens]. Scores are products of two softmaxes over the context and `others` (the tokens
    that mean no answer), which are no part of a span.
    """
    allowed = np.zeros(start.shape, dtype=bool)
    allowed[context] = True
    if others is not None:
        allowed |= others
    if not allowed.any():
        return WindowSpans(spans=[], null_score=0.0)
    # In double precision: the product of two small float32 scores may underflow, and all spans be equal.
    begins, ends = (_share(logits.astype(np.float64), allowed) for logits in (start, end))
    null_score = float(begins[0] * ends[0])
    begins, ends = begins[context], ends[context]
    tokens = begins.size
    if tokens == 0:
        return WindowSpans(spans=[], null_score=null_score)
    width = min(longest, tokens)
    # Row i holds the ends i, i + 1, ... of spans from i: as many columns as a span may have tokens.
    padded = np.full(tokens + width - 1, -1.0)
    padded[:tokens] = ends
    reachable = np.lib.stride_tricks.sliding_window_view(padded, width)
    scores = np.where(reachable < 0, -1.0, begins[:, np.newaxis] * reachable).ravel()
    chosen = [index for index in highest(scores, count) if scores[index] >= 0]
    return WindowSpans(
        spans=[(float(scores[index]), index // width, index // width + index % width) for index in chosen],
        null_score=null_score,
    )


def _share(logits: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    raised = np.where(allowed, np.exp(logits - logits[allowed].max(), where=allowed, out=np.zeros_like(logits)), 0.0)
    shares: NDArray[np.float64] = raised / raised.sum()
    return shares


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """A span in characters."""

    score: float
    start: int
    end: int


def merge(
    windows: Iterable[Sequence[AnswerSpan]], text: str, *, null_score: float | None, count: int
) -> list[dict[str, Any]]:
    """The `count` best answers of all windows, the same words (whatever their case) counted once with the sum of
    their scores. `null_score` offers the empty answer as well."""
    merged: dict[str, dict[str, Any]] = {}
    for answer in (answer for window in windows for answer in window):
        words = text[answer.start : answer.end]
        known = merged.get(words.lower())
        if known is not None:
            known["score"] += answer.score
        else:
            merged[words.lower()] = {"score": answer.score, "start": answer.start, "end": answer.end, "answer": words}
    answers = list(merged.values())
    if null_score is not None:
        answers.append({"score": null_score, "start": 0, "end": 0, "answer": ""})
    return sorted(answers, key=lambda answer: float(answer["score"]), reverse=True)[:count]
