"""The comparison: replicas and cost for a load, which offer is chosen, and why the others lost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_operator.decide import Service, replicas_for_load
from penstock_planner.compare import Load, Node, Offer, compare, size
from penstock_planner.evidence import Origin, curve_of_closed_loop
from tests.examples import examples
from tests.planner.cases import CURVE, LOAD, NODE, evidence, offer


def test_replicas_and_costs_of_a_worked_example() -> None:
    found = size(evidence(), NODE, LOAD)

    # One replica takes 80/s; with a headroom of 0.75, 200/s need 3.33 replicas and 800/s 13.3.
    assert found is not None
    assert (found.replicas_mean, found.replicas_peak) == (4, 14)
    # Four replicas are on a node of 1 dollar an hour: four nodes are reserved, and one is used.
    assert found.reserved_per_month == pytest.approx(4 * 730)
    assert found.used_per_month == pytest.approx(730)
    assert found.reserved_per_million == pytest.approx(4 / (200 * 3600) * 1e6)
    assert found.used_per_million == pytest.approx(1 / (200 * 3600) * 1e6)
    # 50 requests/s for each replica at the mean: a quarter of the way from 25 to 50 ms.
    assert found.p95_mean == pytest.approx(31.25)
    assert found.p95_peak < 50


def test_replicas_are_those_of_the_autoscaler() -> None:
    for pooled in (False, True):
        load = replace(LOAD, pooled=pooled)
        service = Service.from_curve(CURVE, p95_objective_milliseconds=50, pooled=pooled)
        found = size(evidence(), NODE, load)

        assert service is not None

        assert found is not None
        assert found.replicas_peak == replicas_for_load(service, 800, 0.75)
        assert found.replicas_mean == replicas_for_load(service, 200, 0.75)


def test_the_cheapest_offer_within_the_objective_is_chosen() -> None:
    found = compare([offer("icelake", per_hour=2.0), offer("zen4", per_hour=1.0)], LOAD)

    assert found.best is not None
    assert found.best.offer.hardware_class == "zen4"
    assert [row.why for row in found.rows] == ["cheapest within the objective", "costs 2.00 times as much"]


def test_an_estimate_wins_only_if_it_is_cheaper_at_its_slow_end() -> None:
    measured = offer("icelake", per_hour=1.0)
    rough = offer("zen4", per_hour=0.9, origin=Origin.ESTIMATED, error=0.5)

    found = compare([rough, measured], LOAD)

    assert found.best is not None
    assert found.best.offer.hardware_class == "icelake"
    assert found.likely is found.rows[1]
    assert found.rows[1].why == (
        "likely: cheapest in the middle of its interval only. To decide: penstock optimize FILE, on zen4.big, 1 core"
    )
    cheap = compare([offer("zen4", per_hour=0.2, origin=Origin.ESTIMATED, error=0.5), measured], LOAD).best
    assert cheap is not None
    assert cheap.offer.hardware_class == "zen4"
    assert cheap.why == "cheapest within the objective, even at the slow end of its interval"


def test_an_estimate_is_likely_on_the_node_that_is_cheapest_in_the_middle() -> None:
    nodes = (Node("small", 0.5, 7), Node("large", 3.0, 40))
    rough = Offer("zen5", 1, (evidence("zen5", origin=Origin.ESTIMATED, error=0.6),), nodes)

    found = compare([rough, offer("icelake", per_hour=1.0)], LOAD, measure="penstock optimize emotion.yaml")

    assert found.likely is not None
    assert found.likely.node is nodes[0]
    assert found.likely.why.endswith("To decide: penstock optimize emotion.yaml, on small, 1 core")
    assert len(found.rows) == 2


def test_without_a_sure_choice_the_likely_one_is_named() -> None:
    rough = offer("zen5", origin=Origin.ESTIMATED, error=0.6)

    found = compare([rough], replace(LOAD, most_replicas=20))

    assert (found.best, found.likely) == (None, found.rows[0])
    assert found.nearest


def test_an_estimate_that_could_be_cheaper_is_named() -> None:
    found = compare([offer("icelake"), offer("zen4", per_hour=1.2, origin=Origin.ESTIMATED, error=0.5)], LOAD)

    assert found.rows[1].why == (
        "costs 1.20 times as much, and is estimated: at the fast end of its interval it would be cheaper; measure it"
    )


def test_a_late_offer_loses_and_the_nearest_objective_is_named() -> None:
    found = compare([offer()], replace(LOAD, p95_milliseconds=10))

    assert found.best is None
    assert found.rows[0].why.startswith("misses the p95:")
    assert found.nearest.startswith("nearest: icelake, 1 core with a p95 of 20 ms, ")


def test_what_is_named_as_nearest_is_feasible() -> None:
    found = compare([offer()], replace(LOAD, p95_milliseconds=10))
    asked = float(found.nearest.split("p95 of ")[1].split(" ms")[0])

    assert compare([offer()], replace(LOAD, p95_milliseconds=asked)).best is not None


def test_too_few_replicas_lose_and_the_number_is_named() -> None:
    found = compare([offer()], replace(LOAD, most_replicas=8))

    assert found.best is None
    assert found.rows[0].why == "needs 14 replicas at the peak, scaling.maxReplicas is 8"
    assert found.nearest == "nearest: icelake, 1 core with scaling.maxReplicas 14, 2,920 a month reserved"
    assert compare([offer()], replace(LOAD, most_replicas=14)).best is not None


def test_an_offer_for_comparison_is_never_chosen() -> None:
    gpu = replace(offer("gpu-t4", per_hour=0.01), not_chosen="Penstock has no GPU runtime")

    found = compare([gpu, offer()], LOAD)

    assert found.best is not None
    assert found.best.offer.hardware_class == "icelake"
    assert found.rows[1].why == "for comparison: Penstock has no GPU runtime"


def test_an_offer_without_figures_states_the_problem() -> None:
    unknown = Offer("zen4", 2, problem="nothing is known of this model on zen4", remedy="Run penstock optimize there")

    found = compare([unknown], LOAD)

    assert found.rows[0].why == "nothing is known of this model on zen4. Run penstock optimize there"
    assert found.nearest.startswith("nothing can be judged")
    assert compare([], LOAD).best is None


@pytest.mark.parametrize("load", [Load(0, 1, 50), Load(2, 1, 50), Load(1, 1, 0)])
def test_a_load_that_makes_no_sense_is_refused(load: Load) -> None:
    with pytest.raises(ValueError, match="must be over 0"):
        compare([], load)


def test_a_price_for_each_core_is_a_share_of_nodes() -> None:
    share = Node("2 x a core", 0.1, 1, is_share=True)
    found = size(evidence(cores=2), share, LOAD)

    assert found is not None
    assert found.reserved_per_month == pytest.approx(14 * 0.1 * 730)
    assert found.used_per_month == pytest.approx(4 * 0.1 * 730)


rates = st.floats(0.1, 5000)


@settings(max_examples=examples(200))
@given(rates, st.floats(1, 10), st.floats(21, 500), st.floats(0.3, 1), st.booleans(), st.integers(1, 20))
def test_costs_and_replicas_are_consistent(  # noqa: PLR0917 - drawn by position
    mean: float, ratio: float, p95: float, headroom: float, pooled: bool, per_node: int
) -> None:
    load = Load(mean, mean * ratio, p95, headroom, pooled=pooled)
    found = size(evidence(), Node("n", 0.5, per_node), load)

    assert found is not None
    assert 1 <= found.replicas_mean <= found.replicas_peak
    assert found.used_per_month <= found.reserved_per_month * (1 + 1e-9)
    nodes = found.reserved_per_month / 730 / 0.5
    assert nodes == pytest.approx(math.ceil(found.replicas_peak / per_node))
    assert found.p95_peak <= p95 * 1.001


@settings(max_examples=examples(200))
@given(rates, rates, st.floats(21, 500), st.booleans())
def test_more_load_is_never_cheaper(one: float, other: float, p95: float, pooled: bool) -> None:
    less, more = sorted((one, other))
    few = size(evidence(), NODE, Load(less, less, p95, pooled=pooled))
    many = size(evidence(), NODE, Load(more, more, p95, pooled=pooled))

    assert few is not None

    assert many is not None
    assert few.reserved_per_month <= many.reserved_per_month
    assert few.replicas_peak <= many.replicas_peak


@settings(max_examples=examples(200))
@given(rates, st.floats(21, 500), st.floats(21, 500))
def test_a_tighter_objective_is_never_cheaper(rate: float, one: float, other: float) -> None:
    tight, loose = sorted((one, other))
    strict = size(evidence(), NODE, Load(rate, rate, tight))
    easy = size(evidence(), NODE, Load(rate, rate, loose))

    assert strict is not None

    assert easy is not None
    assert strict.reserved_per_month >= easy.reserved_per_month


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.tuples(st.floats(0.05, 20), st.integers(1, 16), st.sampled_from(list(Origin)), st.floats(0, 0.6)),
        min_size=1, max_size=8,
    ),
    st.floats(5, 300),
)  # fmt: skip
def test_the_choice_is_feasible_and_no_feasible_offer_is_surely_cheaper(
    made: list[tuple[float, int, Origin, float]], p95: float
) -> None:
    offers = [
        offer(f"class{index}", per_hour=price, replicas=count, origin=origin, error=error)
        for index, (price, count, origin, error) in enumerate(made)
    ]

    found = compare(offers, replace(LOAD, p95_milliseconds=p95))

    assert len(found.rows) == len(offers)
    assert all(row.why for row in found.rows)
    best, likely = found.best, found.likely
    if likely is not None:
        assert likely.is_rough
        assert likely is not best
        assert likely.sizing is not None
        assert best is None or (
            best.sizing is not None and likely.sizing.reserved_per_month < best.sizing.reserved_per_month
        )
    if best is None:
        assert found.nearest
        return
    assert best.sizing is not None
    assert best.ranked is not None
    assert max(best.sizing.p95_mean, best.sizing.p95_peak) <= p95
    for row in found.rows:
        if row.is_feasible:
            assert row.ranked is not None
            assert best.ranked.reserved_per_month <= row.ranked.reserved_per_month


@settings(max_examples=examples(100))
@given(st.floats(1, 1e5), st.floats(0.1, 1000), st.integers(2, 64))
def test_partly_filled_batches_are_never_faster_than_full_ones(rate: float, latency: float, batch: int) -> None:
    # The same queue, if every batch were full: `batch` times fewer arrivals of whole batches.
    full = curve_of_closed_loop(rate / batch, latency)
    real = curve_of_closed_loop(rate, latency, batch=batch)

    for one, other in zip(full.points, real.points, strict=True):
        assert other.arrivals_per_second == pytest.approx(one.arrivals_per_second * batch)
        assert other.p95_milliseconds >= one.p95_milliseconds
        assert other.p95_milliseconds <= one.p95_milliseconds + 1.5 * latency


@settings(max_examples=examples(100))
@given(st.floats(1, 1e5), st.floats(0.1, 1000), st.integers(1, 64))
def test_the_curve_of_a_closed_loop_rises_and_begins_at_its_latency(rate: float, latency: float, batch: int) -> None:
    curve = curve_of_closed_loop(rate, latency, batch=batch)
    p95s = [one.p95_milliseconds for one in curve.points]

    assert p95s == sorted(p95s)
    assert p95s[0] >= latency
    assert all(one.arrivals_per_second < rate for one in curve.points)
    assert curve.rate_within(latency * 0.99) is None
    assert curve.rate_within(math.inf) == pytest.approx(0.95 * rate)
