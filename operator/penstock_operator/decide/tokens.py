"""The load of text generation in requests of the workload that the capacity was measured with. Pure.

Two loads are compared, and the higher one counts. Requests arrive at a rate, and each has a number of output tokens: a
request with twice the tokens of a measured one counts as two. And requests are in progress: the number that a replica
keeps in progress at its capacity means the capacity, by Little's law. The first is right while replicas keep up. The
second shows an overload by clients that wait for their answers before they ask again: the arrivals then fall with the
speed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock_operator.decide.measurement import Idle, Measurement, Metrics, Value, known
from penstock_operator.decide.service import Service

LEAST_WEIGHT, MOST_WEIGHT = 0.5, 8.0
"""Limits of the weight of a request: a short answer has a prompt, too, and one odd reading must not ask for a fleet."""
SIGNIFICANT = 2.0
"""Standard deviations of the requests in progress that may be chance."""


def in_measured_requests(metrics: Metrics, service: Service | None) -> Metrics:
    """The metrics with arrivals in requests of the measured workload, requests/s; unchanged of other tasks."""
    if service is None or service.tokens_per_request is None or service.seconds_in_flight is None:
        return metrics
    weight = weight_of(metrics.tokens_per_request, service.tokens_per_request)
    least = proven_rate(known(metrics.in_flight) or 0.0, service.seconds_in_flight)
    return replace(
        metrics,
        arrivals_fast=_at_least(metrics.arrivals_fast, weight, least),
        arrivals_slow=_times(metrics.arrivals_slow, weight),
    )


def weight_of(observed: Measurement, measured: float) -> float:
    """Requests of `measured` output tokens that an observed one counts as; 1 where its tokens are not known."""
    if not isinstance(observed, Value) or observed.value <= 0:
        return 1.0
    return min(max(observed.value / measured, LEAST_WEIGHT), MOST_WEIGHT)


def proven_rate(in_flight: float, seconds: float) -> float:
    """The arrival rate (requests/s) that keeps this number in progress when a request takes `seconds`, less what may be
    chance."""
    return max(0.0, in_flight - SIGNIFICANT * math.sqrt(in_flight)) / seconds


def _times(arrivals: Measurement, weight: float) -> Measurement:
    return replace(arrivals, value=arrivals.value * weight) if isinstance(arrivals, Value) else arrivals


def _at_least(arrivals: Measurement, weight: float, least: float) -> Measurement:
    if isinstance(arrivals, Value):
        return replace(arrivals, value=max(arrivals.value * weight, least))
    return Value(least) if isinstance(arrivals, Idle) and least > 0 else arrivals
