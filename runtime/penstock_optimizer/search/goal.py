"""What better means: criteria in order of weight, each with a tolerance, decided on paired measurements.

| objective | first | then |
|---|---|---|
| latency, or none | lone latency | requests/s |
| throughput | requests/s | lone latency |
| both | p95 at the asked rate within the asked latency | requests/s, lone latency |

Lone latency is the geometric mean of p50 and p95 of requests that find the engine idle, over the workload's length mix:
p50 alone would ignore the long requests, p95 alone the many short ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from penstock.resources.endpoint import Objective
from penstock_optimizer.load.summary import median, relative_spread

NEAR_LATENCY = 0.05
"""Latencies this close are equal, so that throughput decides: 5 % of a few milliseconds is nobody's reason."""
NOISE_FLOOR = 0.02
"""No difference below this is believed, however quiet the repeats were."""


class Sample(BaseModel):
    """One measurement of a plan over the workload's length mix, in process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    p50_milliseconds: float = Field(gt=0)
    """Of requests that come one at a time."""
    p95_milliseconds: float = Field(gt=0)
    requests_per_second: float = Field(gt=0)
    """With more requests waiting than can run."""
    loaded_p95_milliseconds: float | None = Field(default=None, gt=0)
    """With requests arriving at random at the asked rate; only where the objective asks for latency and throughput."""
    short_milliseconds: dict[int, float] = Field(default_factory=dict)
    """Of lone requests of one of the shortest lengths, by tokens; only where the workload has rows so short."""
    second_graph_bytes: int | None = None
    """What the graph of the short rows added to the memory of the process, where the plan has one."""

    @property
    def lone_milliseconds(self) -> float:
        """Geometric mean of p50 and p95."""
        return math.sqrt(self.p50_milliseconds * self.p95_milliseconds)


@dataclass(frozen=True)
class Pair:
    """A challenger and the incumbent, measured one right after the other: slow drifts of the machine cancel."""

    challenger: Sample
    incumbent: Sample


class Ranking(StrEnum):
    """How a challenger compares."""

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
    """How many it rests on: one alone has no scatter, and so nothing to say about noise."""


@dataclass(frozen=True)
class Criterion:
    """One number to lower (rates are inverted)."""

    name: str
    tolerance: float

    def cost(self, sample: Sample, goal: Goal) -> float:
        """The number: positive, lower is better."""
        match self.name:
            case "lone latency":
                return sample.lone_milliseconds
            case "requests/s":
                return 1.0 / sample.requests_per_second
            case "p95 over the limit":
                loaded = sample.loaded_p95_milliseconds or sample.p95_milliseconds
                return max(1.0, loaded / goal.p95_milliseconds) if goal.p95_milliseconds else 1.0
            case _:
                raise ValueError(f"no criterion {self.name!r}")


@dataclass(frozen=True)
class Goal:
    """An objective, as criteria in order."""

    criteria: tuple[Criterion, ...]
    p95_milliseconds: float | None = None
    requests_per_second: float | None = None

    @classmethod
    def of(cls, objective: Objective) -> Goal:
        """The criteria of an endpoint's objective."""
        latency = Criterion("lone latency", NEAR_LATENCY)
        rate = Criterion("requests/s", NOISE_FLOOR)
        p95 = objective.latency.p95_milliseconds if objective.latency else None
        asked = objective.throughput.requests_per_second if objective.throughput else None
        if p95 is not None and asked is not None:
            return cls((Criterion("p95 over the limit", NOISE_FLOOR), rate, latency), p95, asked)
        if asked is not None:
            return cls((rate, latency), None, asked)
        return cls((latency, rate), p95, None)

    @property
    def needs_loaded_p95(self) -> bool:
        """Samples must carry p95 at the asked rate."""
        return self.p95_milliseconds is not None and self.requests_per_second is not None

    def compare(self, pairs: Sequence[Pair]) -> Comparison:
        """Compare challenger with incumbent over at least one pair, criterion by criterion."""
        first: Comparison | None = None
        for position, criterion in enumerate(self.criteria):
            ratios = [criterion.cost(pair.challenger, self) / criterion.cost(pair.incumbent, self) for pair in pairs]
            gain = 1.0 - median(ratios)
            noise = max(NOISE_FLOOR, relative_spread(ratios))
            bar = max(noise, criterion.tolerance)
            ranking = Ranking.BETTER if gain > bar else Ranking.WORSE if gain < -bar else Ranking.SAME
            found = Comparison(ranking, criterion.name, gain, noise, by_first=position == 0, pairs=len(pairs))
            if ranking is not Ranking.SAME:
                return found
            first = first or found
        assert first is not None  # noqa: S101 - a goal has criteria
        return first
