"""The provisional capacity of a model that no device has measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.hardware import NeuronGeneration
from penstock.resources.endpoint import Objective
from penstock_operator.decide import Service
from penstock_optimizer.neuron.choice import best_figure
from penstock_optimizer.neuron.plans import HOST_MILLISECONDS, Basis, NeuronFigure, figures_for
from penstock_optimizer.neuron.provisional import provisional_curve
from penstock_optimizer.neuron.published import SHAPES, published_rows

HOST = 1000 / (3 * HOST_MILLISECONDS)
"""Requests/s that one process is assumed to parse and tokenise, on a host that was not measured."""


def figure(family: str, cores: int = 2, generation: NeuronGeneration = NeuronGeneration.INF2) -> NeuronFigure:
    found = best_figure(figures_for(published_rows(), generation, cores, SHAPES[family], 128), Objective())
    assert found is not None
    return found


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize(("generation", "cores"), [(NeuronGeneration.INF2, 2), (NeuronGeneration.INF1, 4)])
@pytest.mark.parametrize("objective", [None, 50.0])
def test_it_is_below_the_figure_and_the_autoscaler_can_use_it(
    family: str, generation: NeuronGeneration, cores: int, objective: float | None
) -> None:
    own = figure(family, cores, generation)
    curve = provisional_curve(own, p95_objective=objective)
    service = Service.from_curve(curve)

    assert service is not None
    assert service.rate <= min(own.per_second / 1.25, HOST)
    assert curve.p95_objective_milliseconds == (objective or 3 * curve.points[0].p95_milliseconds)
    assert all(one.p95_milliseconds <= other.p95_milliseconds for one, other in pairwise(curve.points))
    assert curve.points[0].p95_milliseconds > own.latency_milliseconds


def test_an_estimate_counts_for_less_than_a_published_figure_and_several_rows_for_the_lowest() -> None:
    """At rates that the CPUs of the host do not limit."""
    base = replace(figure("bert-base"), per_second=300.0, lowest_per_second=None, basis=Basis.PUBLISHED)
    lowest = replace(base, lowest_per_second=200.0)
    estimated = replace(base, basis=Basis.ESTIMATED)

    def most(one: NeuronFigure) -> float:
        return provisional_curve(one, p95_objective=None).points[-1].arrivals_per_second / 0.9

    assert (most(base), most(lowest), most(estimated)) == pytest.approx((240.0, 160.0, 100.0))
    # One process serves a replica, however many devices it has.
    assert most(replace(base, per_second=9000.0)) == pytest.approx(HOST)
    assert most(replace(base, per_second=9000.0, cores=4)) == pytest.approx(HOST)
