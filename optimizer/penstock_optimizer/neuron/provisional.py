"""The capacity of a replica that no device has measured yet: a curve from the slow end of published figures. Pure."""

from __future__ import annotations

import math

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock_optimizer.neuron.plans import Basis, NeuronFigure

SLOWER = {Basis.PUBLISHED: 1.25, Basis.ESTIMATED: 3.0}
"""The figures are divided by this: published ones have neither HTTP nor a tokeniser, and estimates for other sizes of
models than the published ones were up to three times too high."""
SHARES = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
"""Arrival rates of the points, as shares of the throughput."""
UNSTATED_FACTOR = 3.0
"""As for measured curves: the limit of p95 without an objective, times the p95 of a nearly idle replica."""


def provisional_curve(figure: NeuronFigure, *, p95_objective: float | None) -> CapacityCurve:
    """The curve of a replica with the figure's cores, as a queue of batches with constant times (M/D/c).

    The 95th percentile of the waiting time is the one of an exponential tail: the share u of arrivals waits, with a
    mean of half the time between two departures divided by 1 - u."""
    # HTTP and tokeniser were measured on other processors: the host's time is an estimate.
    most, alone = figure.over_http(
        figure.lowest_per_second or figure.per_second,
        slower=SLOWER[figure.basis],
        host_slower=SLOWER[Basis.ESTIMATED],
    )
    points = []
    for share in SHARES:
        waiting = 1e3 / most * math.log(max(share / 0.05, 1.0)) / (2 * (1 - share))
        points.append(
            CapacityPoint(
                arrivals_per_second=share * most,
                completed_per_second=share * most,
                p50_milliseconds=alone,
                p95_milliseconds=alone + waiting,
                p99_milliseconds=alone + 2 * waiting,
                samples=0,
            )
        )
    limit = p95_objective or UNSTATED_FACTOR * points[0].p95_milliseconds
    return CapacityCurve(points=tuple(points), p95_objective_milliseconds=limit)
