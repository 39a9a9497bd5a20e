"""Hardware for a corpus that is processed once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_planner.compare import Node, Offer
from penstock_planner.corpus import corpus_cells, corpus_headline, corpus_json, corpus_rows
from penstock_planner.evidence import Interval, Origin
from tests.examples import examples
from tests.planner.cases import CURVE, evidence

RATE = max(point.completed_per_second for point in CURVE.points)
NODE = Node("large", 2.0, 4, spot_per_hour=0.5)


def offer(name: str = "icelake", *, node: Node = NODE, low: float = 0.9, not_chosen: str = "") -> Offer:
    origin = Origin.ESTIMATED if low <= 0.75 else Origin.MEASURED_HERE
    one = replace(evidence(name, 2), interval=Interval(low, 1.1), origin=origin)
    return Offer(name, 2, (one,), (node,), not_chosen=not_chosen)


@given(st.integers(1, 10**12), st.floats(0.2, 0.99), st.integers(1, 64))
@settings(max_examples=examples(200))
def test_the_cost_is_of_the_hours_that_all_replicas_of_a_node_take(rows: int, low: float, replicas: int) -> None:
    (found,) = corpus_rows([offer(node=replace(NODE, replicas=replicas), low=low)], rows)

    assert found.node_hours * 3600 * replicas * RATE == pytest.approx(rows)
    assert found.on_demand == pytest.approx(found.node_hours * 2.0)
    assert found.spot == pytest.approx(found.on_demand / 4)
    assert found.slow_node_hours == pytest.approx(found.node_hours / low)
    hours = found.slow_node_hours if found.evidence.is_rough else found.node_hours
    assert found.ranked_cost == pytest.approx(hours * 0.5)
    assert (found.nodes_for_a_day - 1) * 24 < hours <= found.nodes_for_a_day * 24


def test_the_cheapest_is_first_by_spot_where_there_is_one_estimates_at_the_slow_end_comparisons_last() -> None:
    measured = offer("icelake")
    estimated = offer("zen4", node=replace(NODE, spot_per_hour=0.4), low=0.5)
    on_demand = offer("zen5", node=Node("other", 0.45, 4))
    gpu = offer("gpu-t4", node=Node("g4dn", 0.01, 4), not_chosen="Penstock has no GPU runtime")

    found = corpus_rows([gpu, measured, estimated, on_demand, Offer("inf2", 2, problem="no price")], 10**9)

    assert [one.offer.hardware_class for one in found] == ["zen5", "icelake", "zen4", "gpu-t4"]
    headline = corpus_headline(found, 10**9, "USD")
    assert headline.startswith("zen5, 2 cores, ")
    assert "on demand" in headline
    shown = json.loads(corpus_json(found, 10**9, ["a note"], "EUR"))
    assert [one["spot"] is None for one in shown["rows"]] == [True, False, False, True]
    assert (shown["currency"], shown["notes"], shown["rows_of_corpus"]) == ("EUR", ["a note"], 10**9)
    assert corpus_cells(found[2], "$")[4].endswith(")"), "the slow end of an estimate is shown"


def test_without_figures_the_headline_has_a_remedy() -> None:
    assert corpus_rows([Offer("icelake", 2)], 5) == ()
    assert "measure a class" in corpus_headline((), 5, "USD")
