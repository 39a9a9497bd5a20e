"""KEDA with a Prometheus trigger on the request rate, everything else by default.

`sum(rate(requests_total[2m]))` with `threshold`, as in its documents. From one replica on, the HPA that KEDA makes asks
for the query's value every 15 s (`AverageValue`); KEDA itself, every 30 s, only takes the step between none and one,
down after a cool-down of 300 s.

Sources: keda.sh, "Prometheus" scaler and "ScaledObject specification" (pollingInterval 30, cooldownPeriod 300);
kedacore/keda pkg/scalers/prometheus_scaler.go, `ExecutePromQuery` (`ignoreNullValues`).
"""

from __future__ import annotations

from penstock_simulator.policies.base import Limits, View
from penstock_simulator.policies.hpa import Hpa, by_total

POLLING_SECONDS = 30
COOLDOWN_SECONDS = 300.0
WINDOW_SECONDS = 120.0


class Keda(Hpa):
    """Request rate over a threshold per replica."""

    def __init__(self, limits: Limits, *, threshold: float) -> None:
        super().__init__(limits)
        self.threshold = threshold
        self._active_at = 0.0

    def decide(self, view: View) -> int | None:
        """KEDA's step at none, the HPA's answer from one on."""
        scraper, now = view.scraper, view.now
        answered = scraper.answers_per_second(WINDOW_SECONDS, now)
        # An empty vector is 0 by default (ignoreNullValues).
        rate = (answered or 0.0) + scraper.refused_per_second(WINDOW_SECONDS, now)
        if rate > 0:
            self._active_at = now
        current = view.fleet.replicas
        if self.limits.min_replicas == 0 and now % POLLING_SECONDS == 0:
            if current == 0:
                return 1 if rate > 0 else None
            if now - self._active_at >= COOLDOWN_SECONDS:
                return 0
        if current == 0:
            return None
        return max(1, self.settle(view, by_total(rate, self.threshold, current)))
