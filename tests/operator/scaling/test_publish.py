"""A decision is written only if it differs from the published one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_operator.facts.findings import no, yes
from penstock_operator.facts.scaling import DesiredScale
from penstock_operator.scaling.loop import worth_publishing

BEFORE = DesiredScale(
    2,
    "2 replicas: 100 requests/s now.",
    cause="Demand",
    metrics=yes("Scraped", "rates are known"),
    requests_per_second=100.0,
    capacity_per_replica=88.0,
    slowdown=1.0,
)


@pytest.mark.parametrize(
    ("change", "at_once", "later"),
    [
        ({}, False, False),
        ({"replicas": 3}, True, True),
        ({"metrics": no("MetricsMissing", "the load cannot be read")}, True, True),
        ({"metrics": yes("Scraped", "for 65 s"), "reason": "2 replicas: 101 requests/s now."}, False, False),
        ({"requests_per_second": 124.0}, False, False),
        ({"requests_per_second": 140.0}, False, True),
        ({"requests_per_second": None}, False, True),
        ({"requests_per_second": 0.0}, False, True),
        ({"capacity_per_replica": 60.0}, False, True),
        ({"slowdown": 1.5}, False, True),
        ({"cause": "ShrinkWindow"}, False, True),
        ({"p95_milliseconds": 19.0}, False, False),
    ],
)
def test_the_count_is_published_at_once_and_figures_only_when_they_differ(
    change: dict[str, object], at_once: bool, later: bool
) -> None:
    now = replace(BEFORE, **change)  # type: ignore[arg-type]  # by the name of its field

    assert (worth_publishing(BEFORE, now, seconds=5), worth_publishing(BEFORE, now, seconds=61)) == (at_once, later)
    # The clock was set back: not as many hours later.
    assert worth_publishing(BEFORE, now, seconds=-7200) is later


def test_the_first_decision_is_published() -> None:
    assert worth_publishing(None, BEFORE, seconds=0)


@pytest.mark.parametrize(("old", "new", "expected"), [(0.2, 0.7, False), (0.2, 0.0, True), (0.0, 0.3, True)])
def test_below_one_request_per_second_only_changes_to_and_from_zero_are_published(
    old: float, new: float, expected: bool
) -> None:
    before, now = replace(BEFORE, requests_per_second=old), replace(BEFORE, requests_per_second=new)
    assert worth_publishing(before, now, seconds=100) is expected
