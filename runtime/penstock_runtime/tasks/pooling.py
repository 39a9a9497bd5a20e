"""Token vectors into one vector."""

from __future__ import annotations

import math

import numpy as np

from penstock_runtime.rows import Float, Pooling
from penstock_runtime.tasks.scores import finite


def pool(vectors: Float, pooling: Pooling) -> Float:
    """[tokens, width] -> [width], in memory of its own. The row has no padding: every token counts."""
    match pooling:
        case Pooling.CLS:
            first: Float = vectors[0].copy()
            return first
        case Pooling.LAST:
            last: Float = vectors[-1].copy()
            return last
        case Pooling.MAX:
            highest: Float = np.maximum.reduce(vectors, axis=0)
            return highest
        case Pooling.MEAN:
            # Not the array's method, which goes through Python: slower than a short row, and the same to the bit.
            mean: Float = np.add.reduce(vectors, axis=0) / len(vectors)
            return mean


def normalise(vector: Float) -> Float:
    """Length 1; a zero vector stays as it is. InferenceFailed when a value is not a number."""
    square = float(vector.dot(vector))
    if not math.isfinite(square):  # a value is none, or is so large that its square is not one
        square = float(np.square(finite(vector), dtype=np.float64).sum())
    length = math.sqrt(square)
    scaled: Float = vector / length if length > 0 else vector
    return scaled


def shorten(vector: Float, dimensions: int | None, *, normalised: bool) -> Float:
    """The first `dimensions` values (Matryoshka), of length 1 again where asked for.

    InferenceFailed when one of them is not a number.
    """
    head = vector if dimensions is None else vector[:dimensions]
    return normalise(head) if normalised else np.ascontiguousarray(finite(head))
