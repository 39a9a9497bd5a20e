"""Knative's KPA on concurrency, as `pkg/autoscaler/scaling/autoscaler.go` has it, with its default configuration.

Every 2 s; stable window 60 s, panic window 6 s, panic from twice the ready pods' worth on; up by at most 1000 times,
down by at most half. Its metric comes from queue proxies each second and so knows nothing of scrape intervals.

Sources: knative.dev, "Configuring the autoscaler"; knative/serving config/core/configmaps/autoscaler.yaml (defaults)
and pkg/autoscaler/scaling/autoscaler.go, `Scale`.
"""

from __future__ import annotations

import math

from penstock_simulator.policies.base import Limits, View

STABLE_SECONDS, PANIC_SECONDS = 60, 6
PANIC_THRESHOLD = 2.0
MOST_UP, MOST_DOWN = 1000.0, 2.0


class Kpa:
    """Concurrency over a target per replica."""

    interval = 2

    def __init__(self, limits: Limits, *, target: float) -> None:
        self.limits = limits
        self.target = target
        self._panic_at: float | None = None
        self._panic_pods = 0

    def decide(self, view: View) -> int | None:
        """The stable number, or in panic the highest one since it began."""
        if not view.concurrency:
            return None
        ready = max(1, view.fleet.ready)
        stable = self._pods(view, STABLE_SECONDS)
        panic = self._pods(view, PANIC_SECONDS)
        most, least = math.ceil(MOST_UP * ready), math.floor(ready / MOST_DOWN)
        desired = min(max(stable, least), most)
        desired_panic = min(max(panic, least), most)
        if panic / ready >= PANIC_THRESHOLD:
            self._panic_at = view.now
        elif self._panic_at is not None and self._panic_at + STABLE_SECONDS < view.now:
            self._panic_at, self._panic_pods = None, 0
        if self._panic_at is not None:
            self._panic_pods = max(self._panic_pods, desired, desired_panic)
            desired = self._panic_pods
        return self.limits.clamp(desired)

    def _pods(self, view: View, seconds: int) -> int:
        recent = view.concurrency[-seconds:]
        return math.ceil(sum(recent) / len(recent) / self.target)
