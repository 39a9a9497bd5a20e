"""SmoothQuant: shift the outliers of activations into the weights, which the product does not notice. Pure numpy.

x W = (x / s) (s W) for any positive s per input channel. A channel of x with a large range would coarsen the grid of
the whole tensor; divided by its s it no longer does, and the weights, which have a scale per output channel, bear it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock_runtime.rows import Float

SMALLEST = 1e-5
"""Ranges below it count as this: a channel that is always zero needs no factor."""


def factors(magnitudes: Float, weights: Sequence[Float], alpha: float) -> Float:
    """The divisors [in] of activations whose channels reach `magnitudes` [in], going into `weights` [in, out].

    `alpha` 0 leaves all the difficulty with the activations, 1 moves all of it to the weights. The geometric mean of
    the divisors is 1: a common factor changes nothing.
    """
    activation = np.maximum(magnitudes, SMALLEST)
    weight = np.maximum(np.max([np.abs(w).max(axis=1) for w in weights], axis=0), SMALLEST)
    logarithms = alpha * np.log(activation) - (1 - alpha) * np.log(weight)
    return np.exp(logarithms - logarithms.mean()).astype(np.float32)
