"""Our own library, fed as the operator feeds it."""

from __future__ import annotations

from penstock_operator.scaling.decide import (
    Decision,
    Idle,
    Measurement,
    Metrics,
    Observation,
    ScalingSettings,
    Service,
    Started,
    State,
    Unknown,
    Value,
    decide,
)
from penstock_simulator.policies.base import View


class Ours:
    """`decide`, every few seconds, on what was scraped."""

    def __init__(
        self, settings: ScalingSettings, service: Service, *, interval: int, fast_seconds: float, slow_seconds: float
    ) -> None:
        self.interval = interval
        self.settings = settings
        self.service = service
        self.fast = fast_seconds
        self.slow = slow_seconds
        self.state = State()
        self.decisions: list[tuple[float, Decision]] = []
        """Those that changed the number, with their times."""

    def decide(self, view: View) -> int | None:
        """The library's answer; State goes through JSON as it does in the endpoint's status."""
        fleet = view.fleet
        # As the API server tells it of each pod, in whole seconds.
        started = tuple(
            Started(at=pod.ready_at, seconds=pod.ready_at - pod.created)
            for pod in fleet.pods
            if pod.ready_at <= view.now and pod.removed_at is None
        )
        seen = Observation(fleet.replicas, fleet.ready, self.metrics(view), started=started)
        decision, self.state = decide(self.settings, self.service, seen, self.state, view.now)
        if decision.replicas != fleet.replicas:
            self.decisions.append((view.now, decision))
        return decision.replicas

    def metrics(self, view: View) -> Metrics:
        """What the operator's queries would give."""
        scraper, now = view.scraper, view.now
        slow = scraper.bucket_rates(self.slow, now)
        in_flight = scraper.in_flight_total()
        total = 0.0 if slow is None else float(slow.sum())
        p95 = None if slow is None else scraper.quantile(slow, 0.95)
        good = None if slow is None else scraper.good_share(slow)
        quiet: Measurement = Idle() if slow is not None and total == 0 else Unknown("no samples yet")
        last = scraper.last
        ready = max(1, view.fleet.ready)
        return Metrics(
            arrivals_fast=self._arrivals(view, self.fast),
            arrivals_slow=self._arrivals(view, self.slow),
            in_flight=Unknown("not scraped yet") if in_flight is None else Value(in_flight),
            good_share=quiet if good is None else Value(good),
            p95_milliseconds=quiet if p95 is None else Value(p95 * 1000),
            coverage=0.0 if last is None else min(1.0, len(last.pods) / ready),
            # What the samples in the window span, which is what chance goes by.
            fast_seconds=self.fast // self.interval * self.interval,
            slow_seconds=self.slow,
        )

    def _arrivals(self, view: View, window: float) -> Measurement:
        scraper, now = view.scraper, view.now
        answered = scraper.answers_per_second(window, now)
        if answered is None:
            return Unknown("fewer than two samples in the window")
        rate = answered + scraper.refused_per_second(window, now) + scraper.in_flight_growth(window, now)
        return Value(max(0.0, rate)) if rate > 0 else Idle()
