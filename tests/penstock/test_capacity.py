"""The highest rate within an objective, from measured points."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.capacity import KEEPS_UP, CapacityCurve, CapacityPoint, TokenCurve, TokenPoint
from penstock.prices.pod_costs import per_million, per_month
from tests.examples import examples


def point(rate: float, p95: float, *, refused: float = 0.0, completed: float | None = None) -> CapacityPoint:
    return CapacityPoint(
        arrivals_per_second=rate,
        completed_per_second=rate if completed is None else completed,
        p50_milliseconds=p95 / 2,
        p95_milliseconds=p95,
        p99_milliseconds=p95 * 1.5,
        refused_share=refused,
        samples=1000,
    )


def curve(*points: CapacityPoint, objective: float | None = None) -> CapacityCurve:
    return CapacityCurve(points=points, p95_objective_milliseconds=objective)


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([], None),
        ([point(10, 60)], None),
        ([point(10, 50)], 10),
        ([point(10, 20), point(20, 30)], 20),
        ([point(10, 20), point(20, 80)], 15),
        ([point(20, 80), point(10, 20)], 15),
        ([point(10, 20), point(20, 80), point(30, 20)], 15),
        ([point(10, 50), point(20, 51)], 10),
        ([point(10, 20), point(20, 30, refused=0.01)], 10),
        ([point(10, 20), point(20, 90, refused=0.5)], 10),
        ([point(10, 20), point(20, 30, completed=17)], 10),
        ([point(10, 20), point(20, 30, completed=18)], 20),
        ([point(10, 20, refused=0.1), point(20, 30)], None),
    ],
    ids=[
        "nothing measured", "not even the first", "just met", "all met", "between good and bad", "in any order",
        "good again is noise", "bad by a hair", "refusals end it", "refusals do not interpolate", "falls behind",
        "keeps up", "refused from the start",
    ],
)  # fmt: skip
def test_the_rate_within_50_milliseconds(points: list[CapacityPoint], rate: float | None) -> None:
    assert curve(*points).rate_within(50) == rate
    assert curve(*points, objective=50).requests_per_second == rate


def test_without_an_objective_there_is_no_rate() -> None:
    assert curve(point(10, 20)).requests_per_second is None


def test_a_point_meets_the_objective_only_if_the_server_keeps_up_with_the_load() -> None:
    assert point(100, 20, completed=100 * KEEPS_UP).meets(20)
    assert not point(100, 20, completed=100 * KEEPS_UP - 0.1).meets(20)
    assert not point(100, 20).meets(19.99)


@pytest.mark.parametrize(
    "wrong",
    [{"arrivals_per_second": 0}, {"p95_milliseconds": -1}, {"refused_share": 1.1}, {"p95_milliseconds": float("nan")}],
)
def test_impossible_measurements_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CapacityPoint.model_validate({**point(10, 20).model_dump(), **wrong})


RATES = st.floats(0.1, 1e5)
POINTS = st.lists(
    st.builds(point, RATES, st.floats(0, 1e5), refused=st.sampled_from([0.0, 0.0, 0.2]), completed=st.floats(0, 1e5)),
    max_size=8,
    unique_by=lambda measured: measured.arrivals_per_second,
)


@given(POINTS, st.floats(0.01, 1e5))
def test_the_rate_is_within_the_measured_rates_and_below_the_first_miss(
    points: list[CapacityPoint], limit: float
) -> None:
    rate = curve(*points).rate_within(limit)
    ordered = sorted(points, key=lambda measured: measured.arrivals_per_second)
    misses = [measured for measured in ordered if not measured.meets(limit)]
    if not ordered or ordered[0] in misses:
        assert rate is None
        return
    assert rate is not None
    assert ordered[0].arrivals_per_second <= rate <= ordered[-1].arrivals_per_second
    assert not misses or rate <= misses[0].arrivals_per_second


@given(POINTS, st.floats(0.01, 1e5), st.floats(0.01, 1e5))
def test_a_looser_objective_never_allows_a_lower_rate(points: list[CapacityPoint], one: float, other: float) -> None:
    tight, loose = sorted((one, other))
    measured = curve(*points)
    assert (measured.rate_within(tight) or 0) <= (measured.rate_within(loose) or 0) * (1 + 1e-9)


@given(POINTS, st.floats(0.01, 1e5))
def test_a_curve_survives_json(points: list[CapacityPoint], objective: float) -> None:
    measured = curve(*points, objective=objective)
    assert CapacityCurve.model_validate_json(measured.model_dump_json()) == measured


def tokens(clients: int, rate: float, *, first: float = 10, following: float = 5) -> TokenPoint:
    return TokenPoint(
        clients=clients,
        requests_per_second=rate / 10,
        tokens_per_second=rate,
        first_token_p95_milliseconds=first,
        next_token_p95_milliseconds=following,
        samples=10,
    )


@pytest.mark.parametrize(
    ("points", "clients", "summary"),
    [
        ([], None, ""),
        ([tokens(1, 20, first=500)], None, "one client alone does not get the first token within 400 ms and each "),
        ([tokens(1, 20)], 1, "20 tokens/s for 1 client with the first token within 400 ms and each further one"),
        ([tokens(2, 30), tokens(1, 20), tokens(4, 60, first=401)], 2, "30 tokens/s for 2 clients with the first token"),
        ([tokens(1, 20), tokens(2, 30, following=101), tokens(4, 60)], 1, "20 tokens/s for 1 client with"),
        ([tokens(1, 20), tokens(2, 40), tokens(4, 39)], 2, "40 tokens/s for 2 clients with"),
    ],
)
def test_the_capacity_in_tokens_is_the_most_within_both_times(
    points: list[TokenPoint], clients: int | None, summary: str
) -> None:
    curve = TokenCurve.of(points, first_token=400, next_token=None)
    assert (None if curve.within is None else curve.within.clients) == clients
    assert curve.summary.startswith(summary)
    assert (curve.summary == "") == (not points)


def test_without_an_objective_times_may_grow_to_three_times_those_of_one_client_or_to_what_people_notice() -> None:
    short = TokenCurve.of([tokens(1, 20, first=50, following=10)], first_token=None, next_token=None)
    assert (short.first_token_objective_milliseconds, short.next_token_objective_milliseconds) == (1000, 100)
    long = TokenCurve.of([tokens(1, 20, first=900, following=80)], first_token=None, next_token=None)
    assert (long.first_token_objective_milliseconds, long.next_token_objective_milliseconds) == (2700, 240)


@given(st.lists(st.tuples(*[st.floats(0.1, 1e4)] * 3), min_size=1, max_size=8), st.floats(1, 1e4), st.floats(1, 1e4))
def test_a_looser_objective_never_lowers_the_capacity_in_tokens(
    measured: list[tuple[float, float, float]], first: float, following: float
) -> None:
    points = [tokens(at + 1, rate, first=a, following=b) for at, (rate, a, b) in enumerate(measured)]
    tight = TokenCurve.of(points, first_token=first, next_token=following).within
    loose = TokenCurve.of(points, first_token=2 * first, next_token=2 * following).within
    if tight is not None:
        assert loose is not None
        assert loose.tokens_per_second >= tight.tokens_per_second


@pytest.mark.parametrize(
    ("per_hour", "rate", "dollars"),
    [
        (0.228, 985, 0.0643),  # inf1.xlarge, data parallel at batch 6
        (1.18, 1793, 0.1828),  # inf1.6xlarge, pipeline
        (3.6, 1000, 1.0),
    ],
)
def test_cost_of_a_million_requests(per_hour: float, rate: float, dollars: float) -> None:
    assert per_million(per_hour, rate) == pytest.approx(dollars, abs=5e-5)


@settings(max_examples=examples(100))
@given(st.floats(0.01, 1000), st.floats(0.1, 1e6))
def test_a_month_costs_its_millions_of_requests(per_hour: float, rate: float) -> None:
    millions = rate * 730 * 3600 / 1e6

    assert per_month(per_hour) == pytest.approx(per_million(per_hour, rate) * millions)
