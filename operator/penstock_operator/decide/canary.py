"""Judges a canary: whether the new pods have more errors, or are slower, than the present ones. Pure.

Both are one-sided comparisons of two shares by Fisher's exact test (R. A. Fisher, The Design of Experiments, 1935; the
tail of the hypergeometric distribution): of requests with an error, and of requests slower than a bound. The bound is
one of the histogram's, and is chosen from the requests of both plans together, next to their p95: then the test is
exact although the data chose it.

There are `LOOKS` looks, at equal times. A look rejects if one of the tests has a p-value of at most `LEVEL / LOOKS`. So
new pods that are equal are rejected with a probability of at most 2 * LEVEL, by the union bound
(docs/explanation/canary.md, which also has the probability to detect worse ones).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from penstock_operator.decide.measurement import PodReading

LEVEL = 0.01
"""Largest probability that a test rejects equal pods, over all looks."""
LOOKS = 10
SLOW_SHARE = 0.05
"""Share of the requests that are slower than the p95."""
SLOWER_BY = 1.5
"""New pods are slower only if their share of slow requests is this many times the share of the present ones: with many
requests, differences are significant that do not matter."""
EXACT_DEVIATION = 500.0
"""Standard deviation of a count up to which its tail is summed."""
MOST_TERMS = 10_000
"""Terms of such a sum: 20 standard deviations."""
MOST_REQUESTS = 1_000_000_000
"""Requests of both plans that are compared. The logarithms of the factorials of more are not exact enough."""
LEAST_REQUESTS = 200
"""Requests that new pods must have answered."""
LONGEST = 10
"""Times the length of a canary that it may take until they have."""


@dataclass(frozen=True)
class PlanCounts:
    """Counts of the answers of one plan's pods since the canary began."""

    requests: int = 0
    errors: int = 0
    """Answers with a status of 500 or more; they are among the requests."""
    buckets: dict[float, float] = field(default_factory=dict)
    """Answers up to each bound in seconds."""

    @property
    def error_share(self) -> float:
        """Share of the requests with an error, 0 to 1."""
        return self.errors / self.requests if self.requests else 0.0


class PlanCounter:
    """Adds up the answers of the pods of one plan."""

    def __init__(self) -> None:
        self._last: dict[str, PodReading] = {}
        self._requests = self._errors = 0.0
        self._buckets: dict[float, float] = {}

    def put(self, pod: str, reading: PodReading, *, new: bool) -> None:
        """Add a reading of a pod, by its uid. `new`: all that the pod has answered counts, also before this reading."""
        before = self._last.get(pod)
        self._last[pod] = reading
        if before is None and not new:
            self._keep(reading.bounds)
            return
        if before is None or before.bounds != reading.bounds or before.requests > reading.requests:
            # Another process, which counts from zero.
            before = PodReading(0.0, 0.0, reading.bounds, type(reading.counts)("d", [0.0] * len(reading.counts)))
        self._requests += reading.requests - before.requests
        self._errors += max(0.0, reading.errors - before.errors)
        self._keep(reading.bounds)
        for bound, now, then in zip(reading.bounds, reading.counts, before.counts, strict=True):
            if bound in self._buckets:
                self._buckets[bound] += max(0.0, now - then)

    def _keep(self, bounds: tuple[float, ...]) -> None:
        """Only bounds that all pods have."""
        if len(self._last) == 1 and not self._buckets:
            self._buckets = dict.fromkeys(bounds, 0.0)
        self._buckets = {bound: count for bound, count in self._buckets.items() if bound in bounds}

    @property
    def counts(self) -> PlanCounts | None:
        """The counts so far; None before the first reading."""
        if not self._last:
            return None
        return PlanCounts(round(self._requests), min(round(self._errors), round(self._requests)), dict(self._buckets))


class CanaryOutcome(StrEnum):
    """The next step of a rollout with a canary."""

    CONTINUE = "Continue"
    PASS = "Pass"  # noqa: S105 - no password
    REJECT = "Reject"


class CanaryReason(StrEnum):
    """Why a canary passed or was rejected."""

    NOT_WORSE = "NotWorse"
    FEW_REQUESTS = "FewRequests"
    """It passed: few requests came, and they show nothing worse."""
    MORE_ERRORS = "MoreErrors"
    SLOWER = "Slower"
    NO_METRICS = "NoMetrics"
    """The pods of one of the plans could not be read."""
    POD_FAILS = "PodFails"
    """A new pod crashed, or none became ready."""


@dataclass(frozen=True)
class Judgement:
    """The outcome of a look."""

    outcome: CanaryOutcome
    reason: CanaryReason | None = None
    """None while it continues."""
    message: str = ""
    """The figures of both plans, as a clause."""


def tail(hits: int, draws: int, all_hits: int, everything: int) -> float:
    """Probability of at least `hits` among `draws` items, drawn at random from `everything` items of which `all_hits`
    are hits. 1 if `hits` is not above the mean.

    The sum over the distribution up to a standard deviation of `EXACT_DEVIATION`, and the normal distribution with
    continuity correction beyond it, which differs by less than 1 % at the level of a look.
    """
    if draws <= 0 or everything <= 1 or hits * everything <= draws * all_hits:
        return 1.0
    others, mean = everything - all_hits, draws * all_hits / everything
    deviation = math.sqrt(mean * (others / everything) * ((everything - draws) / (everything - 1)))
    if deviation > EXACT_DEVIATION:
        return math.erfc((hits - 0.5 - mean) / (deviation * math.sqrt(2))) / 2

    def log_choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    term = math.exp(log_choose(all_hits, hits) + log_choose(others, draws - hits) - log_choose(everything, draws))
    total = term
    for at in range(hits, min(draws, all_hits, hits + MOST_TERMS)):
        if term <= total * 1e-12:
            break
        term *= (all_hits - at) * (draws - at) / ((at + 1) * (others - draws + at + 1))
        total += term
    return min(1.0, total)


def share_of_counts(old: PlanCounts, new: PlanCounts) -> tuple[PlanCounts, PlanCounts]:
    """Both with all counts reduced by one factor, to at most `MOST_REQUESTS` requests together: the shares stay, and
    their difference gets less significant. Unchanged for fewer requests."""
    everything = old.requests + new.requests
    if everything <= MOST_REQUESTS:
        return old, new
    factor = MOST_REQUESTS / everything
    reduced = (
        PlanCounts(
            int(one.requests * factor),
            int(one.errors * factor),
            {bound: count * factor for bound, count in one.buckets.items()},
        )
        for one in (old, new)
    )
    return next(reduced), next(reduced)


def slow_bound(old: PlanCounts, new: PlanCounts) -> float | None:
    """The bound in seconds that the share of slower requests of both plans together is nearest to `SLOW_SHARE` at; None
    if there is none with slower requests."""
    everything = old.requests + new.requests
    found: dict[float, float] = {}
    for bound in sorted(old.buckets.keys() & new.buckets.keys()):
        share = 1 - (old.buckets[bound] + new.buckets[bound]) / everything if everything else 0.0
        if math.isfinite(bound) and 0 < share < 0.5:
            found[bound] = abs(share - SLOW_SHARE)
    return min(found, key=lambda bound: (found[bound], bound), default=None)


def compare(old: PlanCounts, new: PlanCounts, level: float) -> Judgement:
    """One look: reject, or continue. `level`: of each of the two tests."""
    old, new = share_of_counts(old, new)
    everything = old.requests + new.requests
    figures = (
        f"{new.errors} of {new.requests} requests to new pods had an error, and {old.errors} of {old.requests} to the "
        "others"
    )
    if tail(new.errors, new.requests, old.errors + new.errors, everything) <= level:
        return Judgement(CanaryOutcome.REJECT, CanaryReason.MORE_ERRORS, figures)
    bound = slow_bound(old, new)
    if bound is None or not old.requests or not new.requests:
        return Judgement(CanaryOutcome.CONTINUE, message=figures)
    slow_new, slow_old = (max(0, round(one.requests - one.buckets[bound])) for one in (new, old))
    figures = (
        f"{slow_new / new.requests:.1%} of {new.requests} requests to new pods took longer than {bound * 1000:g} ms, "
        f"and {slow_old / old.requests:.1%} of {old.requests} to the others"
    )
    more = slow_new * old.requests > SLOWER_BY * slow_old * new.requests
    if more and tail(slow_new, new.requests, slow_new + slow_old, everything) <= level:
        return Judgement(CanaryOutcome.REJECT, CanaryReason.SLOWER, figures)
    return Judgement(CanaryOutcome.CONTINUE, message=figures)


@dataclass(frozen=True)
class CanaryTrial:
    """A canary between two looks."""

    seconds: float
    """How long it is to take."""
    looks: int = 0
    """Looks that were taken."""

    def look(self, old: PlanCounts | None, new: PlanCounts | None, elapsed: float) -> tuple[Judgement, CanaryTrial]:
        """Judge after `elapsed` seconds. None: the pods of a plan could not be read, now or before.

        Between looks nothing is judged: looks that are not counted would raise the probability of a wrong rejection.
        """
        waiting = Judgement(CanaryOutcome.CONTINUE)
        if old is None or new is None:
            if elapsed < LONGEST * self.seconds:
                return waiting, self
            message = f"the metrics of {'new pods' if new is None else 'the present pods'} could not be read"
            return Judgement(CanaryOutcome.REJECT, CanaryReason.NO_METRICS, message), self
        enough = new.requests >= LEAST_REQUESTS
        last = (elapsed >= self.seconds and enough) or elapsed >= LONGEST * self.seconds
        due = LOOKS if last else min(LOOKS - 1, int(elapsed / self.seconds * LOOKS))
        if due <= self.looks:
            return waiting, self
        found, after = compare(old, new, LEVEL / LOOKS), CanaryTrial(self.seconds, due)
        if found.outcome is CanaryOutcome.REJECT or not last:
            return found, after
        reason = CanaryReason.NOT_WORSE if enough else CanaryReason.FEW_REQUESTS
        return Judgement(CanaryOutcome.PASS, reason, found.message), after
