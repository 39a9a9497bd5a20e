"""Compares plans: criteria in order of weight, each with a tolerance, decided on paired measurements.

    objective         first                                            then
    latency, or none  single-request latency                           requests/s
    throughput        requests/s                                       single-request latency
    both              p95 at the wanted rate within the latency limit  requests/s, single-request latency

Single-request latency is the geometric mean of p50 and p95 of requests that find the engine idle, over the workload's
length mix: p50 alone would ignore the long requests, p95 alone the many short ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from pydantic import Field

from penstock.manifest import Frozen
from penstock.resources.endpoint import Objective
from penstock_optimizer.load.generator import relative_spread

NEAR_LATENCY = 0.05
"""Latencies this close count as equal, so that throughput decides: 5 % of a few milliseconds matters to no client."""
NOISE_FLOOR = 0.02
"""Smaller differences are ignored, even where repeats scatter less."""


class PlanSample(Frozen):
    """One measurement of a plan over the workload's length mix, in process."""

    p50_milliseconds: float = Field(gt=0)
    """Of requests sent one at a time."""
    p95_milliseconds: float = Field(gt=0)
    requests_per_second: float = Field(gt=0)
    """With more requests waiting than can run."""
    loaded_p95_milliseconds: float | None = Field(default=None, gt=0)
    """With requests arriving at random at the wanted rate; only where the objective has latency and throughput."""
    short_milliseconds: dict[int, float] = Field(default_factory=dict)
    """Of lone requests of one of the shortest lengths, by tokens; only where the workload has rows this short."""
    second_graph_bytes: int | None = None
    """The memory that the graph of the short rows added to the process, where the plan has one."""

    @property
    def lone_milliseconds(self) -> float:
        """Geometric mean of p50 and p95."""
        return math.sqrt(self.p50_milliseconds * self.p95_milliseconds)


@dataclass(frozen=True)
class Pair:
    """A challenger and the incumbent, measured one right after the other: slow drifts of the machine cancel out."""

    challenger: PlanSample
    incumbent: PlanSample


class Ranking(StrEnum):
    """How a challenger compares with the incumbent."""

    BETTER = "better"
    SAME = "same"
    """Within the noise, or the tolerance, on every criterion."""
    WORSE = "worse"


@dataclass(frozen=True)
class Comparison:
    """The outcome over some pairs."""

    ranking: Ranking
    criterion: str
    """The criterion that decided; the first one for SAME."""
    gain: float
    """Relative improvement of that criterion (negative: loss), median over the pairs."""
    noise: float
    """Interquartile range of the pairwise ratios of that criterion, at least the floor."""
    by_first: bool
    """True when the first criterion decided."""
    pairs: int = 1
    """Number of pairs: a single one has no scatter, so it does not show the noise."""


class Quantity(StrEnum):
    """The quantity that a criterion compares; the value is its name in reports."""

    SINGLE_LATENCY = "single-request latency"
    REQUEST_RATE = "requests/s"
    P95_OVER_LIMIT = "p95 over the limit"


@dataclass(frozen=True)
class Criterion:
    """A number to lower (rates are inverted)."""

    quantity: Quantity
    tolerance: float

    def cost(self, sample: PlanSample, goal: Goal) -> float:
        """The number: positive, lower is better."""
        match self.quantity:
            case Quantity.SINGLE_LATENCY:
                return sample.lone_milliseconds
            case Quantity.REQUEST_RATE:
                return 1.0 / sample.requests_per_second
            case Quantity.P95_OVER_LIMIT:
                loaded = sample.loaded_p95_milliseconds or sample.p95_milliseconds
                return max(1.0, loaded / goal.p95_milliseconds) if goal.p95_milliseconds else 1.0

    def ratios(self, pairs: Sequence[Pair], goal: Goal) -> list[float]:
        """The challenger's cost over the incumbent's, one for each pair."""
        return [self.cost(pair.challenger, goal) / self.cost(pair.incumbent, goal) for pair in pairs]


@dataclass(frozen=True)
class Goal:
    """An objective as criteria, in order."""

    criteria: tuple[Criterion, ...]
    p95_milliseconds: float | None = None
    requests_per_second: float | None = None

    @classmethod
    def of(cls, objective: Objective) -> Goal:
        """The criteria of an endpoint's objective."""
        latency = Criterion(Quantity.SINGLE_LATENCY, NEAR_LATENCY)
        rate = Criterion(Quantity.REQUEST_RATE, NOISE_FLOOR)
        p95 = objective.latency.p95_milliseconds if objective.latency else None
        asked = objective.throughput.requests_per_second if objective.throughput else None
        if p95 is not None and asked is not None:
            return cls((Criterion(Quantity.P95_OVER_LIMIT, NOISE_FLOOR), rate, latency), p95, asked)
        if asked is not None:
            return cls((rate, latency), None, asked)
        return cls((latency, rate), p95, None)

    def compare(self, pairs: Sequence[Pair]) -> Comparison:
        """Compare challenger with incumbent over at least one pair, criterion by criterion."""
        first: Comparison | None = None
        for position, criterion in enumerate(self.criteria):
            found = _compared(
                criterion.quantity.value, criterion.ratios(pairs, self), criterion.tolerance, by_first=position == 0
            )
            if found.ranking is not Ranking.SAME:
                return found
            first = first or found
        assert first is not None  # noqa: S101 - a goal has criteria
        return first


@dataclass(frozen=True)
class RouteGoal:
    """Compares a plan with a route with the same plan without it.

    For pure throughput more requests/s decide. Otherwise the single-request latency at the shortest lengths does, and
    nothing that the objective is about may get worse beyond the noise.
    """

    goal: Goal
    longest_tokens: int
    """The route's longest row: longer ones are not affected by it."""

    def compare(self, pairs: Sequence[Pair]) -> Comparison:
        """Like `Goal.compare`."""
        short = self._of_short_rows(pairs)
        first = self.goal.criteria[0]
        if first.quantity is Quantity.REQUEST_RATE:
            rate = self._by(first, pairs, NOISE_FLOOR)
            worse = next((one for one in self._others(pairs) if one.ranking is Ranking.WORSE), None)
            return worse if rate.ranking is Ranking.BETTER and worse is not None else rate
        if short.ranking is not Ranking.BETTER:
            return short
        return next((one for one in self._others(pairs) if one.ranking is Ranking.WORSE), short)

    def _others(self, pairs: Sequence[Pair]) -> list[Comparison]:
        return [self._by(criterion, pairs, NEAR_LATENCY) for criterion in self.goal.criteria]

    def _by(self, criterion: Criterion, pairs: Sequence[Pair], tolerance: float) -> Comparison:
        return _compared(
            criterion.quantity.value, criterion.ratios(pairs, self.goal), max(tolerance, criterion.tolerance)
        )

    def _of_short_rows(self, pairs: Sequence[Pair]) -> Comparison:
        name = f"single-request latency up to {self.longest_tokens} tokens"
        return _compared(name, [self._short_ratio(pair.challenger, pair.incumbent) for pair in pairs], NEAR_LATENCY)

    def _short_ratio(self, challenger: PlanSample, incumbent: PlanSample) -> float:
        """Median over the short lengths; 1 where none was measured."""
        ours, theirs = challenger.short_milliseconds, incumbent.short_milliseconds
        ratios = [
            ours[tokens] / theirs[tokens] for tokens in ours.keys() & theirs.keys() if tokens <= self.longest_tokens
        ]
        return median(ratios) if ratios else 1.0


def _compared(name: str, ratios: Sequence[float], tolerance: float, *, by_first: bool = True) -> Comparison:
    """Compare by the ratios of one criterion's cost, challenger over incumbent, one for each pair."""
    gain, noise = 1 - median(ratios), max(NOISE_FLOOR, relative_spread(ratios))
    bar = max(noise, tolerance)
    ranking = Ranking.BETTER if gain > bar else Ranking.WORSE if gain < -bar else Ranking.SAME
    return Comparison(ranking, name, gain, noise, by_first=by_first, pairs=len(ratios))
