"""Metric values with three states: a value, proven idle, or unknown. Separate types, so that none passes for another.

Zero means that no requests came, and has to be proven. An outage, an empty vector, a NaN or a stale series turns into a
zero as soon as code maps it to a number, and has scaled services to nothing at their peak
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
    """Age of the newest sample that it was made from."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.value} is not a measurement; use Unknown with a reason")


@dataclass(frozen=True, slots=True)
class Idle:
    """Proven idle: the targets were scraped, and their counters did not change. Rates are 0, there is no latency."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The value is unknown; `reason` is a clause for users, such as `prometheus gave no series for it`."""

    reason: str


Measurement = Value | Idle | Unknown


def known(measurement: Measurement) -> float | None:
    """The value; 0 for Idle; None for Unknown."""
    if isinstance(measurement, Value):
        return measurement.value
    return 0.0 if isinstance(measurement, Idle) else None


def of_answers(value: float | str, *, quiet: bool, scale: float = 1.0) -> Measurement:
    """A figure about answers times `scale`; or, where there is only a reason why it is missing, Idle if `quiet`."""
    if isinstance(value, str):
        return Idle() if quiet else Unknown(value)
    return Value(value * scale)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The traffic of one endpoint at one moment, over all of its pods."""

    arrivals_fast: Measurement
    """Arrivals over the fast window, requests/s: answered, refused, and the growth of what is in flight."""
    arrivals_slow: Measurement
    """The same over the slow window."""
    in_flight: Measurement
    """Requests accepted and not yet answered."""
    good_share: Measurement
    """Share of the answers within the objective, over the slow window, 0 to 1. Idle when there were none."""
    p95_milliseconds: Measurement
    """Observed p95 over the slow window, of text generation that of the time to the first token, as the share above.
    Idle when there were no answers."""
    coverage: float = 1.0
    """Share of the ready pods that were scraped lately, 0 to 1. Under 1 the rates above are of these pods only."""
    fast_seconds: float = 30.0
    """Length of the fast window, seconds."""
    slow_seconds: float = 120.0
    """Length of the slow window, seconds."""
    tokens_per_request: Measurement = Idle()
    """Tokens of an answered request, mean of the slow window: of text generation those of its output, else all that
    were computed. Idle without answers, and where it is not known."""

    @property
    def scale(self) -> float:
        """Factor that extrapolates rates to the pods that were not scraped, as if they got as much as the others.

        At most 10: less than a tenth of the pods is too few to extrapolate from.
        """
        return 1 / max(self.coverage, 0.1) if 0 < self.coverage < 1 else 1.0

    @property
    def quiet(self) -> bool:
        """Whether it is proven that nothing came within the fast window and nothing is in flight."""
        return self.coverage >= 1 and known(self.arrivals_fast) == 0 and known(self.in_flight) == 0

    @classmethod
    def unknown(cls, reason: str) -> Metrics:
        """All metrics unknown, for one reason."""
        nothing = Unknown(reason)
        return cls(nothing, nothing, nothing, nothing, nothing, coverage=0.0)
