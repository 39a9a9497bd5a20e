"""A small endpoint for the tests: one replica takes 10 requests/s within 200 ms, and saturates at 14."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock_operator.decide import (
    Decision,
    Idle,
    Metrics,
    Observation,
    ScalingSettings,
    Service,
    Started,
    State,
    Value,
    decide,
)

SETTINGS = ScalingSettings(min_replicas=1, max_replicas=20, start_up_seconds=40)
TICK = 5.0
START = 1_000_000.0


def point(rate: float, p95: float, *, completed: float | None = None) -> CapacityPoint:
    return CapacityPoint(
        arrivals_per_second=rate, completed_per_second=rate if completed is None else completed,
        p50_milliseconds=p95 / 2, p95_milliseconds=p95, p99_milliseconds=p95 * 1.5, samples=500,
    )  # fmt: skip


CURVE = CapacityCurve(
    points=(point(2, 100), point(6, 120), point(10, 200), point(12, 400), point(16, 3000, completed=14)),
    p95_objective_milliseconds=200,
)


def service(*, pooled: bool = False) -> Service:
    found = Service.from_curve(CURVE, pooled=pooled)
    assert found is not None
    return found


def traffic(rate: float, *, in_flight: float | None = None, p95: float = 110.0, good: float = 0.99) -> Metrics:
    """Metrics with every value known; idle at a rate of 0."""
    if rate == 0:
        return Metrics(Idle(), Idle(), Value(in_flight or 0.0), Idle(), Idle())
    standing = rate * 0.08 if in_flight is None else in_flight
    return Metrics(Value(rate), Value(rate), Value(standing), Value(good), Value(p95))


@dataclass
class Replay:
    """Feeds metrics to the autoscaler tick by tick, and applies its decisions."""

    settings: ScalingSettings = SETTINGS
    service: Service | None = field(default_factory=service)
    replicas: int = 1
    now: float = START
    state: State = field(default_factory=State)
    decisions: list[Decision] = field(default_factory=list)
    rolling_out: bool = False
    ready: int | None = None
    """Pods that take traffic; None: all of them."""
    started: tuple[Started, ...] = ()

    def tick(self, metrics: Metrics, *, seconds: float = TICK) -> Decision:
        self.now += seconds
        ready = self.replicas if self.ready is None else self.ready
        seen = Observation(self.replicas, ready, metrics, rolling_out=self.rolling_out, started=self.started)
        decision, state = decide(self.settings, self.service, seen, self.state, self.now)
        # As the endpoint's status keeps it.
        self.state = State.model_validate_json(state.model_dump_json(by_alias=True, exclude_defaults=True))
        self.replicas = decision.replicas
        self.decisions.append(decision)
        return decision

    def play(self, metrics: Metrics | Callable[[float], Metrics], seconds: float) -> list[int]:
        """The numbers over a period; a function of the seconds since its begin makes changing metrics."""
        begin = self.now
        numbers = []
        while self.now < begin + seconds:
            numbers.append(self.tick(metrics(self.now - begin) if callable(metrics) else metrics).replicas)
        return numbers

    def settled(self, rate: float) -> Replay:
        """The state after a constant rate for long enough that earlier load does not matter."""
        self.play(traffic(rate), 8 * self.settings.shrink_window_seconds)
        return self


def flips(numbers: Sequence[int]) -> int:
    """How often a series changed between growing and shrinking."""
    directions = [(b > a) - (b < a) for a, b in pairwise(numbers) if a != b]
    return sum(1 for a, b in pairwise(directions) if a != b)


def without(metrics: Metrics, **changes: object) -> Metrics:
    return replace(metrics, **changes)  # type: ignore[arg-type]  # fields by name
