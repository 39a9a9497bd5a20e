"""Metric values with three states: a value, proven idle, or unknown. Separate types, so that none passes for another.

Zero means that no requests came, and has to be proven. An outage, an empty vector, a NaN or a stale series becomes a
zero as soon as code maps it to a number, and has scaled services to nothing at their peak
(docs/explanation/autoscaling.md).
"""

from __future__ import annotations

import math
from array import array
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
    """Arrivals over the fast window, requests/s: answered, refused, and the growth of requests in flight."""
    arrivals_slow: Measurement
    """The same over the slow window."""
    in_flight: Measurement
    """Requests accepted and not yet answered."""
    good_share: Measurement
    """Share of the answers within the objective, over the slow window, 0 to 1. Idle when there were none."""
    p95_milliseconds: Measurement
    """Observed p95 over the slow window, of text generation of the time to the first token, as the share above.
    Idle when there were no answers."""
    coverage: float = 1.0
    """Share of the ready pods that were scraped lately, 0 to 1. Under 1 the rates above are of these pods only."""
    fast_seconds: float = 30.0
    """Length of the fast window, seconds."""
    slow_seconds: float = 120.0
    """Length of the slow window, seconds."""
    tokens_per_request: Measurement = Idle()
    """Tokens of an answered request, mean of the slow window: of text generation the output tokens, else all that
    were computed. Idle without answers, and where it is not known."""

    @property
    def scale(self) -> float:
        """Factor that extrapolates rates to the pods that were not scraped, as if they got as much as the scraped ones.

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


Buckets = tuple[tuple[float, float], ...]
"""(upper bound in seconds, answers per second up to it), sorted by bound, the last bound infinite."""


def quantile(buckets: Buckets | str, share: float) -> float | str:
    """A quantile in seconds, linear within its bucket; in the last bucket the highest finite bound, a lower limit.

    A reason instead if there were no answers (Prometheus' NaN).
    """
    if isinstance(buckets, str):
        return buckets
    total = buckets[-1][1]
    if total <= 0 or len(buckets) < 2:
        return "no request was answered in the window"
    rank, low, before = share * total, 0.0, 0.0
    for bound, value in buckets:
        if value >= rank:
            if bound == math.inf:
                return low
            return low + (bound - low) * (rank - before) / (value - before) if value > before else bound
        low, before = bound, value
    return low


def good_share(buckets: Buckets | str, objective_seconds: float) -> float | str:
    """The share of answers within the objective, which must be a bound; or the reason why there is none."""
    if isinstance(buckets, str):
        return buckets
    total = buckets[-1][1]
    if total <= 0:
        return "no request was answered in the window"
    for bound, value in buckets:
        if math.isclose(bound, objective_seconds, rel_tol=1e-9):
            return value / total
    return "the latency histogram has no bound on the objective"


def share_within(buckets: Buckets | str, seconds: float) -> float | str:
    """The share of answers within a time: exact at a bound, else interpolated within its bucket; or why there is
    none. Pods of an older template may lack the bound."""
    exact = good_share(buckets, seconds)
    if not isinstance(exact, str) or isinstance(buckets, str) or buckets[-1][1] <= 0:
        return exact
    low, before = 0.0, 0.0
    for bound, value in buckets:
        if bound >= seconds:
            part = (seconds - low) / (bound - low) if math.isfinite(bound) else 0.0
            return (before + part * (value - before)) / buckets[-1][1]
        low, before = bound, value
    return before / buckets[-1][1]


@dataclass(frozen=True, slots=True)
class PodReading:
    """The metrics of one pod at one moment. Counters count from the start of its process."""

    arrivals: float
    """Requests to the model that were answered, refused or aborted."""
    in_flight: float
    """Requests in progress, without the scrape itself."""
    bounds: tuple[float, ...]
    """Upper bounds of the latency histogram in seconds, ascending, the last one infinite. Of text generation: of the
    time to the first token."""
    counts: array[float]
    """Answers up to each bound."""
    errors: float = 0.0
    """Answers with a status of 500 or more, which are also in the histogram."""
    answered: float = 0.0
    """Requests to the model that were answered."""
    tokens: float | None = None
    """Of text generation output tokens, else those computed for answered requests; None: they are not counted."""

    @property
    def requests(self) -> float:
        """Requests that were answered. Of text generation also those whose first token has come; a request that failed
        before it is only among the answered ones."""
        return max(self.answered, self.counts[-1])
