"""What Prometheus would answer, against figures worked out by hand from its own rule."""

from __future__ import annotations

import numpy as np
import pytest

from penstock_simulator.fleet import Fleet, FleetSettings, ReplicaModel
from penstock_simulator.scraper import Scraper


def play(rates: list[int], *, interval: int = 10, latency: float = 0.05, born: float = 0.0) -> Scraper:
    """Scrapes of one pod that answers a given number of requests between each two."""
    fleet = Fleet(ReplicaModel(1, 0.01, 0.1), FleetSettings(start_up_seconds=born))
    fleet.resize(1, 0.0)
    scraper = Scraper(objective_seconds=0.08)
    for index, count in enumerate(rates):
        now = float((index + 1) * interval)
        fleet.activate(now)
        scraper.scrape(fleet, [(now, 0, latency)] * count, now)
    return scraper


def test_one_sample_makes_no_rate() -> None:
    assert play([50]).answers_per_second(60, 10.0) is None


def test_a_steady_counter_has_its_rate_whatever_the_window() -> None:
    scraper = play([100] * 20)

    assert [scraper.answers_per_second(window, 200.0) for window in (30, 60, 120)] == pytest.approx([10, 10, 10])


def test_the_rate_of_a_new_counter_is_too_low_until_it_fills_the_window() -> None:
    """Samples at 10, 20, 30 with 100, 200, 300; 200 in 20 s, extrapolated by half an interval: 250 in 60 s."""
    assert play([100, 100, 100]).answers_per_second(60, 30.0) == pytest.approx(250 / 60)


def test_extrapolation_stops_where_the_counter_would_be_negative() -> None:
    """Samples 2 and 202: the zero was a tenth of a second before the first one."""
    assert play([2, 200]).answers_per_second(60, 20.0) == pytest.approx(200 * (10 + 0.1) / 10 / 60)


def test_a_step_shows_over_the_window() -> None:
    scraper = play([100] * 12 + [500] * 3)

    assert scraper.answers_per_second(60, 150.0) == pytest.approx((2 * 100 + 3 * 500) / 50)


def test_the_counts_of_a_removed_replica_are_removed() -> None:
    fleet = Fleet(ReplicaModel(1, 0.01, 0.1), FleetSettings(start_up_seconds=0, drain_seconds=5))
    fleet.resize(2, 0.0)
    fleet.activate(0.0)
    scraper = Scraper(0.08)
    for now in range(10, 70, 10):
        scraper.scrape(fleet, [(now, 0, 0.05)] * 100 + [(now, 1, 0.05)] * 300, float(now))
    assert scraper.answers_per_second(60, 60.0) == pytest.approx(40)

    fleet.resize(1, 61.0)
    scraper.scrape(fleet, [(70.0, 0, 0.05)] * 100, 70.0)

    assert scraper.answers_per_second(60, 70.0) == pytest.approx(10)


def test_a_quantile_is_linear_within_its_bucket_and_saturates_at_the_last_bound() -> None:
    scraper = Scraper(0.08)
    rates = np.zeros(len(scraper.bounds) + 1)
    rates[scraper.bounds.tolist().index(0.1)] = 1.0  # all between 0.08 and 0.1

    assert scraper.quantile(rates, 0.5) == pytest.approx(0.09)
    rates[-1] = 99.0
    assert scraper.quantile(rates, 0.95) == 30.0
    assert scraper.quantile(np.zeros(len(rates)), 0.95) is None


def test_the_good_share_is_exact_at_the_objective() -> None:
    scraper = play([100] * 5, latency=0.08)
    late = play([100] * 5, latency=0.0801)

    found, other = scraper.bucket_rates(40, 50.0), late.bucket_rates(40, 50.0)
    assert found is not None
    assert other is not None
    assert scraper.good_share(found) == 1.0
    assert late.good_share(other) == 0.0
    assert scraper.good_share(np.zeros(len(found))) is None


def test_a_starting_pod_is_not_a_target() -> None:
    scraper = play([0, 0], born=100.0)

    assert scraper.in_flight() == {}
    assert scraper.bucket_rates(60, 20.0) is None
