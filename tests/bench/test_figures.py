"""Figures over several rounds."""

from __future__ import annotations

import pytest

from penstock_bench.cell import CellResult
from penstock_bench.results import Figures, paired_ratio


def cell(rate: float, *milliseconds: float, **values: object) -> CellResult:
    return CellResult.model_validate(
        {
            "seconds": 1.0,
            "completed_per_second": rate,
            "latencies_milliseconds": milliseconds,
            "groups": (8,) * len(milliseconds),
            **values,
        }
    )


def test_rate_is_the_median_and_latencies_are_pooled() -> None:
    figures = Figures.of([cell(100, 1, 2), cell(10, 30), cell(90, 3)])

    assert figures.per_second == 90
    assert list(figures.rates) == [100, 10, 90]
    latency = figures.latency
    assert latency is not None
    assert (latency.count, latency.minimum, latency.maximum, latency.p50) == pytest.approx((4, 1, 30, 2.5))


def test_failures_add_up_and_the_first_is_kept() -> None:
    figures = Figures.of(
        [
            cell(1, 1, failures={"429": 2}, first_failure="429 too many"),
            cell(1, 1, failures={"429": 1, "timeout": 1}, first_failure="429 other"),
        ]
    )

    assert figures.failures == {"429": 3, "timeout": 1}
    assert (figures.failed, figures.first_failure) == (4, "429 too many")


def test_a_server_that_answers_nothing_has_no_latency() -> None:
    assert Figures.of([cell(0)]).latency is None


def test_the_ratio_compares_the_servers_round_by_round() -> None:
    ours = Figures.of([cell(100, 1), cell(10, 1), cell(80, 1)])
    theirs = Figures.of([cell(50, 1), cell(5, 1), cell(40, 1)])

    assert paired_ratio(ours, theirs) == 2


def test_no_ratio_to_a_server_that_answered_nothing() -> None:
    assert paired_ratio(Figures.of([cell(10, 1)]), Figures.of([cell(0)])) is None
