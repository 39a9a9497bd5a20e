"""The measured capacity of one replica: p95 latency by arrival rate, and the highest rate within an objective."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

KEEPS_UP = 0.9
"""A rate is over the capacity when a smaller share of it is completed per second, even if the latency is still low."""


class CapacityPoint(BaseModel):
    """One measurement with Poisson arrivals at a fixed mean rate, through the real HTTP server."""

    model_config = ConfigDict(frozen=True)

    arrivals_per_second: float = Field(gt=0)
    completed_per_second: float = Field(ge=0)
    p50_milliseconds: float = Field(ge=0)
    p95_milliseconds: float = Field(ge=0)
    p99_milliseconds: float = Field(ge=0)
    refused_share: float = Field(default=0.0, ge=0, le=1)
    """The share of requests answered with 429 or not at all."""
    samples: int = Field(ge=0)

    def meets(self, p95_milliseconds: float) -> bool:
        """True when this rate is within the objective, without refusals and without a growing queue."""
        within = self.p95_milliseconds <= p95_milliseconds and self.refused_share == 0
        return within and self.completed_per_second >= KEEPS_UP * self.arrivals_per_second


class CapacityCurve(BaseModel):
    """Points of one replica by rising arrival rate, for the workload of the endpoint."""

    model_config = ConfigDict(frozen=True)

    points: tuple[CapacityPoint, ...] = ()
    p95_objective_milliseconds: float | None = Field(default=None, gt=0)
    """The p95 for `requests_per_second`: the endpoint's objective, or three times that of a nearly idle replica where
    the endpoint has none. None: nothing was measured."""

    @property
    def requests_per_second(self) -> float | None:
        """The highest arrival rate within the objective; None when even a nearly idle replica is over it."""
        limit = self.p95_objective_milliseconds
        return None if limit is None else self.rate_within(limit)

    def rate_within(self, p95_milliseconds: float) -> float | None:
        """The highest arrival rate (requests/s) whose p95 stays within the objective; None without such a point.

        Walks up from the lowest rate and stops at the first point that misses, interpolating linearly between the last
        good and the first bad point. A later good point does not count: it is noise.
        """
        best: float | None = None
        last: CapacityPoint | None = None
        for point in sorted(self.points, key=lambda point: point.arrivals_per_second):
            if not point.meets(p95_milliseconds):
                rise = point.p95_milliseconds - last.p95_milliseconds if last is not None else 0.0
                # Interpolate the latency only where latency is the only reason that the point misses.
                only_late = point.meets(point.p95_milliseconds) and point.p95_milliseconds > p95_milliseconds
                if last is not None and only_late:
                    share = (p95_milliseconds - last.p95_milliseconds) / rise
                    best = last.arrivals_per_second + share * (point.arrivals_per_second - last.arrivals_per_second)
                break
            best, last = point.arrivals_per_second, point
        return best
