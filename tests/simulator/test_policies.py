"""The rivals, against what their documents and sources say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from penstock_simulator.fleet import MODEL, reference_curve
from penstock_simulator.policies import (
    POLICIES,
    Endpoint,
    HpaOnInFlight,
    HpaOnP95,
    Keda,
    Kpa,
    Limits,
    View,
    by_total,
    make_policy,
)

LIMITS = Limits(1, 50)


@dataclass
class FakeFleet:
    replicas: int
    ready: int


@dataclass
class FakeScraper:
    p95: float | None = None
    rate: float | None = None
    pods: dict[int, int] = field(default_factory=dict)

    def bucket_rates(self, window: float, now: float) -> np.ndarray | None:
        return None if self.p95 is None else np.ones(1)

    def quantile(self, rates: np.ndarray, quantile: float) -> float | None:
        return self.p95

    def answers_per_second(self, window: float, now: float) -> float | None:
        return self.rate

    def refused_per_second(self, window: float, now: float) -> float:
        return 0.0

    def in_flight(self) -> dict[int, int]:
        return self.pods


def view(
    replicas: int,
    scraper: FakeScraper | None = None,
    *,
    ready: int | None = None,
    now: float = 15.0,
    concurrency: tuple[float, ...] = (),
) -> View:
    fleet = FakeFleet(replicas, replicas if ready is None else ready)
    traffic = scraper or FakeScraper()
    return View(now, fleet, traffic, traffic, concurrency)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("p95", "replicas", "ready", "expected"),
    [
        (0.2, 4, 4, 8),  # ceil(4 * 0.2 / 0.1)
        (0.109, 4, 4, 4),  # within the tolerance
        (0.111, 4, 4, 5),
        (0.2, 6, 4, 8),  # ready pods count, as asked for ones do not serve yet
        (1.0, 4, 4, 8),  # at most double in a period, or 4 more
        (1.0, 1, 1, 5),
        (0.05, 4, 4, 2),
        (None, 4, 4, None),  # histogram_quantile is NaN: no metric, no change
    ],
)
def test_hpa_on_a_value(p95: float | None, replicas: int, ready: int, expected: int | None) -> None:
    hpa = HpaOnP95(LIMITS, target_seconds=0.1)

    assert hpa.decide(view(replicas, FakeScraper(p95=p95), ready=ready)) == expected


def test_hpa_shrinks_to_the_highest_recommendation_of_five_minutes() -> None:
    hpa = HpaOnP95(LIMITS, target_seconds=0.1)
    high, low = FakeScraper(p95=0.1), FakeScraper(p95=0.02)

    assert hpa.decide(view(10, high, now=0)) == 10
    assert [hpa.decide(view(10, low, now=now)) for now in (15, 285)] == [10, 10]
    assert hpa.decide(view(10, low, now=301)) == 2


@pytest.mark.parametrize(
    ("pods", "replicas", "expected"),
    [
        ({0: 6, 1: 2}, 2, 4),  # mean 4 over 2, two ready
        ({0: 2, 1: 2}, 2, 2),
        ({0: 6, 1: 6}, 4, 6),  # two without the metric count as idle: mean 3, ratio 1.5 of 4
        ({0: 3, 1: 3}, 4, 4),  # the assumption would turn the direction: stay
        ({0: 0, 1: 1}, 4, 4),  # downwards they count as on target: mean 1.25 of 2 is 3 pods, held by the window below
        ({}, 4, None),
    ],
)
def test_hpa_on_pods(pods: dict[int, int], replicas: int, expected: int | None) -> None:
    hpa = HpaOnInFlight(LIMITS, target=2.0)
    hpa._recommendations.append((14.0, replicas))

    assert hpa.decide(view(replicas, FakeScraper(pods=pods), ready=len(pods))) == expected


@pytest.mark.parametrize(
    ("usage", "current", "expected"), [(20, 1, 4), (20, 4, 4), (21.9, 4, 4), (22.1, 4, 5), (3, 4, 1), (20, 0, 4)]
)
def test_average_value_is_usage_over_target_with_the_tolerance(usage: float, current: int, expected: int) -> None:
    """The example of KEDA's documents: 20 over 5 is 4."""
    assert by_total(usage, 5, current) == expected


def test_keda_takes_an_empty_vector_for_zero() -> None:
    keda = Keda(LIMITS, threshold=10)

    assert keda.decide(view(5, FakeScraper(rate=48), now=15)) == 5
    assert keda.decide(view(5, FakeScraper(rate=None), now=400)) == 1


def test_keda_wakes_at_its_polling_and_ends_after_its_cool_down() -> None:
    keda = Keda(Limits(0, 10), threshold=10)

    assert keda.decide(view(0, FakeScraper(rate=5), now=15)) is None
    assert keda.decide(view(0, FakeScraper(rate=5), now=30)) == 1
    assert keda.decide(view(1, FakeScraper(rate=0), now=300)) == 1
    assert keda.decide(view(1, FakeScraper(rate=0), now=330)) == 0


def test_kpa_follows_the_stable_window_up_and_by_half_down() -> None:
    kpa = Kpa(LIMITS, target=2.0)

    assert kpa.decide(view(3, concurrency=(8.0,) * 60)) == 4
    assert kpa.decide(view(4, concurrency=(0.5,) * 60)) == 2
    assert kpa.decide(view(4)) is None


def test_kpa_panics_at_twice_the_ready_pods_and_then_shrinks_for_a_stable_window_no_more() -> None:
    kpa = Kpa(LIMITS, target=1.0)
    calm, surge = (1.0,) * 60, (1.0,) * 54 + (12.0,) * 6

    assert kpa.decide(view(2, now=100, concurrency=calm)) == 1
    assert kpa.decide(view(2, now=102, concurrency=surge)) == 12
    assert kpa.decide(view(12, now=150, concurrency=calm)) == 12
    assert kpa.decide(view(12, now=163, concurrency=calm)) == 6


@pytest.mark.parametrize("kind", POLICIES)
def test_each_policy_is_made_from_its_knob_alone(kind: str) -> None:
    from penstock_operator.decide import Service

    service = Service.from_curve(reference_curve())
    assert service is not None
    endpoint = Endpoint(service, MODEL, LIMITS)
    facts = next(facts for name, facts in POLICIES.items() if name == kind)

    assert facts.make(endpoint, facts.values[0]).interval in {2, 5, 15}
    with pytest.raises(ValueError, match="the knob must be a positive number"):
        make_policy(next(name for name in POLICIES if name == kind), endpoint, math.nan)
