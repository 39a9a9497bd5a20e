"""From values to positions on a chart, and where its ticks are. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end] in pixels, by way of `warp` (the logarithm, or nothing)."""

    low: float
    high: float
    start: float
    end: float
    warp: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        """The position; values outside are moved to the edge."""
        low, high = self.warp(self.low), self.warp(self.high)
        if high == low:
            return (self.start + self.end) / 2
        share = (self.warp(min(max(value, self.low), self.high)) - low) / (high - low)
        return self.start + share * (self.end - self.start)


def log_scale(values: Sequence[float], start: float, end: float, *, margin: float = 0.04) -> Scale:
    """A logarithmic scale around positive values, with a margin on both sides as a share of its length."""
    low, high = math.log(min(values)), math.log(max(values))
    reach = max(high - low, math.log(1.5)) * margin
    return Scale(math.exp(low - reach), math.exp(high + reach), start, end, math.log)


def linear_scale(low: float, high: float, start: float, end: float) -> Scale:
    """A plain scale; an empty range is widened."""
    return Scale(low, high if high > low else low + 1.0, start, end)


def log_ticks(low: float, high: float, *, most: int = 7) -> list[float]:
    """Round values within [low, high]: 1, 2 and 5 times powers of ten, or the powers alone when those are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    return ticks or [low]


def linear_ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Round values within [low, high], evenly spaced by 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def short(value: float) -> str:
    """A number for a tick or a cell: three significant digits at most, no exponent for everyday sizes."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
