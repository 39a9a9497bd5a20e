"""Decides the number of replicas from demand, measured capacity, past decisions and p95.

docs/explanation/autoscaling.md describes the rules.

Pure: no clock, no IO. `decide` maps settings, capacity, what is seen and what is remembered to a number and a sentence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from penstock_operator.scaling.decide import correction, memory, start_up
from penstock_operator.scaling.decide.decision import Cause, Condition, Decision, Observation
from penstock_operator.scaling.decide.demand import Demand, demand_of, proven
from penstock_operator.scaling.decide.explain import explain
from penstock_operator.scaling.decide.measurement import Metrics, Unknown, Value, known
from penstock_operator.scaling.decide.noise import AVERAGED, STEADY, UNSEEN, deviation
from penstock_operator.scaling.decide.reserve import planned, without_reserve
from penstock_operator.scaling.decide.service import Service
from penstock_operator.scaling.decide.settings import ScalingSettings, WhenMissing
from penstock_operator.scaling.decide.state import State

ROUNDING = 1e-6
"""Replicas: less than this over a whole number is arithmetic and not demand."""
EXCUSED = 1.1
"""A slow-down up to this changes nothing: a p95 out of a histogram's buckets is no more exact."""
CALM_SECONDS = 10.0
"""A backlog that is gone for so long does not come back by itself."""
FALLING_WINDOW = 0.5
"""Of the shrink window, while the load is falling and no shrink had to be taken back lately."""
UNEXPECTED = 1.15
"""An observed p95 over the predicted one by this factor is worth a doubt."""


def decide(
    settings: ScalingSettings, service: Service | None, seen: Observation, state: State, now: float
) -> tuple[Decision, State]:
    """How many replicas to ask for at `now` (seconds since the epoch), and what to remember.

    `service` None: the capacity of a replica is not known (yet), and the number stays as it is within its bounds.
    """
    state = memory.forgiven(memory.recalled(state, settings, now), now)
    if seen.replicas != state.replicas:
        state = state.model_copy(update={"unsettled_at": now})
    state = state.model_copy(update={"started": start_up.observed(state.started, seen.started, now)})
    facts = _Facts(settings, service, seen, state, now)
    if service is not None:
        total, one = service.total(max(seen.replicas, 1), slowdown=facts.slowdown), service.capacity(facts.slowdown)
        facts.demand = demand_of(
            seen.metrics,
            settings,
            state,
            now,
            objective_seconds=service.p95_objective_milliseconds / 1000,
            capacity=total,
            started=service.total(max(min(seen.ready, seen.replicas), 1), slowdown=facts.slowdown),
            planned=without_reserve(total, settings.headroom, one),
            start_up_seconds=facts.start_up_seconds,
        )
    choice, state = _choose(facts, state)
    state = _remember(facts, state, choice, seen.replicas)
    return facts.decision(choice, state), state


@dataclass(frozen=True, slots=True)
class _Choice:
    replicas: int
    cause: Cause
    detail: str = ""
    wanted: int | None = None
    precaution: bool = False
    """What is given back was never needed: to grow again is no regret."""


class _Facts:
    """What all steps of one decision share."""

    def __init__(
        self, settings: ScalingSettings, service: Service | None, seen: Observation, state: State, now: float
    ) -> None:
        self.settings = settings
        self.service = service
        self.seen = seen
        self.now = now
        self.demand: Demand | None = None
        self.slowdown = max(1.0, state.slowdown / EXCUSED)
        """As remembered: what is observed now counts from the next decision on, so that load never lowers a number."""
        self.start_up_seconds = start_up.expected_seconds(state.started, settings.start_up_seconds)

    def kept(self, demand: float, *, backlog: float = 0.0) -> int:
        """Replicas that stay for a demand: a little more than would be asked for, unless it is falling."""
        known = self.demand
        if known is not None and known.falling:
            return self.needed(demand, demand, backlog=backlog)
        least = self.settings.shrink_margin * demand
        if known is None or not known.standing:
            noise = STEADY * deviation(demand, UNSEEN if known is None else known.unrest)
            high = demand + max(noise, least)
            return self.needed(high, high, backlog=backlog)
        # As it will be asked for: the whole reserve for the longer average, its rest for what noise adds.
        noise = STEADY * deviation(demand, known.lasting)
        return self.needed(demand + max(AVERAGED * noise, least), demand + noise, backlog=backlog)

    def needed(self, mean: float, highest: float, *, backlog: float = 0.0) -> int:
        """Replicas for a demand with the reserve of the headroom, and at full capacity for the backlog.

        For `mean` with the whole reserve, for what noise makes of it with the rest.
        """
        assert self.service is not None  # noqa: S101 - called with a known service only
        rate = planned(mean, highest, self.settings.headroom, self.service.capacity(self.slowdown))
        rate += backlog / self.settings.drain_seconds
        replicas = math.ceil(self.service.replicas_for(rate, slowdown=self.slowdown) - ROUNDING)
        if replicas <= 1 and self.seen.metrics.quiet:
            return 0  # what is left of an average takes minutes to fade, and would keep the last replica that long
        return max(replicas, 1 if rate > 0 else 0)

    def predicted(self) -> float | None:
        """p95 in milliseconds by the curve at the demand and replicas of now."""
        slow = known(self.seen.metrics.arrivals_slow)
        if self.service is None or slow is None or self.seen.ready == 0:
            return None
        return self.service.p95_of(slow * self.seen.metrics.scale, self.seen.ready)

    def each(self, replicas: int) -> float | None:
        """Requests/s that each of so many replicas takes within the objective."""
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
            capacity=self.each(choice.replicas),
            slowdown=state.slowdown,
            predicted_p95_milliseconds=self.predicted(),
            metrics_available=_metrics_available(self.seen.metrics, state, self.settings, self.now),
            curve_current=_curve_current(self.service, state, self.settings),
        )
        sentence = explain(decision, self.seen, self.settings, self.service, detail=choice.detail)
        return replace(decision, reason=sentence)


def _choose(facts: _Facts, state: State) -> tuple[_Choice, State]:
    """The number, and the state with what the choice itself makes known."""
    settings, seen, now = facts.settings, facts.seen, facts.now
    allowed = settings.clamp(seen.replicas)
    if facts.service is None:
        return _Choice(allowed, Cause.NO_CURVE), state
    if facts.demand is None:
        return _without_metrics(facts, state)
    if state.unknown_since is not None:
        if now - state.unknown_since >= settings.unknown_seconds:
            until = now + memory.window_seconds(state, settings)
            state = memory.held(state, until, "metrics have just come back")
        state = state.model_copy(update={"unknown_since": None})

    wanted = facts.needed(facts.demand.mean, facts.demand.forecast, backlog=facts.demand.backlog)
    state = _keep_books(facts, state, facts.demand, wanted)
    # A replica for those who were answered late is of no use to anybody when nobody asks any more.
    guard = wanted <= seen.replicas and not seen.metrics.quiet and correction.guard_acts(state, settings, now)
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
    return _shrink(facts, state, wanted), state


def _keep_books(facts: _Facts, state: State, demand: Demand, wanted: int) -> State:
    """What every known demand leaves behind: peaks, panic, the correction and the guard's clock."""
    settings, seen, now = facts.settings, facts.seen, facts.now
    assert facts.service is not None  # noqa: S101 - the caller has seen to it
    fast = known(seen.metrics.arrivals_fast)
    rate = demand.now if fast is None else proven(fast * seen.metrics.scale, seen.metrics.fast_seconds)
    if seen.ready and rate >= facts.service.total(seen.ready, slowdown=facts.slowdown):
        until = now + settings.panic_hold_seconds
        state = memory.held(state, until, "demand has just been over the capacity of the replicas there are")
    calm = demand.surge is None and demand.backlog < 1 and rate < facts.service.total(seen.ready)
    since = now if state.calm_since is None else state.calm_since
    state = state.model_copy(update={"calm_since": since if calm else None})
    if seen.ready and rate >= facts.service.total(seen.ready):
        # By the curve as it was measured: a replica that is believed to be slow goes on being observed.
        state = state.model_copy(update={"unsettled_at": now})
    # A surge's line is a precaution, and is given back; a slow rise is expected.
    rising = demand.surge is None and demand.forecast > demand.now
    keep = facts.kept(max(demand.staying, demand.mean) if rising else demand.staying)
    if rising:
        # What a rise was grown for stays for a window, whether or not it turns out to be noise.
        keep = max(keep, facts.needed(demand.mean, demand.forecast))
    if settings.strict_window:
        keep = max(keep, wanted)
    state = memory.with_peak(state, settings, now, keep)
    if not seen.rolling_out and seen.ready == seen.replicas:
        state = correction.corrected(state, settings, facts.service, seen.metrics, replicas=seen.ready, now=now)
        state = correction.watched(state, settings, seen.metrics, now)
    averages = {"level": demand.now, "base": demand.base, "twice": demand.twice, "thrice": demand.thrice}
    noise = {"unrest": demand.unrest, "lasting": demand.lasting}
    return state.model_copy(update={**averages, **noise, "surge": demand.surge})


def _without_metrics(facts: _Facts, state: State) -> tuple[_Choice, State]:
    settings, seen, now = facts.settings, facts.seen, facts.now
    since = now if state.unknown_since is None else state.unknown_since
    state = state.model_copy(update={"unknown_since": since, "late_since": None})
    long = now - since >= settings.unknown_seconds
    fallback = settings.fallback_replicas
    allowed = settings.clamp(seen.replicas)
    if long and settings.when_metrics_missing is WhenMissing.FALLBACK and fallback is not None:
        replicas = max(allowed, settings.clamp(fallback))
        if replicas > allowed:
            return _Choice(replicas, Cause.FALLBACK), state
    return _Choice(allowed, Cause.UNKNOWN), state


def _shrink(facts: _Facts, state: State, wanted: int) -> _Choice:
    """As it is, or fewer."""
    settings, seen, now = facts.settings, facts.seen, facts.now
    replicas = seen.replicas
    window = memory.window_seconds(state, settings)
    falling = facts.demand is not None and facts.demand.falling and state.window_factor == 1
    if falling and not settings.strict_window:
        window *= FALLING_WINDOW
    highest = memory.highest(state, since=now - window)
    lowest = settings.clamp(max(highest, wanted))
    if lowest >= replicas:
        if settings.clamp(state.peaks[-1].replicas) < replicas and wanted < replicas:
            left = f"{highest} were wanted within the last {window:.0f} s"
            return _Choice(replicas, Cause.WINDOW, left, wanted=wanted)
        return _Choice(replicas, Cause.DEMAND, wanted=wanted)
    waiting = state.shrunk_at is not None and now - state.shrunk_at < settings.shrink_interval_seconds
    surplus = max(lowest, _kept(facts))
    # Who asked for what has not started yet may have been the leader before, and have seen why.
    sure = memory.watched_for_a_window(state, settings, now) and not _blind(seen.metrics, settings)
    if surplus < replicas and sure and not waiting and not seen.rolling_out:
        return _Choice(surplus, Cause.DEMAND, wanted=wanted)
    if sure and not seen.rolling_out and _was_precaution(facts, state):
        return _Choice(lowest, Cause.DEMAND, wanted=wanted, precaution=True)
    forbidden = _forbidden(facts, state)
    if forbidden:
        return _Choice(replicas, Cause.HELD, forbidden, wanted=wanted)
    if waiting:
        reason = f"one step down in {settings.shrink_interval_seconds:.0f} s"
        return _Choice(replicas, Cause.HELD, reason, wanted=wanted)
    step = max(1, math.floor(replicas * settings.shrink_share))
    return _Choice(max(lowest, replicas - step), Cause.DEMAND, wanted=wanted)


def _kept(facts: _Facts) -> int:
    """How many of the replicas stay at any rate: those that have started, and what a surge that has levelled off needs.

    What has not started yet serves nobody, and is given back. Until the rest is there, the backlog goes on growing by
    what exceeds the saturation of those that have started; half of the start-up is still to come, more or less.
    """
    seen, demand = facts.seen, facts.demand
    if demand is None or facts.service is None or demand.surge is not None:
        return seen.replicas
    excess = max(0.0, demand.now - seen.ready * facts.service.saturation) * facts.start_up_seconds / 2
    needed = facts.kept(demand.now, backlog=demand.backlog + excess)
    return max(min(seen.ready, seen.replicas), needed)


def _was_precaution(facts: _Facts, state: State) -> bool:
    """Whether what is over the highest number of the window was never needed by any demand, and has done its work.

    What was asked for within the window and is over every number that was needed during it was for a backlog or a
    surge's line. Once there is no backlog, late answers are of the time before; the p95 of two minutes knows no better.
    """
    if state.grown_at is None or state.calm_since is None:
        return False
    recent = facts.now - state.grown_at < memory.window_seconds(state, facts.settings)
    return recent and facts.now - state.calm_since >= CALM_SECONDS


def _forbidden(facts: _Facts, state: State) -> str:
    """Why not to shrink now, as a clause; empty when nothing forbids it."""
    settings, seen, now = facts.settings, facts.seen, facts.now
    metrics = seen.metrics
    if seen.rolling_out:
        return "a new plan is being rolled out"
    if now < state.hold_until:
        return f"{state.hold_reason}, for another {state.hold_until - now:.0f} s"
    blind = _blind(metrics, settings)
    if blind:
        return blind
    if metrics.quiet and memory.highest(state) == 0:
        return ""  # nobody has asked for a window: how fast the last ones were answered is of no matter
    good = metrics.good_share
    if correction.is_late(good, settings):
        return f"{1 - (known(good) or 0):.1%} of the answers were late"
    p95 = metrics.p95_milliseconds
    predicted = facts.predicted()
    if (
        isinstance(p95, Value)
        and predicted is not None
        and facts.service is not None
        and facts.service.within_objective
    ):
        limit = max(facts.service.p95_objective_milliseconds * settings.shrink_p95_share, predicted * UNEXPECTED)
        if p95.value > limit:
            return f"p95 is {p95.value:.3g} ms, over {limit:.3g}"
    return ""


def _blind(metrics: Metrics, settings: ScalingSettings) -> str:
    """What is not known about the traffic, as a clause; empty when everything is."""
    everything = (
        metrics.arrivals_fast,
        metrics.arrivals_slow,
        metrics.in_flight,
        metrics.good_share,
        metrics.p95_milliseconds,
    )
    for measurement in everything:
        if isinstance(measurement, Unknown):
            return measurement.reason
    if metrics.coverage < settings.coverage_least:
        return f"only {metrics.coverage:.0%} of the ready replicas were scraped"
    return ""


def _remember(facts: _Facts, state: State, choice: _Choice, before: int) -> State:
    if choice.replicas > before:
        state = memory.grown(state, facts.settings, facts.now, above=before)
        if choice.cause is Cause.GUARD:
            # No rate asks for this one: the window has to know of it.
            state = memory.with_peak(state, facts.settings, facts.now, choice.replicas)
    elif choice.replicas < before:
        served = choice.replicas < facts.seen.ready and not choice.precaution
        state = memory.shrunk(state, facts.now, below=before, served=served)
    return state.model_copy(update={"at": facts.now, "replicas": choice.replicas})


def _metrics_available(metrics: Metrics, state: State, settings: ScalingSettings, now: float) -> Condition:
    since = state.unknown_since
    reasons = [m.reason for m in (metrics.arrivals_fast, metrics.in_flight) if isinstance(m, Unknown)]
    if since is not None and now - since >= settings.unknown_seconds:
        message = (
            f"{reasons[0] if reasons else 'metrics are missing'} for {now - since:.0f} s: replicas stay as they are"
        )
        return Condition(status=False, reason="MetricsMissing", message=message)
    if metrics.coverage < settings.coverage_least and since is None:
        message = f"{metrics.coverage:.0%} of the ready replicas were scraped: no shrinking until the others are"
        return Condition(status=False, reason="PartialScrape", message=message)
    return Condition(status=True, reason="Scraped", message="rates and requests in flight are known")


def _curve_current(service: Service | None, state: State, settings: ScalingSettings) -> Condition:
    if service is None:
        return Condition(status=False, reason="NoCurve", message="no capacity was measured: optimise again")
    if state.slowdown >= settings.stale_slowdown:
        message = (
            f"replicas are {state.slowdown:.2f} times slower than their measured curve: other texts, other neighbours "
            "or another processor than measured; optimise again to measure it"
        )
        return Condition(status=False, reason="SlowerThanMeasured", message=message)
    message = f"observed p95 fits the measured curve (slow-down {state.slowdown:.2f})"
    return Condition(status=True, reason="AsMeasured", message=message)
