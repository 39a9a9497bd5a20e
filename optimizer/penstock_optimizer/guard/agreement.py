"""Measures how near answers are to each other, and how certain a share or a mean is. Pure functions of numbers.

1 means equal, except for distances. The bootstrap is seeded, so that equal answers get equal verdicts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock_runtime.rows import Float

Vector = NDArray[np.float64]
SMALLEST_PROBABILITY = 1e-7
"""Smaller probabilities count as this one: float32 does not resolve them, and the logarithm must stay finite."""


def cosines(expected: Sequence[Float], actual: Sequence[Float]) -> Vector:
    """The cosine of each pair of vectors (flattened); 1 for two zero vectors, 0 for one."""
    result = np.empty(len(expected))
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        a, b = np.ravel(one).astype(np.float64), np.ravel(other).astype(np.float64)
        lengths = np.linalg.norm(a) * np.linalg.norm(b)
        result[index] = a @ b / lengths if lengths > 0 else float(not a.any() and not b.any())
    return np.clip(result, -1.0, 1.0)


def neighbour_overlap(expected: Sequence[Float], actual: Sequence[Float], count: int) -> Vector:
    """For each text the share of its `count` nearest texts (by cosine) that are the same in both sets of vectors.

    With fewer texts all of them count, and the share is 1.
    """
    before, after = _nearest(expected, count), _nearest(actual, count)
    return np.array([len(set(a) & set(b)) / max(len(a), 1) for a, b in zip(before, after, strict=True)])


def _nearest(vectors: Sequence[Float], count: int) -> list[list[int]]:
    matrix = np.stack([np.ravel(vector) for vector in vectors]).astype(np.float64)
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    matrix /= np.where(norms > 0, norms, 1.0)
    likeness = matrix @ matrix.T
    np.fill_diagonal(likeness, -np.inf)
    order = np.argsort(-likeness, axis=1, kind="stable")
    kept: list[list[int]] = order[:, : min(count, len(vectors) - 1)].tolist()
    return kept


def divergence(expected: Mapping[str, float], actual: Mapping[str, float]) -> float:
    """Kullback-Leibler divergence of two distributions over the same labels, in nats. A distance: 0 is the same."""
    p = np.array([max(expected[label], SMALLEST_PROBABILITY) for label in expected])
    q = np.array([max(actual.get(label, 0.0), SMALLEST_PROBABILITY) for label in expected])
    p, q = p / p.sum(), q / q.sum()
    return max(0.0, float(np.sum(p * np.log(p / q))))


def best_and_margin(scores: Mapping[str, float]) -> tuple[str, float]:
    """The label with the highest score (the first of equals by name) and its lead over the second; 1 for one label."""
    order = sorted(scores, key=lambda label: (-scores[label], label))
    return order[0], scores[order[0]] - scores[order[1]] if len(order) > 1 else 1.0


def kendall_tau(expected: Sequence[float], actual: Sequence[float]) -> float:
    """Kendall's tau-b of two lists of scores for the same items: 1 for the same order, -1 for the reverse. Items equal
    in both lists agree; fewer than two items, or only equal ones in both lists, give 1."""
    a, b = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    if a.size < 2:
        return 1.0
    upper = np.triu_indices(a.size, k=1)
    x = np.sign(a[:, None] - a[None, :])[upper]
    y = np.sign(b[:, None] - b[None, :])[upper]
    scale = float(np.sqrt(np.sum(x * x) * np.sum(y * y)))
    if scale == 0:
        return float(not x.any() and not y.any())
    return float(np.sum(x * y)) / scale


Span = tuple[int, int, str]
"""Start, end, label."""


def entities(labels: Sequence[str]) -> set[Span]:
    """Runs of tokens with the same label, without `O` and without the prefixes `B-` (starts a new run) and `I-`."""
    found: set[Span] = set()
    start, current = 0, "O"
    for index, label in enumerate([*labels, "O"]):
        kind = label.removeprefix("B-").removeprefix("I-")
        if kind != current or label.startswith("B-"):
            if current != "O":
                found.add((start, index, current))
            start, current = index, kind
    return found


def f1(expected: set[Span], actual: set[Span]) -> tuple[int, int]:
    """Twice the hits, and the sum of both sizes: the quotient is F1; sums over texts give the micro average."""
    return 2 * len(expected & actual), len(expected) + len(actual)


def overlap(expected: Sequence[int], actual: Sequence[int]) -> float:
    """The share of `expected` that is also in `actual`; 1 when nothing is expected."""
    return len(set(expected) & set(actual)) / len(set(expected)) if expected else 1.0


def character_f1(expected: tuple[int, int], actual: tuple[int, int]) -> float:
    """The overlap of two spans of characters: 1 for equal ones, 0 for separate ones; two empty ones are equal."""
    if expected == actual:
        return 1.0
    common = min(expected[1], actual[1]) - max(expected[0], actual[0])
    sizes = Counter(expected=expected[1] - expected[0], actual=actual[1] - actual[0])
    return 2 * max(common, 0) / max(sum(sizes.values()), 1)


Z = 1.959964
"""Of a two-sided 95 % interval."""
RESAMPLES = 1000
SEED = 20240229


def wilson_lower(successes: float, trials: int) -> float:
    """The lower end of the 95 % Wilson interval of a share; 0 without trials.

    Shares here are near 1, where the normal interval has no width.
    """
    if trials == 0:
        return 0.0
    share = successes / trials
    centre = share + Z * Z / (2 * trials)
    spread = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    return min(share, max(0.0, (centre - spread) / (1 + Z * Z / trials)))


def bootstrap_lower(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The lower end of the 95 % interval of a (weighted) mean by resampling texts; 0 without values."""
    if not len(values):
        return 0.0
    array = np.asarray(values, np.float64)
    weight = np.ones_like(array) if weights is None else np.asarray(weights, np.float64)
    drawn = np.random.default_rng(SEED).integers(0, array.size, size=(RESAMPLES, array.size))
    totals = weight[drawn].sum(axis=1)
    means = (array * weight)[drawn].sum(axis=1) / np.where(totals > 0, totals, 1.0)
    return float(np.percentile(means, 2.5))
