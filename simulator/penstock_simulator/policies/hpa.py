"""The HorizontalPodAutoscaler, as its documents and `replica_calculator.go` have it, with the default behaviour.

Every 15 s; no change within a tolerance of 10 %; down to the highest recommendation of the last 300 s, by any number;
up at once by at most 100 % or 4 pods in 15 s. Metrics come from Prometheus through an adapter, whose own delay is left
out, to the rivals' advantage.

Sources: kubernetes.io, "Horizontal Pod Autoscaling" (algorithm details, default behaviour); kubernetes/kubernetes
pkg/controller/podautoscaler/replica_calculator.go, `calcPlainMetricReplicas` and `GetExternalMetricReplicas`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from penstock_simulator.policies.base import Limits, View

TOLERANCE = 0.1
STABILISATION_SECONDS = 300.0
UP_PODS, UP_FACTOR = 4, 2
"""At most 4 pods or 100 % in each period of 15 s, whichever is more; the period is that of the controller."""


class Hpa:
    """What all HPAs share: from a raw recommendation to the number."""

    interval = 15

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._recommendations: deque[tuple[float, int]] = deque()

    def settle(self, view: View, raw: int) -> int:
        """Stabilisation, then the rate limit, then the bounds."""
        current = view.fleet.replicas
        self._recommendations.append((view.now, raw))
        while self._recommendations[0][0] <= view.now - STABILISATION_SECONDS:
            self._recommendations.popleft()
        if raw < current:
            raw = min(current, max(replicas for _, replicas in self._recommendations))
        if raw > current:
            raw = min(raw, max(current + UP_PODS, current * UP_FACTOR))
        return self.limits.clamp(raw)


def by_total(usage: float, target: float, current: int) -> int:
    """`AverageValue` of an External or Object metric: usage over target, if that moves by more than the tolerance."""
    ratio = usage / (target * max(current, 1))
    return current if abs(1 - ratio) <= TOLERANCE else math.ceil(usage / target)


class HpaOnP95(Hpa):
    """An External metric p95 with a target `Value`: what people write first."""

    def __init__(self, limits: Limits, *, target_seconds: float, window_seconds: float = 60.0) -> None:
        super().__init__(limits)
        self.target = target_seconds
        self.window = window_seconds

    def decide(self, view: View) -> int | None:
        """ceil(ready pods * p95 / target); nothing while `histogram_quantile` is NaN."""
        rates = view.scraper.bucket_rates(self.window, view.now)
        p95 = None if rates is None else view.scraper.quantile(rates, 0.95)
        if p95 is None:
            return None
        ratio = p95 / self.target
        raw = view.fleet.replicas if abs(1 - ratio) <= TOLERANCE else math.ceil(ratio * view.fleet.ready)
        return self.settle(view, raw)


class HpaOnInFlight(Hpa):
    """A Pods metric, requests in flight, with a target `AverageValue`."""

    def __init__(self, limits: Limits, *, target: float) -> None:
        super().__init__(limits)
        self.target = target

    def decide(self, view: View) -> int | None:
        """`calcPlainMetricReplicas`: pods without the metric count as on target downwards, as idle upwards."""
        current = view.fleet.replicas
        pods = view.scraper.in_flight()
        if not pods:
            return None
        values = list(pods.values())
        missing = max(0, current - len(values))
        raw = self._recommend(values, missing, current, ready=view.fleet.ready)
        return self.settle(view, raw)

    def _recommend(self, values: list[int], missing: int, current: int, *, ready: int) -> int:
        ratio = sum(values) / len(values) / self.target
        if not missing:
            return current if abs(1 - ratio) <= TOLERANCE else math.ceil(ratio * max(ready, 1))
        assumed = self.target if ratio < 1 else 0.0
        known = len(values) + missing
        again = (sum(values) + missing * assumed) / known / self.target
        turned = (ratio < 1 < again) or (again < 1 < ratio)
        if abs(1 - again) <= TOLERANCE or turned:
            return current
        raw = math.ceil(again * known)
        against: Literal[True, False] = (again < 1 and raw > current) or (again > 1 and raw < current)
        return current if against else raw
