"""What one replica can take: measured points of arrival rate against p95, and the highest rate within an objective."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

KEEPS_UP = 0.9
"""A rate of which a smaller share is answered as it comes is over the capacity, whatever its latency says yet."""


class CapacityPoint(BaseModel):
    """One measurement with arrivals at random (Poisson) at a fixed mean rate, through the real HTTP server."""

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
        """True when this rate is answered within the objective, without refusals and without a growing queue."""
        within = self.p95_milliseconds <= p95_milliseconds and self.refused_share == 0
        return within and self.completed_per_second >= KEEPS_UP * self.arrivals_per_second


class CapacityCurve(BaseModel):
    """Points of one replica by rising arrival rate, for the workload that the endpoint states."""

    model_config = ConfigDict(frozen=True)

    points: tuple[CapacityPoint, ...] = ()
    p95_objective_milliseconds: float | None = Field(default=None, gt=0)
    """The p95 that `requests_per_second` keeps: the endpoint's, or three times that of a nearly idle replica where the
    endpoint states none. None: nothing was measured."""

    @property
    def requests_per_second(self) -> float | None:
        """`r_slo`: the highest arrival rate within the objective; None when not even a nearly idle replica is."""
        limit = self.p95_objective_milliseconds
        return None if limit is None else self.rate_within(limit)

    def rate_within(self, p95_milliseconds: float) -> float | None:
        """The highest arrival rate (requests/s) whose p95 stays within the objective; None without such a point.

        Walks up from the lowest rate and stops at the first point that misses, interpolating linearly between the last
        good and the first bad point. A later point that happens to be good again does not count: it is noise.
        """
        best: float | None = None
        last: CapacityPoint | None = None
        for point in sorted(self.points, key=lambda point: point.arrivals_per_second):
            if not point.meets(p95_milliseconds):
                rise = point.p95_milliseconds - last.p95_milliseconds if last is not None else 0.0
                # Between the two the latency can be interpolated, as long as latency is all that is wrong with it.
                only_late = point.meets(point.p95_milliseconds) and point.p95_milliseconds > p95_milliseconds
                if last is not None and only_late:
                    share = (p95_milliseconds - last.p95_milliseconds) / rise
                    best = last.arrivals_per_second + share * (point.arrivals_per_second - last.arrivals_per_second)
                break
            best, last = point.arrivals_per_second, point
        return best
