"""The sentence that explains a decision with its inputs, such as

3 replicas: 184 requests/s now, 201 forecast in 40 s, over 88 per replica at p95 20 ms with 25 % headroom; p95 observed
14.1 ms, predicted 13.2
"""

from __future__ import annotations

from penstock_operator.decide.decision import Cause, Decision, Observation
from penstock_operator.decide.demand import rate_to_plan
from penstock_operator.decide.measurement import Idle, Unknown, Value
from penstock_operator.decide.service import Service
from penstock_operator.decide.settings import ScalingSettings

WORTH_NAMING = 1.1
"""A factor of the texts' length from this on is in the sentence."""


def explain(
    decision: Decision, seen: Observation, settings: ScalingSettings, service: Service | None, *, detail: str = ""
) -> str:
    """One sentence without a full stop. `detail` is the clause that some causes need."""
    head = _head(decision, seen)
    if decision.cause is Cause.NO_CURVE or service is None:
        return f"{head}: what a replica can take was not measured, so the number stays as it is"
    if decision.demand is None:
        return f"{head}: {_missing(seen)}{_what_then(decision, settings)}"
    parts = [f"{head}: {_load(decision, seen, settings, service)}", *_after(decision, settings, detail)]
    return "; ".join(part for part in (*parts, _p95(decision, seen)) if part)


def _head(decision: Decision, seen: Observation) -> str:
    text = f"{decision.replicas} replica{'' if decision.replicas == 1 else 's'}"
    if decision.replicas > seen.replicas:
        return f"{text}, up from {seen.replicas}"
    return f"{text}, down from {seen.replicas}" if decision.replicas < seen.replicas else text


def _load(decision: Decision, seen: Observation, settings: ScalingSettings, service: Service) -> str:
    demand = decision.demand
    assert demand is not None  # noqa: S101 - checked by the caller
    text = f"{number(demand.now)} requests/s now"
    if service.tokens_per_request is not None:
        text = f"{number(demand.now)} requests/s of {number(service.tokens_per_request)} tokens now"
    if demand.forecast > demand.now * 1.005:
        text += f", {number(demand.forecast)} forecast in {demand.ahead_seconds:.0f} s"
    if demand.backlog >= 1:
        text += f", {number(demand.backlog)} waiting to be worked off in {settings.drain_seconds:.0f} s"
    first = "" if service.tokens_per_request is None else " of the first token"
    objective = f"p95{first} {number(service.p95_objective_milliseconds)} ms"
    at = f"at {objective}" if service.within_objective else f"({objective} is out of reach)"
    # The actual reserve: for a small fleet it may be more than the setting.
    asked = rate_to_plan(demand.planned, demand.forecast, settings.headroom, service.rate)
    spare = 1 - demand.forecast / asked if asked else 1 - settings.headroom
    headroom = f"{spare * 100:.0f} % headroom"
    text += f", over {number(decision.capacity or 0.0)} per replica{_texts(seen, service)} {at} with {headroom}"
    if decision.slowdown >= 1.1:
        text += f" (replicas are {decision.slowdown:.2f} times slower than measured)"
    return text


def _texts(seen: Observation, service: Service) -> str:
    """The length of the texts, where it changes the capacity by a tenth or more."""
    tokens, texts = seen.metrics.tokens_per_request, service.texts
    factor = texts.factor(tokens) if texts is not None else None
    if texts is None or factor is None or not isinstance(tokens, Value) or 1 / WORTH_NAMING < factor < WORTH_NAMING:
        return ""
    return f" (requests of {number(tokens)} tokens, measured with {number(texts.tokens)})"


def _after(decision: Decision, settings: ScalingSettings, detail: str) -> list[str]:
    wanted = decision.wanted
    match decision.cause:
        case Cause.WINDOW | Cause.HELD:
            return [f"{wanted} would do, but {detail}"]
        case Cause.MAXIMUM:
            return [f"{wanted} are wanted, {_limit(settings)}"]
        case Cause.BOUNDS:
            bounds = f"minReplicas is {settings.min_replicas}, {_limit(settings)}"
            return [f"{wanted} are wanted, {bounds}"]
        case Cause.GUARD:
            return ["answers are late although demand is within capacity: one more"]
    return []


def _limit(settings: ScalingSettings) -> str:
    if settings.limited_by_quota:
        return f"the quota of the namespace allows {settings.max_replicas}"
    return f"maxReplicas is {settings.max_replicas}"


def _p95(decision: Decision, seen: Observation) -> str:
    observed = seen.metrics.p95_milliseconds
    if isinstance(observed, Unknown):
        return f"p95 unknown: {observed.reason}"
    if isinstance(observed, Idle):
        return ""
    text = f"p95 observed {number(observed.value)} ms"
    predicted = decision.predicted_p95_milliseconds
    return text if predicted is None else f"{text}, predicted {number(predicted)}"


def _missing(seen: Observation) -> str:
    fast = seen.metrics.arrivals_fast
    return f"demand is unknown, {fast.reason}" if isinstance(fast, Unknown) else "demand is unknown"


def _what_then(decision: Decision, settings: ScalingSettings) -> str:
    if decision.cause is Cause.FALLBACK:
        return f", for over {settings.unknown_seconds:.0f} s, so at least the fall-back of {settings.fallback_replicas}"
    return ", so the number stays as it is"


def number(value: float | Value) -> str:
    """Three significant digits; whole from 100 on."""
    figure = value.value if isinstance(value, Value) else value
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"
