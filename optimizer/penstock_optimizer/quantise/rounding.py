"""Numbers to 8-bit integers. Pure numpy.

Rounding each weight to the nearest step is not the best that can be done: what matters is the product, and the inputs
are correlated, so that the error of one weight can be made good by those that are rounded after it (optimal brain
quantisation, known as GPTQ).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_runtime.rows import Float

Int8 = NDArray[np.int8]

BITS = 8
LARGEST = 127
"""The largest magnitude of a signed 8-bit weight; -128 is left out, so that the range is symmetric."""
PAIR = 128
"""The largest sum of two neighbouring weights of a sign where pairs are limited: 255 * 128 fits into 16 bits.

Without VNNI, AVX2 and AVX-512 multiply unsigned activations by signed weights in pairs (inputs 0 and 1, 2 and 3, ...)
and saturate their sum at 16 bits. The usual remedy gives all weights 7 bits; but hardly any pair is that large."""
WIDER = (1.0, 1.1, 1.2, 1.3, 1.45, 1.6, 1.8, 2.0)
"""Factors of a channel's scale that are tried where pairs are limited."""
NARROWER = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
"""Factors of a channel's scale that are tried where weights have fewer than 8 bits: a finer step for most of them is
worth more than the exact value of the largest."""
DAMPING = 0.01
"""Of the mean of the diagonal, added to it: directions that the samples do not show stay as they are."""
BLOCK = 64
"""Inputs rounded before the rest is corrected in one product."""
SMALLEST_SCALE = np.float32(1e-30)
"""Least scale of stored weights: the scale of a channel or group of zeros."""


def largest_step(weight: Float, axis: int, largest: int = LARGEST) -> Float:
    """The symmetric step that puts the largest magnitude along the axis, which stays, on `largest`."""
    return np.asarray(np.abs(weight).max(axis, keepdims=True) / np.float32(largest), np.float32)


def rounded(weight: Float, axis: int) -> tuple[Int8, Float]:
    """Values -127..127 of the shape of the weight, each weight rounded to the nearest, and one scale along the axis."""
    scale = np.maximum(largest_step(weight, axis), SMALLEST_SCALE)
    return np.clip(np.rint(weight / scale), -LARGEST, LARGEST).astype(np.int8), scale


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """`values * scale` is about the weight."""

    values: Int8
    """[in, out]"""
    scale: Float
    """[out] per channel, or [] for the whole matrix."""

    def float(self) -> Float:
        """The dequantised weights, [in, out]."""
        return np.asarray(self.values * self.scale, np.float32)


def quantise_weight(
    weight: Float, *, per_channel: bool, limit_pairs: bool = False, bits: int = BITS, samples: Float | None = None
) -> QuantisedWeight:
    """A weight [in, out] on the grid -127..127 times a scale, symmetric.

    `limit_pairs` keeps the sum of two neighbouring weights of a sign within `PAIR`; it is for 8 bits. Of fewer `bits`
    (4 to 7) the values are the upper ones of 8, those below are 0. `samples` [n, in] are inputs of the product: with
    them each rounding error is made good by the weights that follow; without them each weight is rounded to nearest.
    """
    largest = LARGEST >> BITS - bits
    steps_of = weight if per_channel else weight.reshape(-1)
    scale = largest_step(steps_of, 0, largest)[0]
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)  # an all-zero channel stays zero
    rule = _Rule(largest, limit_pairs)
    if limit_pairs or bits < BITS:
        importance = np.ones(len(weight), np.float32) if samples is None else np.mean(samples**2, axis=0)
        scale = _fitted(weight, scale, WIDER if limit_pairs else NARROWER, importance, rule)
    steps = _nearest(weight, scale, rule) if samples is None else _compensated(weight, scale, samples, rule)
    below = 2 ** (BITS - bits)
    return QuantisedWeight((steps * below).astype(np.int8), np.asarray(scale / np.float32(below), np.float32))


@dataclass(frozen=True)
class _Rule:
    """Which steps a weight may have."""

    largest: int
    limit_pairs: bool


def _nearest(weight: Float, scale: Float, rule: _Rule) -> Float:
    """Each weight on the nearest step, as float32."""
    steps = np.asarray(weight / scale, np.float32)
    if rule.limit_pairs:
        even = len(steps) // 2 * 2
        first, second = steps[:even:2], steps[1:even:2]
        first -= _excess(first, second) / 2
        first[:] = np.rint(first)
        second[:] = np.clip(np.rint(second), *_pair_range(first))
    return np.clip(np.rint(steps), -rule.largest, rule.largest)


def _excess(first: Float, second: Float) -> Float:
    """How far pairs go over their limit, with the sign of their members."""
    together = np.where(first * second > 0, first + second, 0)
    return np.asarray(np.sign(together) * np.maximum(np.abs(together) - PAIR, 0), np.float32)


def _pair_range(first: Float) -> tuple[Float, Float]:
    """The least and the largest weight that may be paired with `first`."""
    return np.maximum(-first, 0) - PAIR, PAIR - np.maximum(first, 0)


def _fitted(weight: Float, scale: Float, factors: Sequence[float], importance: Float, rule: _Rule) -> Float:
    """The scale, per channel or for all, that does the least damage: when pairs are limited, a coarser grid has fewer
    of them to cut, at twice the step none."""
    best = np.full(scale.shape, np.inf)
    result = scale.copy()
    for factor in factors:
        other = scale * np.float32(factor)
        error = (weight - _nearest(weight, other, rule) * other) ** 2 * importance[:, np.newaxis]
        damage = error.sum(axis=0) if scale.ndim else error.sum()
        result = np.where(damage < best, other, result)
        best = np.minimum(best, damage)
    return np.asarray(result, np.float32)


def _compensated(weight: Float, scale: Float, samples: Float, rule: _Rule) -> Float:
    """The steps, as float32, rounded input by input. With H the second moments of the inputs and H = R R^T, R upper
    triangular, the rows of R^-1 say how the error of one input is best spread over those after it."""
    moments = (samples.T @ samples).astype(np.float64)
    size = len(moments)
    moments[np.diag_indices(size)] += DAMPING * np.mean(np.diag(moments)) + 1e-12
    upper = np.asarray(np.linalg.cholesky(moments[::-1, ::-1])[::-1, ::-1], np.float64)
    spread = _inverse(upper).astype(np.float32)
    left = np.array(weight, np.float32)
    rounded = np.empty(left.shape, np.float32)
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        errors = np.empty((stop - start, left.shape[1]), np.float32)
        for row in range(start, stop):
            steps = left[row] / scale
            if rule.limit_pairs and row % 2 == 0 and row + 1 < size:
                steps -= _excess(steps, left[row + 1] / scale) / 2
            steps = np.clip(np.rint(steps), -rule.largest, rule.largest)
            if rule.limit_pairs and row % 2:
                steps = np.clip(steps, *_pair_range(rounded[row - 1]))
            rounded[row] = steps
            errors[row - start] = (left[row] - steps * scale) / spread[row, row]
            left[row + 1 : stop] -= np.outer(spread[row, row + 1 : stop], errors[row - start])
        left[stop:] -= spread[start:stop, stop:].T @ errors
    return rounded


def _inverse(upper: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of an upper triangular matrix, by halves: a sixth of the work of a general inverse."""
    size = len(upper)
    if size <= 4 * BLOCK:
        return np.asarray(np.linalg.inv(upper))
    half = size // 2
    result = np.zeros_like(upper)
    result[:half, :half] = _inverse(upper[:half, :half])
    result[half:, half:] = _inverse(upper[half:, half:])
    result[:half, half:] = -result[:half, :half] @ upper[:half, half:] @ result[half:, half:]
    return result


@dataclass(frozen=True)
class QuantisationGrid:
    """An unsigned 8-bit grid of a whole tensor: value = (stored - zero) * step."""

    step: float
    zero: int


def grid(low: float, high: float) -> QuantisationGrid:
    """The grid of 256 steps that covers low..high and has an exact zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / 255 or 1.0
    return QuantisationGrid(step, int(np.clip(np.rint(-low / step), 0, 255)))
