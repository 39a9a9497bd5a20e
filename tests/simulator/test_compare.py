"""Policies held against each other at equal replica-hours."""

from __future__ import annotations

import csv
import io
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from penstock_operator.decide import Service
from penstock_simulator.choices import PolicyKind
from penstock_simulator.compare import (
    Experiment,
    Point,
    PolicyVerdict,
    TraceResult,
    compare,
    flips,
    judge,
    late_at,
    over_range,
    together,
)
from penstock_simulator.fleet import MODEL, FleetSettings, reference_curve
from penstock_simulator.policies import Limits
from penstock_simulator.report import COLUMNS, figures_csv, flips_text, headline, overall, page
from penstock_simulator.traces import Trace


def point(hours: float, late: float, kind: PolicyKind = PolicyKind.KPA) -> Point:
    return Point(kind, hours, 1000, late, 0, hours, 0, 0, 1)


FRONTIER = [point(2, 100), point(4, 20), point(3, 300), point(8, 10), point(6, 15)]


@pytest.mark.parametrize(("hours", "late"), [(1.9, None), (2, 100), (3, 60), (4, 20), (5, 17.5), (8, 10), (100, 10)])
def test_a_frontier_is_interpolated_along_its_best_points(hours: float, late: float | None) -> None:
    """The point at 3 hours, worse than that at 2, counts for nothing."""
    assert late_at(FRONTIER, hours) == (None if late is None else pytest.approx(late))


def test_below_the_other_policys_fewest_replica_hours_our_frontier_is_read_at_that_minimum() -> None:
    ours = [point(1, 200, PolicyKind.PENSTOCK), point(3, 50, PolicyKind.PENSTOCK)]

    here = judge(ours[1], [*ours, *FRONTIER], PolicyKind.KPA)
    there = judge(ours[0], [*ours, *FRONTIER], PolicyKind.KPA)

    assert here is not None
    assert there is not None
    assert replace(here, over=None) == PolicyVerdict(PolicyKind.PENSTOCK, PolicyKind.KPA, 3, 50, 60)
    assert replace(there, over=None) == PolicyVerdict(PolicyKind.PENSTOCK, PolicyKind.KPA, 2, 125, 100)
    assert (here.fewer, there.fewer) == (True, False)


def test_frontiers_are_compared_over_their_common_range() -> None:
    ours = [point(1, 200, PolicyKind.PENSTOCK), point(3, 50, PolicyKind.PENSTOCK)]

    found = over_range(ours, FRONTIER)

    assert found is not None
    assert (found.least, found.most) == (2, 3)
    assert found.our_late == pytest.approx((125 + 50) / 2)
    assert found.rival_late == pytest.approx((100 + 60) / 2)
    assert found.ahead == pytest.approx(12 / 41), "where 125 - 75 x is under 100 - 40 x: from x = 0.714 on"
    assert over_range([point(1, 200)], FRONTIER) is None


def test_all_traces_together_are_added_up_by_setting(everything: tuple[Experiment, list[TraceResult]]) -> None:
    experiment, (result,) = everything

    (once,) = [point for point in result.points if point.kind is PolicyKind.KPA and point.knob == 0.6]
    (twice,) = [point for point in together([result, result]) if point.kind is PolicyKind.KPA and point.knob == 0.6]

    assert (twice.late, twice.replica_hours) == (2 * once.late, 2 * once.replica_hours)
    lines = overall(experiment, [result, result])
    assert len(lines) == 12, "ours and ours on Prometheus, against six"
    assert all("ours" in line and "at" in line for line in lines)
    assert overall(experiment, [result]) == [], "one trace has no summary over all traces"


def test_flips_are_turns_and_not_steps() -> None:
    assert [flips(n) for n in ([1, 1], [1, 2, 5], [1, 3, 2], [1, 3, 3, 2, 2, 4, 1])] == [0, 0, 1, 3]


def small(*policies: PolicyKind, seeds: tuple[int, ...] = (1,)) -> Experiment:
    """Seven minutes with a step of a small endpoint."""
    service = Service.from_curve(reference_curve(), pooled=True)
    assert service is not None
    load = np.concatenate([np.full(120, 10.0), np.full(300, 25.0)])
    return Experiment(
        service=service,
        model=MODEL,
        traces=(Trace("small", "a small step", load, 1),),
        policies=policies or tuple(PolicyKind),
        limits=Limits(1, 10),
        fleet=FleetSettings(start_up_seconds=20.0),
        seeds=seeds,
        knobs=dict.fromkeys(PolicyKind, (0.6, 0.9)),
    )


def test_the_same_seeds_give_the_same_figures_with_any_number_of_workers() -> None:
    experiment = small(PolicyKind.KPA, PolicyKind.KEDA)

    alone, together = list(compare(experiment)), list(compare(experiment, workers=2))

    assert alone[0].points == together[0].points
    assert alone[0].runs == together[0].runs


def test_no_more_processes_start_than_there_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int, **_: object) -> None:
            started.append(workers)
            super().__init__(2)

    monkeypatch.setattr("penstock_simulator.compare.ProcessPoolExecutor", Pool)
    experiment = small(PolicyKind.KPA)

    list(compare(experiment, workers=100_000))

    assert started == [experiment.runs]


def test_progress_counts_every_run() -> None:
    seen: list[tuple[int, int, str]] = []

    list(compare(small(PolicyKind.KPA, PolicyKind.KEDA), on_progress=lambda *what: seen.append(what)))

    assert seen == [(done, 4, "small") for done in range(1, 5)]


@pytest.fixture(scope="module")
def everything() -> tuple[Experiment, list[TraceResult]]:
    experiment = small()
    return experiment, list(compare(experiment))


def test_a_report_has_every_policy_and_loads_no_external_file(everything: tuple[Experiment, list[TraceResult]]) -> None:
    experiment, results = everything
    html, rows = page(experiment, results, 0.5), list(csv.reader(io.StringIO(figures_csv(results, 0.5))))

    assert rows[0] == list(COLUMNS)
    assert {row[1] for row in rows[1:]} == {kind.value for kind in PolicyKind}
    assert all(float(row[-1]) == pytest.approx(float(row[7]) / 2, rel=1e-3) for row in rows[1:])
    assert not re.search(r"https?://|<script|@import|url\(", html)
    assert html.count('<svg class="chart"') == 2
    assert "of 12 comparisons" in headline(results)
    assert headline([]) == "Nothing to compare with: name more policies."


def test_the_outcome_names_traces_where_penstock_flipped_more_often_than_the_load(
    everything: tuple[Experiment, list[TraceResult]],
) -> None:
    experiment, (result,) = everything
    chosen = [p for p in result.of(PolicyKind.PENSTOCK) if p.knob == experiment.headroom]
    restless = replace(result, points=(replace(chosen[0], flips=1.5, most_flips=3),))

    assert flips_text(experiment, [result]) == "Ours turns no more often than the load changes, in any run."
    assert flips_text(experiment, [restless]) == (
        "Ours turns more often than the load changes, in its worst run: small, Penstock 3 times (1 change of load)."
    )
    assert flips_text(experiment, [replace(result, points=tuple(result.of(PolicyKind.KPA)))]) == ""


def test_an_equal_number_of_late_requests_is_neither_fewer_nor_more(
    everything: tuple[Experiment, list[TraceResult]],
) -> None:
    """An endpoint for which one replica is always enough: the same requests are late under every policy."""
    experiment, (result,) = everything
    (first, *others) = result.verdicts
    same = replace(first, our_late=7.0, rival_late=7.0, over=None)
    won = [replace(verdict, our_late=1.0, rival_late=2.0, over=None) for verdict in others]
    tied = replace(result, verdicts=(same, *won))

    assert headline([tied]) == (
        f"Fewer late requests at equal replica-hours in {len(won)} of {len(won) + 1} comparisons, as many in 1."
    )
    assert 'class="fail"' not in page(experiment, [tied], None)


def test_without_a_price_there_is_no_cost(everything: tuple[Experiment, list[TraceResult]]) -> None:
    experiment, results = everything

    assert "cost" not in page(experiment, results, None)
    assert {row[-1] for row in csv.reader(io.StringIO(figures_csv(results, None)))} == {"cost", ""}


def test_a_lower_headroom_costs_more_replicas_and_makes_fewer_requests_late(
    everything: tuple[Experiment, list[TraceResult]],
) -> None:
    (result,) = everything[1]

    points = result.of(PolicyKind.PENSTOCK)

    by_knob = {p.knob: p for p in points}
    assert by_knob[0.9].replica_hours < by_knob[0.6].replica_hours
    assert by_knob[0.9].late >= by_knob[0.6].late
