"""Autoscaling policies: ours, and rivals written from their own documents and sources.

Each policy has one knob that trades replicas for late requests (a target, or headroom); comparisons sweep it.

- HPA: every 15 s; no change within a tolerance of 10 %; down to the highest recommendation of the last 300 s, by any
  number; up at once by at most 100 % or 4 pods in 15 s. Metrics come from Prometheus through an adapter, whose own
  delay is left out, to the rivals' advantage. Sources: kubernetes.io, "Horizontal Pod Autoscaling" (algorithm details,
  default behaviour); kubernetes/kubernetes pkg/controller/podautoscaler/replica_calculator.go,
  `calcPlainMetricReplicas` and `GetExternalMetricReplicas`.
- KEDA: a Prometheus trigger `sum(rate(requests_total[2m]))` with `threshold`, everything else by default. From one
  replica on, the HPA that KEDA makes reads the query's value every 15 s (`AverageValue`); KEDA itself, every 30 s,
  only takes the step between none and one, down after a cool-down of 300 s. So with a rate of 30 s, or of two scrapes
  where those are further apart; and with `sum(requests_in_flight)`. Sources: keda.sh, "Prometheus" scaler and
  "ScaledObject specification"; kedacore/keda pkg/scalers/prometheus_scaler.go, `ExecutePromQuery` (`ignoreNullValues`).
- Knative's KPA on concurrency: every 2 s; stable window 60 s, panic window 6 s, panic from twice the ready pods' worth
  on; up by at most 1000 times, down by at most half. Its metric comes from queue proxies each second, independent of
  scrape intervals. Sources: knative.dev, "Configuring the autoscaler"; knative/serving
  config/core/configmaps/autoscaler.yaml (defaults) and pkg/autoscaler/scaling/autoscaler.go, `Scale`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock_operator.decide import (
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
    in_measured_requests,
)
from penstock_simulator.choices import PolicyKind
from penstock_simulator.fleet import Fleet, ReplicaModel
from penstock_simulator.scraper import Scraper


@dataclass(frozen=True)
class Limits:
    """Settings that all policies share."""

    min_replicas: int = 1
    max_replicas: int = 24

    def clamp(self, replicas: int) -> int:
        """The nearest number that is allowed."""
        return min(max(replicas, self.min_replicas), self.max_replicas)


@dataclass(frozen=True)
class View:
    """The endpoint as its autoscaler may see it."""

    now: float
    fleet: Fleet
    """For the number of replicas and of ready ones, which the API server has at once; not for its traffic."""
    scraper: Scraper
    """Traffic as Prometheus knows it."""
    own: Scraper
    """Traffic as the autoscaler's own scrapes have it; Prometheus' where it makes none."""
    concurrency: Sequence[float]
    """Mean requests in flight of each second so far, which Knative's queue proxies and activator report."""


class Policy(Protocol):
    """Decides every `interval` seconds."""

    interval: int

    def decide(self, view: View) -> int | None:
        """How many replicas to request; None leaves the number."""


TOLERANCE = 0.1
STABILISATION_SECONDS = 300.0
UP_PODS, UP_FACTOR = 4, 2
"""At most 4 pods or 100 % in each period of 15 s, whichever is more; the period is the controller's."""


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


POLLING_SECONDS = 30
COOLDOWN_SECONDS = 300.0
WINDOW_SECONDS = 120.0
LEAST_WINDOW_SECONDS = 30.0


class Keda(Hpa):
    """The sum of a query over a threshold per replica: requests/s of `window` seconds; None: requests in flight."""

    def __init__(self, limits: Limits, *, threshold: float, window: float | None = WINDOW_SECONDS) -> None:
        super().__init__(limits)
        self.threshold = threshold
        self.window = window
        self._active_at = 0.0

    def _load(self, view: View) -> float:
        """The answer to the query. An empty vector is 0 by default (ignoreNullValues)."""
        scraper, now = view.scraper, view.now
        if self.window is None:
            return scraper.in_flight_total() or 0.0
        return (scraper.answers_per_second(self.window, now) or 0.0) + scraper.refused_per_second(self.window, now)

    def decide(self, view: View) -> int | None:
        """KEDA's step at none, the HPA's answer from one on."""
        now, rate = view.now, self._load(view)
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


OWN_SCRAPE_SECONDS = 2
"""The operator's own scrapes: two counters and a gauge of each pod."""
FAST_SECONDS = 1.5 * OWN_SCRAPE_SECONDS
"""Its own scrapes make a rate of any two samples; a query of Prometheus has to survive lost ones."""
SLOW_SECONDS = 120.0


class Ours:
    """`decide`, with the load of the operator's own scrapes; their latency, or Prometheus' as of its last query."""

    interval = OWN_SCRAPE_SECONDS

    def __init__(
        self, settings: ScalingSettings, service: Service, *, latency_interval: int = OWN_SCRAPE_SECONDS
    ) -> None:
        self.settings = settings
        self.service = service
        self._latency_interval = latency_interval
        self._latency: tuple[Measurement, Measurement] = (Unknown("not scraped yet"), Unknown("not scraped yet"))
        self.state = State()
        self.decisions: list[tuple[float, Decision]] = []
        """Those that changed the number, with their times."""

    def decide(self, view: View) -> int | None:
        """The library's answer; State goes through JSON as it does in the endpoint's status."""
        fleet = view.fleet
        # As the API server has it for each pod, in whole seconds.
        started = tuple(
            Started(at=pod.ready_at, seconds=pod.ready_at - pod.created)
            for pod in fleet.pods
            if pod.ready_at <= view.now and pod.removed_at is None
        )
        metrics = in_measured_requests(self.metrics(view), self.service)
        seen = Observation(fleet.replicas, fleet.ready, metrics, started=started)
        decision, self.state = decide(self.settings, self.service, seen, self.state, view.now)
        if decision.replicas != fleet.replicas:
            self.decisions.append((view.now, decision))
        return decision.replicas

    def metrics(self, view: View) -> Metrics:
        """What the operator reads and queries."""
        if view.now % self._latency_interval == 0:
            self._latency = self._queried(view.scraper, view.now)
        good, p95 = self._latency
        in_flight, last = view.own.in_flight_total(), view.own.last
        ready = max(1, view.fleet.ready)
        return Metrics(
            arrivals_fast=self._arrivals(view, FAST_SECONDS),
            arrivals_slow=self._arrivals(view, SLOW_SECONDS),
            in_flight=Unknown("not scraped yet") if in_flight is None else Value(in_flight),
            good_share=good,
            p95_milliseconds=p95,
            coverage=0.0 if last is None else min(1.0, len(last.pods) / ready),
            # The time between the samples in the window, which determines chance.
            fast_seconds=OWN_SCRAPE_SECONDS,
            slow_seconds=SLOW_SECONDS,
        )

    def _queried(self, scraper: Scraper, now: float) -> tuple[Measurement, Measurement]:
        """The share of the answers within the objective, and p95."""
        slow = scraper.bucket_rates(max(SLOW_SECONDS, 4.0 * self._latency_interval), now)
        total = 0.0 if slow is None else float(slow.sum())
        p95 = None if slow is None else scraper.quantile(slow, 0.95)
        good = None if slow is None else scraper.good_share(slow)
        quiet: Measurement = Idle() if slow is not None and total == 0 else Unknown("no samples yet")
        return quiet if good is None else Value(good), quiet if p95 is None else Value(p95 * 1000)

    def _arrivals(self, view: View, window: float) -> Measurement:
        scraper, now = view.own, view.now
        answered = scraper.answers_per_second(window, now)
        if answered is None:
            return Unknown("fewer than two samples in the window")
        rate = answered + scraper.refused_per_second(window, now) + scraper.in_flight_growth(window, now)
        return Value(max(0.0, rate)) if rate > 0 else Idle()


@dataclass(frozen=True)
class Endpoint:
    """What policies may know about the endpoint, and how they are fed."""

    service: Service
    model: ReplicaModel
    limits: Limits
    scrape_interval: int = 5


@dataclass(frozen=True)
class PolicyFacts:
    """A policy for tables and sweeps."""

    title: str
    knob: str
    """Name of the knob, for people."""
    values: tuple[float, ...]
    """Values that a comparison tries, from many replicas to few."""
    make: Callable[[Endpoint, float], Policy]
    uses_prometheus: bool = True
    is_ours: bool = False
    """It reads the pods itself as well."""


HEADROOMS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.82, 0.9)


def _ours(endpoint: Endpoint, headroom: float, latency_interval: int) -> Ours:
    limits = endpoint.limits
    settings = ScalingSettings(
        min_replicas=limits.min_replicas,
        max_replicas=limits.max_replicas,
        headroom=headroom,
    )
    return Ours(settings, endpoint.service, latency_interval=latency_interval)


def _in_flight(endpoint: Endpoint) -> float:
    """Requests in flight on a replica at its limit: Little's law with the mean service time."""
    return endpoint.service.rate * (endpoint.model.mean_service_seconds + endpoint.model.fixed_seconds)


KEDA_THRESHOLDS = (
    0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1,
)  # fmt: skip
POLICIES: dict[PolicyKind, PolicyFacts] = {
    PolicyKind.PENSTOCK: PolicyFacts(
        "Penstock",
        "headroom",
        HEADROOMS,
        lambda endpoint, knob: _ours(endpoint, knob, OWN_SCRAPE_SECONDS),
        uses_prometheus=False,
        is_ours=True,
    ),
    PolicyKind.PENSTOCK_PROMETHEUS: PolicyFacts(
        "Penstock with a Prometheus",
        "headroom",
        HEADROOMS,
        lambda endpoint, knob: _ours(endpoint, knob, endpoint.scrape_interval),
        is_ours=True,
    ),
    PolicyKind.HPA_P95: PolicyFacts(
        "HPA on p95",
        "target p95, share of the objective",
        (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0, 1.15, 1.3, 1.6, 2.0, 2.6),
        lambda endpoint, knob: HpaOnP95(
            endpoint.limits,
            target_seconds=knob * endpoint.service.p95_objective_milliseconds / 1000,
            window_seconds=max(60.0, 4 * endpoint.scrape_interval),
        ),
    ),
    PolicyKind.HPA_IN_FLIGHT: PolicyFacts(
        "HPA on requests in flight",
        "target in flight, share of a replica at its limit",
        (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.78, 0.85, 0.93, 1.0, 1.15, 1.3, 1.5, 1.7, 2.1, 2.5),
        lambda endpoint, knob: HpaOnInFlight(endpoint.limits, target=knob * _in_flight(endpoint)),
    ),
    PolicyKind.KEDA: PolicyFacts(
        "KEDA on the request rate",
        "threshold, share of a replica's rate at its limit",
        KEDA_THRESHOLDS,
        lambda endpoint, knob: Keda(endpoint.limits, threshold=knob * endpoint.service.rate),
    ),
    PolicyKind.KEDA_RECENT: PolicyFacts(
        "KEDA on the latest request rate",
        "threshold, share of a replica's rate at its limit",
        KEDA_THRESHOLDS,
        lambda endpoint, knob: Keda(
            endpoint.limits,
            threshold=knob * endpoint.service.rate,
            window=max(LEAST_WINDOW_SECONDS, 2.0 * endpoint.scrape_interval),
        ),
    ),
    PolicyKind.KEDA_IN_FLIGHT: PolicyFacts(
        "KEDA on requests in flight",
        "threshold, share of a replica at its limit",
        (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.78, 0.85, 0.93, 1.0, 1.15, 1.3, 1.5, 1.7, 2.1, 2.5),
        lambda endpoint, knob: Keda(endpoint.limits, threshold=knob * _in_flight(endpoint), window=None),
    ),
    PolicyKind.KPA: PolicyFacts(
        "Knative KPA",
        "target concurrency, share of a replica at its limit",
        (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.68, 0.75, 0.82, 0.9, 1.05, 1.2, 1.4, 1.6, 2.0, 2.5),
        lambda endpoint, knob: Kpa(endpoint.limits, target=knob * _in_flight(endpoint)),
    ),
}


def make_policy(kind: PolicyKind, endpoint: Endpoint, knob: float) -> Policy:
    """A fresh policy with a value of its knob."""
    if not math.isfinite(knob) or knob <= 0:
        raise ValueError(f"{kind.value}: the knob must be a positive number, not {knob}")
    return POLICIES[kind].make(endpoint, knob)
