"""Readings become metrics: values, idle, or unknown."""

from __future__ import annotations

import pytest

from penstock_operator.decide import Idle, Metrics, Unknown, Value
from penstock_operator.decide.measurement import share_within
from penstock_operator.scaling.read.history import History
from penstock_operator.scaling.read.scrape import parse_metrics
from tests.operator.scaling.pods import ServingPod

START = 1_700_000_000.0
TICK = 5.0


class Watch:
    """Pods that are scraped every five seconds."""

    def __init__(self, *names: str) -> None:
        self.pods = {name: ServingPod() for name in names}
        self.history = History()
        self.now = START

    def scrape(self, *names: str) -> None:
        for name in names or self.pods:
            self.history.put(name, self.now, parse_metrics(self.pods[name].text()))

    def metrics(self, **more: str) -> Metrics:
        ready = sorted(self.pods)
        return self.history.metrics(ready, self.now, objective_seconds=0.02, interval_seconds=TICK, **more)

    def watch(self, seconds: float, *, each: int = 0, late: int = 0, without: str = "") -> None:
        """`each` requests for each pod in every five seconds."""
        for _ in range(int(seconds / TICK)):
            self.now += TICK
            for name, pod in self.pods.items():
                pod.answer(each, late=late)
                if name != without:
                    self.scrape(name)


def value(measurement: object) -> float:
    assert isinstance(measurement, Value), measurement
    return measurement.value


def test_rates_are_of_all_pods_together() -> None:
    watch = Watch("a", "b")
    watch.watch(150, each=50, late=1)

    found = watch.metrics()

    assert value(found.arrivals_fast) == pytest.approx(20)
    assert value(found.arrivals_slow) == pytest.approx(20)
    assert value(found.good_share) == pytest.approx(0.98)
    assert 7.5 < value(found.p95_milliseconds) <= 10, "in the bucket of 8 ms"
    assert (value(found.in_flight), found.coverage) == (0, 1)


def test_tokens_of_an_answer_are_a_mean_over_all_pods() -> None:
    watch = Watch("a", "b")
    for _ in range(30):
        watch.pods["a"].generate(30)
        watch.pods["b"].generate(50)
        watch.watch(5)

    assert value(watch.metrics().tokens_per_request) == pytest.approx(40)


def test_tokens_of_a_request_are_those_that_were_computed() -> None:
    watch = Watch("a", "b")
    for _ in range(30):
        watch.pods["a"].answer_texts(3, tokens=10)
        watch.pods["b"].answer_texts(1, tokens=50)
        watch.watch(5)

    assert value(watch.metrics().tokens_per_request) == pytest.approx(20)


def test_without_answers_the_tokens_of_an_answer_are_not_known() -> None:
    watch = Watch("a")
    watch.watch(150, each=5)
    assert watch.metrics().tokens_per_request == Idle()


def test_refused_and_queued_requests_count_as_demand() -> None:
    watch = Watch("a")
    for _ in range(30):
        watch.now += TICK
        watch.pods["a"].answer(20)
        watch.pods["a"].refuse(10)
        watch.pods["a"].metrics.in_flight += 5
        watch.scrape()

    assert value(watch.metrics().arrivals_fast) == pytest.approx(4 + 2 + 1)
    assert value(watch.metrics().in_flight) == 150


def test_one_reading_makes_no_rate() -> None:
    watch = Watch("a")
    watch.scrape()

    assert isinstance(watch.metrics().arrivals_fast, Unknown)
    assert isinstance(watch.metrics().p95_milliseconds, Unknown)


def test_unchanged_counters_are_idle_and_not_unknown() -> None:
    watch = Watch("a")
    watch.watch(150)

    found = watch.metrics()
    assert isinstance(found.arrivals_fast, Idle)
    assert isinstance(found.good_share, Idle)
    assert isinstance(found.p95_milliseconds, Idle)


def test_requests_in_flight_are_not_idle() -> None:
    watch = Watch("a")
    watch.pods["a"].metrics.in_flight = 3
    watch.watch(150)

    found = watch.metrics()
    assert value(found.in_flight) == 3
    assert isinstance(found.p95_milliseconds, Idle | Unknown)
    assert not isinstance(found.arrivals_fast, Idle)


def test_a_restarted_pod_counts_from_zero() -> None:
    watch = Watch("a")
    watch.watch(120, each=50)
    watch.pods["a"] = ServingPod()
    watch.watch(30, each=50)

    found = watch.metrics()
    assert value(found.arrivals_fast) == pytest.approx(10)
    assert 0.99 <= value(found.good_share) <= 1


def test_one_of_two_pods_that_cannot_be_read_is_a_coverage_of_a_half() -> None:
    watch = Watch("a", "b")
    watch.watch(60, each=50)
    watch.watch(60, each=50, without="b")

    found = watch.metrics()
    assert found.coverage == 0.5
    assert found.scale == 2
    assert value(found.arrivals_fast) == pytest.approx(10)


def test_when_no_pod_can_be_read_nothing_is_known_and_the_reason_is_kept() -> None:
    watch = Watch("a")
    watch.watch(150, each=50)
    watch.now += 60

    assert watch.metrics(problem="a answers 503") == Metrics.unknown("a answers 503")
    assert "no replica was scraped" in str(watch.metrics().arrivals_fast)


def test_a_clock_that_goes_back_makes_no_wrong_rates() -> None:
    watch = Watch("a")
    watch.watch(60, each=50)
    watch.now -= 3600

    assert isinstance(watch.metrics().arrivals_fast, Unknown)
    watch.watch(60, each=50)
    assert value(watch.metrics().arrivals_fast) == pytest.approx(10)


def test_pods_of_an_older_template_have_no_bound_on_the_objective_and_it_is_guessed() -> None:
    buckets = ((0.01, 50.0), (0.03, 90.0), (float("inf"), 100.0))

    assert share_within(buckets, 0.02) == pytest.approx(0.7)
    assert share_within(buckets, 0.03) == 0.9
    assert share_within(buckets, 5.0) == pytest.approx(0.9)
    assert share_within("nothing", 0.02) == "nothing"


def test_an_endpoint_without_ready_pods_is_unknown() -> None:
    found = History().metrics([], START, objective_seconds=0.02, interval_seconds=TICK)
    assert found == Metrics.unknown("no replica is ready")
