"""What is known about a metric: a value, that nothing happens, or nothing at all. Three types, so none is mistaken.

Zero is a statement ("no requests came"), and must be proven: an outage, an empty vector, a NaN and a series that went
stale look like zero to whoever maps them to a number, and have scaled services to nothing at their peak
(docs/explanation/autoscaling.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Value:
    """A finite number in the metric's unit, from fresh samples."""

    value: float
    age_seconds: float = 0.0
    """How old the newest sample behind it is."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.value} is not a measurement; say Unknown, and why")


@dataclass(frozen=True, slots=True)
class Idle:
    """Proven quiet: the targets were scraped, and their counters stood still. Rates are 0; a latency does not exist."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody can say; `reason` is a clause for people, such as `prometheus gave no series for it`."""

    reason: str


Measurement = Value | Idle | Unknown


def known(measurement: Measurement, *, idle: float = 0.0) -> float | None:
    """The number; `idle` for Idle; None when unknown."""
    if isinstance(measurement, Value):
        return measurement.value
    return idle if isinstance(measurement, Idle) else None


@dataclass(frozen=True, slots=True)
class Metrics:
    """The traffic of one endpoint at one moment, over all of its pods."""

    arrivals_fast: Measurement
    """Requests per second that came, over the fast window: answered, refused, and what piled up meanwhile."""
    arrivals_slow: Measurement
    """The same over the slow window."""
    in_flight: Measurement
    """Requests accepted and not yet answered."""
    good_share: Measurement
    """Share of the answers within the objective, over the slow window, 0 to 1. Idle when there were none."""
    p95_milliseconds: Measurement
    """Observed p95 over the slow window. Idle when there were no answers."""
    coverage: float = 1.0
    """Share of the ready pods that were scraped lately, 0 to 1. Under 1 the rates above are of these pods only."""
    fast_seconds: float = 30.0
    """Length of the fast window, seconds."""
    slow_seconds: float = 120.0
    """Length of the slow window, seconds."""

    @property
    def scale(self) -> float:
        """What rates are multiplied by for the pods that were not scraped, taken to get as much as the others.

        At most 10: of a tenth of the pods nobody concludes to all.
        """
        return 1 / max(self.coverage, 0.1) if 0 < self.coverage < 1 else 1.0

    @property
    def quiet(self) -> bool:
        """Proven: nothing came within the fast window, and nothing is under way."""
        everything = (self.arrivals_fast, self.in_flight)
        return self.coverage >= 1 and all(known(one) == 0 for one in everything)

    @classmethod
    def unknown(cls, reason: str) -> Metrics:
        """Nothing is known, for one reason."""
        nothing = Unknown(reason)
        return cls(nothing, nothing, nothing, nothing, nothing, coverage=0.0)
