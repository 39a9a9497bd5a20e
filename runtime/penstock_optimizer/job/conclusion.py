"""What is said of each candidate at the end, and what a reader should know before trusting the figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.capacity import CapacityCurve
from penstock.manifest import CandidateFacts, Outcome, PlanTrial, served_latency
from penstock.recipe import Plan, Recipe
from penstock_optimizer.load.summary import median
from penstock_optimizer.search.climb import Step
from penstock_optimizer.search.survivors import NO_PLAN_TRIED, OUT_OF_TIME, WITHIN_BUDGET, expected_milliseconds

NEAR = 1.05
"""Within this of the chosen recipe's latency, it was the plan search that decided."""
NOISY = 0.15
"""A scatter of repeated measurements above this makes small differences meaningless."""


def milliseconds(facts: CandidateFacts) -> dict[int, float]:
    """Median latency by tokens."""
    return {point.tokens: point.p50_milliseconds for point in facts.latency}


def conclude(
    candidates: Sequence[CandidateFacts],
    *,
    chosen: Plan,
    teacher: Recipe,
    expected: Sequence[int],
    steps: Sequence[Step],
    search_finished: bool = True,
) -> tuple[CandidateFacts, ...]:
    """The candidates with their final outcomes and reasons. `expected`: lengths that the latency is weighed over."""
    if not search_finished:
        candidates = _without_turn(candidates, chosen=chosen, expected=expected, steps=steps)
    by_recipe = {one.recipe: one for one in candidates}
    return tuple(
        _concluded(one, by_recipe, chosen=chosen, teacher=teacher, expected=expected, steps=steps) for one in candidates
    )


def _without_turn(
    candidates: Sequence[CandidateFacts], *, chosen: Plan, expected: Sequence[int], steps: Sequence[Step]
) -> list[CandidateFacts]:
    """The candidates; those that the plan search came to no plan of, though they are faster than the chosen one by what
    is known, are skipped: nothing beat them but the clock."""
    tried = {plan.recipe for step in steps for plan in (step.challenger, step.incumbent)}.union(chosen.recipes)
    served = next((one for one in candidates if one.recipe == chosen.recipe), None)

    def is_left(one: CandidateFacts) -> bool:
        if one.recipe in tried or one.outcome is not Outcome.SLOWER or one.reason != WITHIN_BUDGET:
            return False
        faster = _ratio(served, one, expected)
        return faster is not None and faster > NEAR

    skipped = {"outcome": Outcome.SKIPPED, "reason": NO_PLAN_TRIED}
    return [one.model_copy(update=skipped) if is_left(one) else one for one in candidates]


def _concluded(
    facts: CandidateFacts,
    by_recipe: Mapping[Recipe, CandidateFacts],
    *,
    chosen: Plan,
    teacher: Recipe,
    expected: Sequence[int],
    steps: Sequence[Step],
) -> CandidateFacts:
    if facts.recipe == chosen.recipe:
        gain = _ratio(by_recipe.get(teacher), facts, expected)
        if facts.recipe == teacher:
            reason = why_fp32([one for one in by_recipe.values() if one.recipe != teacher])
        elif gain is None:
            reason = f"best for the objective {WITHIN_BUDGET}"
        else:
            reason = f"best for the objective {WITHIN_BUDGET}: {gain:.1f} times as fast as fp32 over the workload"
        return facts.model_copy(update={"outcome": Outcome.CHOSEN, "reason": reason})
    if chosen.short is not None and facts.recipe == chosen.short.recipe:
        reason = f"serves rows of up to {chosen.short.longest_tokens} tokens beside {chosen.recipe.name}"
        return facts.model_copy(update={"reason": f"{reason}, which it is faster than there"})
    if facts.outcome is not Outcome.SLOWER or facts.reason != WITHIN_BUDGET:
        return facts
    slower = _ratio(facts, by_recipe.get(chosen.recipe), expected)
    lost = next(
        (step for step in reversed(steps) if step.challenger.recipe == facts.recipe and not step.promoted), None
    )
    won = (step for step in reversed(steps) if step.promoted and step.challenger.recipe != facts.recipe)
    beaten = next((step for step in won if step.incumbent.recipe == facts.recipe), None)
    if lost is not None and (slower is None or slower <= NEAR):
        reason = f"{lost.reason}, against {lost.incumbent.recipe.name}"
    elif beaten is not None and (slower is None or slower <= NEAR):
        reason = f"{beaten.challenger.recipe.name} was {beaten.reason}"
    elif slower is not None and slower > 1.0:
        reason = f"{slower:.2f} times the latency of the chosen recipe over the workload"
    else:
        times = f"{1 / slower:.2f} times " if slower is not None and slower < 1 / NEAR else ""
        reason = f"{times}as fast as the chosen recipe over the workload; no plan of it was tried"
    return facts.model_copy(update={"reason": reason})


def why_fp32(others: Sequence[CandidateFacts]) -> str:
    """Why none of the others is served."""
    outcomes = {one.outcome for one in others} - {Outcome.SKIPPED}
    if any(one.reason in OUT_OF_TIME for one in others):
        return "the best so far, as the time budget ended before all others were measured"
    if Outcome.SLOWER in outcomes:
        return "no candidate within the accuracy budget beats fp32 beyond the noise"
    if outcomes == {Outcome.REJECTED}:
        return "no other candidate is within the accuracy budget"
    if outcomes == {Outcome.FAILED}:
        return "every other candidate failed"
    if outcomes:
        return "every other candidate failed or is outside the accuracy budget"
    return "no other candidate was tried"


def _ratio(slow: CandidateFacts | None, fast: CandidateFacts | None, expected: Sequence[int]) -> float | None:
    """Expected latency of the one over that of the other; None when either was not measured."""
    if slow is None or fast is None or not slow.latency or not fast.latency:
        return None
    return expected_milliseconds(milliseconds(slow), expected) / expected_milliseconds(milliseconds(fast), expected)


def speed_up(teacher: CandidateFacts, plan: Plan, by_recipe: Mapping[Recipe, CandidateFacts]) -> dict[int, float]:
    """fp32 time over that of the chosen plan, by tokens."""
    slow = milliseconds(teacher)
    fast = {point.tokens: point.p50_milliseconds for point in served_latency(plan, by_recipe.values())}
    return {tokens: slow[tokens] / fast[tokens] for tokens in sorted(slow.keys() & fast.keys()) if fast[tokens] > 0}


def plan_trials(steps: Sequence[Step]) -> tuple[PlanTrial, ...]:
    """The plan search as the manifest keeps it."""
    return tuple(
        PlanTrial(plan=step.challenger, against=step.incumbent, promoted=step.promoted, reason=step.reason)
        for step in steps
    )


def findings(
    *,
    candidates: Sequence[CandidateFacts],
    teacher: Recipe,
    plan: Plan,
    second_graph_bytes: int | None = None,
    noise: float,
    skipped_for_time: int,
    search_finished: bool,
    shared_cpus: bool,
    capacity: CapacityCurve,
    asked_requests_per_second: float | None = None,
    host: Sequence[str],
) -> tuple[str, ...]:
    """What a reader should know, the weightiest first.

    `asked_requests_per_second`: of one replica, within the endpoint's p95; None where it does not ask for both, or the
    curve is not whole.
    """
    found = []
    if (missed := _missed(capacity, asked_requests_per_second)) is not None:
        found.append(missed)
    if skipped_for_time:
        found.append(
            f"The time budget ended before {skipped_for_time} candidate{'s' if skipped_for_time > 1 else ''} "
            "had a turn: a larger one goes on from here."
        )
    if not search_finished:
        found.append("The time budget ended the plan search before all neighbours of the plan were tried.")
    if noise > NOISY:
        found.append(
            f"Repeated measurements differed by {noise:.0%}: something else ran on this machine, or its clock moved. "
            "Differences below that are not to be trusted."
        )
    first = next((one for one in candidates if one.recipe == teacher), None)
    if first is not None and not first.fused_nodes:
        found.append("Nothing was fused in the fp32 graph: this architecture runs node by node, slower than it could.")
    if plan.recipe == teacher and any(one.outcome is Outcome.REJECTED for one in candidates):
        found.append(
            "Faster candidates were rejected for their answers: see the accuracy budget "
            "(docs/reference/accuracy-budgets.md)."
        )
    if plan.short is not None:
        size = next((one.size_bytes for one in candidates if one.recipe == plan.short.recipe), 0)
        memory = f"{second_graph_bytes / 1e6:.0f} MB of memory" if second_graph_bytes else "its memory was not measured"
        found.append(
            f"Rows of up to {plan.short.longest_tokens} tokens have a graph of their own ({plan.short.recipe.name}): "
            f"{memory}, {size / 1e6:.0f} MB of the artefact."
        )
    if shared_cpus:
        found.append(
            "The load generator shared the cores with the server, since there were no others: "
            "its own work is in the latencies of the capacity curve."
        )
    return (*found, *(f"{one[:1].upper()}{one[1:].rstrip('.')}." for one in host))


def _missed(capacity: CapacityCurve, asked: float | None) -> str | None:
    """That the rate which the endpoint asks for is not taken within its p95."""
    limit, rate = capacity.p95_objective_milliseconds, capacity.requests_per_second
    if asked is None or limit is None or (rate or 0.0) >= asked:
        return None
    reached = f"takes {rate:,.4g} of them" if rate is not None else "is over that p95 at any rate that was measured"
    return (
        f"The {asked:,.4g} requests/s within a p95 of {limit:,.4g} ms are not reached: one replica {reached}. "
        "Give it more cores, or ask for less."
    )


def measured_noise(search: float, candidates: Sequence[CandidateFacts]) -> float:
    """Relative scatter of repeated measurements: that of the plan search, or of the single runs where that is more."""
    spreads = [point.spread for one in candidates for point in one.latency]
    return max(search, median(spreads) if spreads else 0.0)
