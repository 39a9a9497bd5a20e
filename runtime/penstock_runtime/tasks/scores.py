"""Logits to scores, and the order of scores. float32 and numerically stable: large logits do not overflow."""

from __future__ import annotations

import numpy as np

from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Float


def softmax(logits: Float) -> Float:
    """Over the last axis."""
    # Not the arrays' methods, which are Python code: slower than the computation for a few labels.
    raised: Float = np.exp(logits - np.maximum.reduce(logits, axis=-1, keepdims=True))
    total: Float = np.add.reduce(raised, axis=-1, keepdims=True)
    return raised / total


def sigmoid(logits: Float) -> Float:
    """Elementwise logistic function."""
    small = np.exp(-np.abs(logits))
    scores: Float = np.where(logits >= 0, np.float32(1), small) / (1 + small)
    return scores


def descending(scores: Float) -> list[int]:
    """Indices from the highest score [n] to the lowest; equal ones in their order."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order


def highest(scores: Float, count: int) -> list[int]:
    """Indices of the `count` highest scores [n], highest first; without sorting all of a vocabulary."""
    if count >= scores.size:
        return descending(scores)
    chosen = np.sort(np.argpartition(-scores, count - 1)[:count])
    order: list[int] = chosen[np.argsort(-scores[chosen], kind="stable")].tolist()
    return order


def finite(values: Float) -> Float:
    """The values; InferenceFailed when one of them is NaN or infinite (half precision may overflow)."""
    # Bytes instead of a second reduction: for short rows the calls of numpy take most of the time.
    if b"\0" in np.isfinite(values).tobytes():
        raise InferenceFailed(
            "The model's output is not a number", remedy="Report the text; another recipe may be needed for this model"
        )
    return values
