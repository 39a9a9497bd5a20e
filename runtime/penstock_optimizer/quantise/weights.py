"""Weights and ranges to 8-bit integers and back. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_runtime.rows import Float

Int8 = NDArray[np.int8]

FULL = 127
"""The largest magnitude of a signed 8-bit weight; -128 is left out, so that the range is symmetric."""
REDUCED = 63
"""The same in 7 bits: 2 * 255 * 63 fits into 16 bits, so that AVX2 and AVX-512 without VNNI cannot saturate."""


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """`values * scale` is about the weight."""

    values: Int8
    """[in, out]"""
    scale: Float
    """[out] per channel, or [] for the whole matrix."""


def quantise_weight(weight: Float, *, per_channel: bool, largest: int = FULL) -> QuantisedWeight:
    """Round a weight [in, out] to -largest..largest, symmetric, to nearest."""
    magnitude = np.abs(weight).max(axis=0) if per_channel else np.abs(weight).max()
    scale = np.asarray(magnitude, np.float32) / np.float32(largest)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)  # an all-zero channel stays zero
    values = np.clip(np.rint(weight / scale), -largest, largest).astype(np.int8)
    return QuantisedWeight(values, scale)


@dataclass(frozen=True)
class Grid:
    """An unsigned 8-bit grid of a whole tensor: value = (stored - zero) * step."""

    step: float
    zero: int


def grid(low: float, high: float) -> Grid:
    """The grid of 256 steps that covers low..high and has an exact zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / 255 or 1.0
    return Grid(step, int(np.clip(np.rint(-low / step), 0, 255)))
