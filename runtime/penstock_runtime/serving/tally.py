"""A histogram of plain numbers, for what every request or token touches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Tally:
    """A histogram for one writing thread. A reader may see an incomplete observation; the next scrape has it."""

    __slots__ = ("_counts", "_sum", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(sorted(set(bounds)))
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a value on a bound belongs below it, as Prometheus' `le` means."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        total = 0
        result: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        return result

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """The metric family for Prometheus."""
        family = HistogramMetricFamily(name, documentation)
        family.add_metric([], self.buckets(), self._sum)
        return family
