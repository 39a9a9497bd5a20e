"""How sure a share or a mean is. Pure; the bootstrap is seeded, so that the same answers give the same verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959964
"""Of a two-sided 95 % interval."""
RESAMPLES = 1000
SEED = 20240229


def wilson_lower(successes: float, trials: int) -> float:
    """The lower end of the 95 % Wilson interval of a share; 0 without trials.

    Wilson's, since shares here are near 1, where the normal interval has no width at all.
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
