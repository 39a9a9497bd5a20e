"""The decision: replicas for the demand, limited by the recent past, with the observed p95 as a guard. Pure.

`decide` maps settings, capacity, observation and state to a number with a reason, and the next state
(docs/explanation/autoscaling.md). No clock and no IO: time is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock_operator.decide import memory
from penstock_operator.decide.decision import Cause, Decision, DecisionCondition, Observation
from penstock_operator.decide.demand import (
    Capacity,
    Demand,
    demand_of,
    proven,
    rate_to_keep,
    rate_to_plan,
    with_reserve,
)
from penstock_operator.decide.explain import explain, number
from penstock_operator.decide.measurement import Metrics, Unknown, Value, known
from penstock_operator.decide.memory import State
from penstock_operator.decide.service import Service
from penstock_operator.decide.settings import ScalingSettings, WhenMissing

ROUNDING = 1e-6
"""Replicas: a smaller excess over a whole number is a rounding error."""
EXCUSED_SLOWDOWN = 1.1
"""A slow-down up to this changes nothing: a p95 from a histogram's buckets is no more exact."""
CALM_SECONDS = 10.0
"""A backlog that has been gone for this long does not come back without new demand."""
FALLING_WINDOW = 0.5
"""Share of the shrink window while the load is falling and no scale-down was too early lately."""
UNEXPECTED = 1.15
"""An observed p95 that is higher than the predicted one by this factor forbids a scale-down."""


def decide(
    settings: ScalingSettings, service: Service | None, seen: Observation, state: State, now: float
) -> tuple[Decision, State]:
    """The replicas to request at `now` (seconds since the epoch), and the next state.

    `service` None: the capacity of a replica is unknown (yet); the number then changes only within its bounds, and
    between zero and one.
    """
    state = memory.with_shorter_window(memory.reset_after_gap(state, settings, now), now)
    if seen.replicas != state.replicas:
        state = state.model_copy(update={"unsettled_at": now})
    state = memory.with_start_ups(state, seen.started, now)
    if service is not None and service.texts is not None:
        # A reading that is missing does not change what comes.
        factor = service.texts.factor(seen.metrics.tokens_per_request)
        state = state.model_copy(update={"texts": state.texts if factor is None else factor})
        service = service.for_texts(state.texts)
    inputs = _inputs(settings, service, seen, state, now)
    choice, state = _choose(inputs, state)
    state = _after_choice(inputs, state, choice)
    decision = inputs.decision(choice, state)
    return (decision, state) if settings.min_replicas > 0 else _around_zero(inputs, decision, state)


def replicas_for_load(service: Service, rate: float, headroom: float) -> int:
    """The replicas that `decide` requests at a steady load (requests/s) without bounds; at least one for any load."""
    return max(_whole_replicas(service, with_reserve(rate, headroom, service.capacity()), 1.0), 1 if rate > 0 else 0)


def _whole_replicas(service: Service, rate: float, slowdown: float) -> int:
    return math.ceil(service.replicas_for(rate, slowdown=slowdown) - ROUNDING)


@dataclass(frozen=True, slots=True)
class _Choice:
    replicas: int
    cause: Cause
    detail: str = ""
    """A clause for the sentence."""
    wanted: int | None = None
    precaution: bool = False
    """The removed replicas were never needed: scaling up again does not make the shrink window longer."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What all steps of one decision need."""

    settings: ScalingSettings
    service: Service | None
    seen: Observation
    now: float
    slowdown: float
    """As remembered: an observation counts from the next decision on, so that load never lowers a number."""
    start_up_seconds: float
    demand: Demand | None

    def replicas_for(self, rate: float, *, backlog: float = 0.0) -> int:
        """Replicas that take `rate` (requests/s, reserve included) and work off a backlog (requests)."""
        assert self.service is not None  # noqa: S101 - called with a known service only
        rate += backlog / self.settings.drain_seconds
        replicas = _whole_replicas(self.service, rate, self.slowdown)
        if replicas <= 1 and self.seen.metrics.quiet:
            return 0  # the averages take minutes to decay, and would keep the last replica for as long
        return max(replicas, 1 if rate > 0 else 0)

    def replicas_to_keep(self, rate: float, *, backlog: float = 0.0) -> int:
        """Replicas that a scale-down leaves for a demand (requests/s) and a backlog (requests)."""
        assert self.service is not None and self.demand is not None  # noqa: S101, PT018 - checked by the caller
        rate = rate_to_keep(rate, self.demand, self.settings.headroom, self.service.capacity(self.slowdown))
        return self.replicas_for(rate, backlog=backlog)

    def rate_to_plan(self, demand: Demand) -> float:
        """Requests/s that replicas should take for the forecast, reserve included."""
        assert self.service is not None  # noqa: S101 - checked by the caller
        capacity = self.service.capacity(self.slowdown)
        return rate_to_plan(demand.planned, demand.forecast, self.settings.headroom, capacity)

    def wanted(self) -> int:
        """Replicas for the forecast demand and the backlog."""
        assert self.service is not None and self.demand is not None  # noqa: S101, PT018 - checked by the caller
        return self.replicas_for(self.rate_to_plan(self.demand), backlog=self.demand.backlog)

    def needed_now(self) -> int:
        """Replicas for the present demand, without forecast and backlog; 0: it is not known."""
        if self.service is None or self.demand is None:
            return 0
        return self.replicas_for(
            with_reserve(self.demand.now, self.settings.headroom, self.service.capacity(self.slowdown))
        )

    def predicted_p95(self) -> float | None:
        """p95 in milliseconds by the curve at the current demand and replicas."""
        slow = known(self.seen.metrics.arrivals_slow)
        if self.service is None or slow is None or self.seen.ready == 0:
            return None
        return self.service.p95_of(slow * self.seen.metrics.scale, self.seen.ready)

    def capacity_of_each(self, replicas: int) -> float | None:
        """Requests/s that each of this many replicas takes within the objective."""
        if self.service is None:
            return None
        return self.service.total(max(replicas, 1), slowdown=self.slowdown) / max(replicas, 1)

    def decision(self, choice: _Choice, state: State) -> Decision:
        """The decision with its sentence and conditions."""
        decision = Decision(
            replicas=choice.replicas,
            cause=choice.cause,
            reason="",
            wanted=choice.wanted,
            demand=self.demand,
            capacity=self.capacity_of_each(choice.replicas),
            slowdown=state.slowdown,
            predicted_p95_milliseconds=self.predicted_p95(),
            metrics_available=_metrics_available(self.seen.metrics, state, self.settings, self.now),
            curve_current=_curve_current(self.service, state, self.settings),
        )
        sentence = explain(decision, self.seen, self.settings, self.service, detail=choice.detail)
        return replace(decision, reason=sentence)


def _inputs(settings: ScalingSettings, service: Service | None, seen: Observation, state: State, now: float) -> _Inputs:
    slowdown = max(1.0, state.slowdown / EXCUSED_SLOWDOWN)
    start_up_seconds = memory.expected_start_up_seconds(state.started, settings.start_up_seconds)
    demand = None
    if service is not None:
        capacity = Capacity(
            one=service.capacity(slowdown),
            requested=service.total(max(seen.replicas, 1), slowdown=slowdown),
            in_flight_seconds=service.longest_in_flight_seconds,
            start_up_seconds=start_up_seconds,
        )
        demand = demand_of(seen.metrics, settings, capacity, state, now)
    return _Inputs(settings, service, seen, now, slowdown, start_up_seconds, demand)


def _choose(inputs: _Inputs, state: State) -> tuple[_Choice, State]:
    """The number, and the state updated with the observation."""
    settings, seen, now = inputs.settings, inputs.seen, inputs.now
    allowed = settings.clamp(seen.replicas)
    if inputs.service is None:
        return _Choice(allowed, Cause.NO_CURVE), state
    if inputs.demand is None:
        return _without_metrics(inputs, state)
    if state.unknown_since is not None:
        if now - state.unknown_since >= settings.unknown_seconds:
            until = now + memory.window_seconds(state, settings)
            state = memory.with_hold(state, until, "metrics have just come back")
        state = state.model_copy(update={"unknown_since": None})

    wanted = inputs.wanted()
    state = _after_observation(inputs, state, inputs.demand, inputs.service, wanted)
    # Once no requests come any more, one more replica would not help those that were answered late.
    guard = wanted <= seen.replicas and not seen.metrics.quiet and memory.guard_is_due(state, settings, now)
    target = seen.replicas + 1 if guard else wanted
    if allowed != seen.replicas:
        return _Choice(allowed, Cause.BOUNDS, wanted=wanted), state
    if target > seen.replicas:
        step = max(math.floor(seen.replicas * settings.grow_factor), seen.replicas + settings.grow_least)
        replicas = settings.clamp(min(target, step))
        if replicas > seen.replicas:
            cause = Cause.GUARD if guard else Cause.DEMAND
            return _Choice(replicas, cause, wanted=wanted), state
        return _Choice(replicas, Cause.MAXIMUM, wanted=wanted), state
    return _same_or_fewer(inputs, state, inputs.demand, inputs.service, wanted), state


def _after_observation(inputs: _Inputs, state: State, demand: Demand, service: Service, wanted: int) -> State:
    """The state with the averages, the peak, the hold, the slow-down and the late answers updated."""
    settings, seen, now = inputs.settings, inputs.seen, inputs.now
    fast = known(seen.metrics.arrivals_fast)
    rate = demand.now if fast is None else proven(fast * seen.metrics.scale, seen.metrics.fast_seconds)
    calm = demand.surge is None and demand.backlog < 1 and rate < service.total(seen.ready)
    since = now if state.calm_since is None else state.calm_since
    state = state.model_copy(update={"calm_since": since if calm else None})
    if seen.ready and rate >= service.total(seen.ready):
        # By the curve as measured: the slow-down of a replica that is taken to be slow is still observed.
        state = state.model_copy(update={"unsettled_at": now})
    # The forecast of a surge is a precaution, and its replicas are removed again; a slow rise is expected.
    rising = demand.surge is None and demand.forecast > demand.now
    keep = inputs.replicas_to_keep(max(demand.to_keep, demand.planned) if rising else demand.to_keep)
    if rising:
        # Replicas requested for a rise stay for a window, even if the rise was noise.
        keep = max(keep, inputs.replicas_for(inputs.rate_to_plan(demand)))
    if settings.strict_window:
        keep = max(keep, wanted)
    state = memory.with_peak(state, settings, now, keep)
    if not seen.rolling_out and seen.ready == seen.replicas:
        state = memory.with_slowdown(state, settings, service, seen.metrics, replicas=seen.ready, now=now)
        state = memory.with_late_since(state, settings, seen.metrics, now)
    return state.model_copy(update={"level": demand.now, "base": demand.base, "surge": demand.surge})


def _without_metrics(inputs: _Inputs, state: State) -> tuple[_Choice, State]:
    settings, now = inputs.settings, inputs.now
    since = now if state.unknown_since is None else state.unknown_since
    state = state.model_copy(update={"unknown_since": since, "late_since": None})
    allowed = settings.clamp(inputs.seen.replicas)
    fallback = settings.fallback_replicas
    falls_back = settings.when_metrics_missing is WhenMissing.FALLBACK and now - since >= settings.unknown_seconds
    if falls_back and fallback is not None and settings.clamp(fallback) > allowed:
        return _Choice(settings.clamp(fallback), Cause.FALLBACK), state
    return _Choice(allowed, Cause.UNKNOWN), state


def _same_or_fewer(inputs: _Inputs, state: State, demand: Demand, service: Service, wanted: int) -> _Choice:
    """The same number of replicas, or fewer."""
    settings, seen, now = inputs.settings, inputs.seen, inputs.now
    replicas = seen.replicas
    window = memory.window_seconds(state, settings)
    if demand.falling and state.window_factor == 1 and not settings.strict_window:
        window *= FALLING_WINDOW
    highest = memory.highest_peak(state, since=now - window)
    lowest = settings.clamp(max(highest, wanted))
    if lowest >= replicas:
        if settings.clamp(state.peaks[-1].replicas) < replicas and wanted < replicas:
            detail = f"{highest} were wanted within the last {window:.0f} s"
            return _Choice(replicas, Cause.WINDOW, detail, wanted=wanted)
        return _Choice(replicas, Cause.DEMAND, wanted=wanted)
    waiting = state.shrunk_at is not None and now - state.shrunk_at < settings.shrink_interval_seconds
    surplus = max(lowest, _replicas_in_use(inputs, demand, service))
    # Replicas that have not started may have been requested by the previous leader, for a reason not known here.
    sure = memory.observed_for_a_window(state, settings, now) and not _unknown_metric(seen.metrics, settings)
    if surplus < replicas and sure and not waiting and not seen.rolling_out:
        return _Choice(surplus, Cause.DEMAND, wanted=wanted)
    if sure and not seen.rolling_out and _was_precaution(inputs, state):
        return _Choice(lowest, Cause.DEMAND, wanted=wanted, precaution=True)
    blocked = _blocked(inputs, state)
    if blocked:
        return _Choice(replicas, Cause.HELD, blocked, wanted=wanted)
    if waiting:
        reason = f"one step down in {settings.shrink_interval_seconds:.0f} s"
        return _Choice(replicas, Cause.HELD, reason, wanted=wanted)
    step = max(1, math.floor(replicas * settings.shrink_share))
    return _Choice(max(lowest, replicas - step), Cause.DEMAND, wanted=wanted)


def _replicas_in_use(inputs: _Inputs, demand: Demand, service: Service) -> int:
    """Replicas that stay in any case: those that have started, and those needed once a surge has levelled off.

    The rest has not served a request yet, and can be removed at once. Until they have started, the backlog still grows
    by what exceeds the saturation of those that have; about half of the start-up time remains on average.
    """
    seen = inputs.seen
    if demand.surge is not None:
        return seen.replicas
    excess = max(0.0, demand.now - seen.ready * service.saturation) * inputs.start_up_seconds / 2
    needed = inputs.replicas_to_keep(demand.now, backlog=demand.backlog + excess)
    return max(min(seen.ready, seen.replicas), needed)


def _was_precaution(inputs: _Inputs, state: State) -> bool:
    """Whether replicas beyond the highest peak of the window were for a backlog or the forecast of a surge, now over.

    They were requested within the window, and no demand in it needed them. Once there is no backlog, late answers are
    older than that, and the p95 of two minutes still contains them.
    """
    if state.grown_at is None or state.calm_since is None:
        return False
    recent = inputs.now - state.grown_at < memory.window_seconds(state, inputs.settings)
    return recent and inputs.now - state.calm_since >= CALM_SECONDS


def _blocked(inputs: _Inputs, state: State) -> str:
    """Why a scale-down is forbidden now, as a clause; empty if it is allowed."""
    settings, seen, now = inputs.settings, inputs.seen, inputs.now
    metrics = seen.metrics
    if seen.rolling_out:
        return "a new plan is being rolled out"
    if now < state.hold_until:
        return f"{state.hold_reason}, for another {state.hold_until - now:.0f} s"
    unknown = _unknown_metric(metrics, settings)
    if unknown:
        return unknown
    if metrics.quiet and memory.highest_peak(state) == 0:
        return ""  # no request came for a window: the latency of the last ones does not matter
    if memory.is_late(metrics.good_share, settings):
        return f"{1 - (known(metrics.good_share) or 0):.1%} of the answers were late"
    p95, predicted, service = metrics.p95_milliseconds, inputs.predicted_p95(), inputs.service
    if isinstance(p95, Value) and predicted is not None and service is not None and service.within_objective:
        limit = max(service.p95_objective_milliseconds * settings.shrink_p95_share, predicted * UNEXPECTED)
        if p95.value > limit:
            return f"p95 is {p95.value:.3g} ms, over {limit:.3g}"
    return ""


def _unknown_metric(metrics: Metrics, settings: ScalingSettings) -> str:
    """The first metric that is unknown, as a clause; empty if all are known."""
    for measurement in (
        metrics.arrivals_fast,
        metrics.arrivals_slow,
        metrics.in_flight,
        metrics.good_share,
        metrics.p95_milliseconds,
    ):
        if isinstance(measurement, Unknown):
            return measurement.reason
    if metrics.coverage < settings.coverage_least:
        return f"only {metrics.coverage:.0%} of the ready replicas were scraped"
    return ""


def _after_choice(inputs: _Inputs, state: State, choice: _Choice) -> State:
    settings, now, before = inputs.settings, inputs.now, inputs.seen.replicas
    if choice.replicas > before:
        state = memory.scaled_up(state, settings, now, above=before, needed=inputs.needed_now())
        if choice.cause is Cause.GUARD:
            # No rate requires this replica, so the window would not contain it.
            state = memory.with_peak(state, settings, now, choice.replicas)
    elif choice.replicas < before:
        served = choice.replicas < inputs.seen.ready and not choice.precaution
        state = memory.scaled_down(state, now, below=before, served=served)
    return state.model_copy(update={"at": now, "replicas": choice.replicas})


# Zero replicas: down only while it is proven that no request comes, up as soon as one waits. Neither needs a capacity
# curve, so that an endpoint without one goes to zero and comes back as well.


def _around_zero(inputs: _Inputs, decision: Decision, state: State) -> tuple[Decision, State]:
    """The decision where `min_replicas` is 0, with the steps from one replica to zero and back."""
    settings, seen, now = inputs.settings, inputs.seen, inputs.now
    waiting = known(seen.metrics.in_flight) or 0.0
    if seen.replicas == 0:
        return _from_zero(inputs, decision, state, waiting)
    if inputs.service is None:
        state = memory.with_peak(state, settings, now, 0 if seen.metrics.quiet else seen.replicas)
        idle = memory.observed_for_a_window(state, settings, now) and memory.highest_peak(state) == 0
        if not idle or seen.rolling_out or now < state.hold_until:
            return decision, state
        window = memory.window_seconds(state, settings)
        reason = f"0 replicas, down from {seen.replicas}: no request came for {window:.0f} s"
        state = memory.scaled_down(state, now, below=seen.replicas, served=True)
        return _instead(decision, state, 0, Cause.IDLE, reason)
    if decision.replicas == 0 and not seen.metrics.quiet:
        why = f"{number(waiting)} requests are under way" if waiting else "it is not known whether requests come"
        return _instead(decision, state, 1, Cause.HELD, f"1 replica: none would do, but {why}")
    return decision, state


def _from_zero(inputs: _Inputs, decision: Decision, state: State, waiting: float) -> tuple[Decision, State]:
    """The first replica: for a waiting request at once, without the two readings that a rate takes."""
    settings, now = inputs.settings, inputs.now
    if not waiting and decision.replicas == 0:
        return decision, state
    # Often no other request follows: the shrink window starts with this one.
    state = memory.with_peak(state, settings, now, max(1, decision.replicas))
    if decision.replicas > 0:
        return decision, state
    verb = "request waits" if waiting == 1 else "requests wait"
    reason = f"1 replica, up from 0: {number(waiting)} {verb} at the gateway"
    return _instead(decision, memory.scaled_up(state, settings, now, above=0), 1, Cause.WOKEN, reason)


def _instead(decision: Decision, state: State, replicas: int, cause: Cause, reason: str) -> tuple[Decision, State]:
    decided = replace(decision, replicas=replicas, cause=cause, reason=reason)
    return decided, state.model_copy(update={"replicas": replicas})


def _metrics_available(metrics: Metrics, state: State, settings: ScalingSettings, now: float) -> DecisionCondition:
    since = state.unknown_since
    reasons = [m.reason for m in (metrics.arrivals_fast, metrics.in_flight) if isinstance(m, Unknown)]
    if since is not None and now - since >= settings.unknown_seconds:
        message = (
            f"{reasons[0] if reasons else 'metrics are missing'} for {now - since:.0f} s: replicas stay as they are"
        )
        return DecisionCondition(status=False, reason="MetricsMissing", message=message)
    if metrics.coverage < settings.coverage_least and since is None:
        message = f"{metrics.coverage:.0%} of the ready replicas were scraped: no shrinking until the others are"
        return DecisionCondition(status=False, reason="PartialScrape", message=message)
    return DecisionCondition(status=True, reason="Scraped", message="rates and requests in flight are known")


def _curve_current(service: Service | None, state: State, settings: ScalingSettings) -> DecisionCondition:
    if service is None:
        return DecisionCondition(status=False, reason="NoCurve", message="no capacity was measured")
    if state.slowdown >= settings.stale_slowdown:
        message = (
            f"replicas are {state.slowdown:.2f} times slower than their measured curve: other lengths of texts, other "
            "neighbours or another processor than measured; optimise again to measure it"
        )
        return DecisionCondition(status=False, reason="SlowerThanMeasured", message=message)
    message = f"observed p95 fits the measured curve (slow-down {state.slowdown:.2f})"
    return DecisionCondition(status=True, reason="AsMeasured", message=message)
