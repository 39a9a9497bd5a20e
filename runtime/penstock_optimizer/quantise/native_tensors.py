"""Constants of a graph in the forms that the native engine reads them in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_runtime.engines.native.graph_file import DISTANCES_SPARE
from penstock_runtime.rows import Float


def narrow(words: Float) -> tuple[NDArray[np.int16], Float]:
    """Word vectors [words, width] in 16 bits, and the scale of each word."""
    scale = np.maximum(np.abs(words).max(axis=1), np.float32(1e-12)) / np.float32(32767)
    return np.rint(words / scale[:, np.newaxis]).astype(np.int16), scale.astype(np.float32)


def by_distance(bias: NDArray[Any]) -> Float | None:
    """From a bias on the scores [1, heads, positions, positions], of a query (third axis) and a key (fourth), to
    [heads, 2 * positions - 1 + spare]: from the key that is furthest before its query to the one furthest behind it.
    None for a bias that is of another shape, or not the same wherever query and key are as far apart."""
    if bias.ndim != 4 or len(bias) != 1 or bias.shape[2] != bias.shape[3]:
        return None
    if not np.array_equal(bias[:, :, 1:, 1:], bias[:, :, :-1, :-1]):
        return None
    line = np.concatenate([bias[0, :, :0:-1, 0], bias[0, :, 0]], axis=1)
    return np.pad(line, ((0, 0), (0, DISTANCES_SPARE))).astype(np.float32)
