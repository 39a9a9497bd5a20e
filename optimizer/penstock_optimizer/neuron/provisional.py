"""The capacity of a replica that no device has measured yet: a curve from the slow end of published figures. Pure."""

from __future__ import annotations

import math

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock_optimizer.neuron.plans import Basis, NeuronFigure

SLOWER = {Basis.PUBLISHED: 1.25, Basis.ESTIMATED: 3.0}
"""The figures are divided by this: published ones have neither HTTP nor a tokeniser, and estimates for other sizes of
models than the published ones were up to three times too high."""
HOST_PER_DEVICE = 400.0
"""Requests/s that the CPUs of one device's host parse and tokenise. Not measured: on the low side for two CPUs."""
HOST_MILLISECONDS = 5.0
"""Of a request, for HTTP and the tokeniser."""
SHARES = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
"""Arrival rates of the points, as shares of the throughput."""
UNSTATED_FACTOR = 3.0
"""As for measured curves: the limit of p95 without an objective, times the p95 of a nearly idle replica."""


def provisional_curve(figure: NeuronFigure, *, p95_objective: float | None) -> CapacityCurve:
    """The curve of a replica with the figure's cores, as a queue of batches with constant times (M/D/c).

    The 95th percentile of the waiting time is the one of an exponential tail: the share u of arrivals waits, with a
    mean of half the time between two departures divided by 1 - u."""
    slower = SLOWER[figure.basis]
    devices = figure.cores / figure.generation.cores_per_device
    published = figure.lowest_per_second or figure.per_second
    most = min(published / slower, HOST_PER_DEVICE * devices)
    alone = figure.latency_milliseconds * slower + HOST_MILLISECONDS
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
