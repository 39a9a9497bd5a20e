"""Summarises latencies: percentiles and their confidence intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from penstock.manifest import Frozen


class LatencySummary(Frozen):
    """Latencies of successful requests, milliseconds."""

    count: int = Field(ge=1)
    mean: float
    minimum: float
    p50: float
    p90: float
    p95: float
    p99: float
    maximum: float
    p95_lower: float
    """Lower end of the 95 % confidence interval of p95 (order statistics; no distribution assumed)."""
    p95_upper: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LatencySummary | None:
        """Summarise latencies in seconds; None when there are none."""
        if not seconds:
            return None
        ordered = sorted(value * 1e3 for value in seconds)
        lower, upper = quantile_interval(ordered, 0.95)
        return cls(
            count=len(ordered),
            mean=math.fsum(ordered) / len(ordered),
            minimum=ordered[0],
            p50=quantile(ordered, 0.50),
            p90=quantile(ordered, 0.90),
            p95=quantile(ordered, 0.95),
            p99=quantile(ordered, 0.99),
            maximum=ordered[-1],
            p95_lower=lower,
            p95_upper=upper,
        )

    @property
    def columns(self) -> tuple[float, ...]:
        """Minimum, mean, p50, p90, p95, p99, maximum: as tables have them."""
        return (self.minimum, self.mean, self.p50, self.p90, self.p95, self.p99, self.maximum)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of a sorted, non-empty sequence, interpolated between neighbours."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def quantile_interval(ordered: Sequence[float], share: float) -> tuple[float, float]:
    """The 95 % confidence interval of a quantile: the order statistics with the ranks that the binomial law gives.

    With few samples the interval is clipped to the smallest and largest of them, and then covers less than 95 %.
    """
    count = len(ordered)
    reach = 1.96 * math.sqrt(count * share * (1 - share))
    lower = max(0, math.floor(count * share - reach) - 1)
    upper = min(count - 1, math.ceil(count * share + reach))
    return ordered[lower], ordered[upper]


def relative_spread(values: Sequence[float]) -> float:
    """Interquartile range over median: the noise of repeated measurements; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    ordered = sorted(values)
    middle = quantile(ordered, 0.5)
    return (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / middle if middle > 0 else 0.0
