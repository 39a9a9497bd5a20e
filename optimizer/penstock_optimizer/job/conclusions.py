"""Concludes an optimisation: the outcome of each candidate with its reason, and the findings. Pure.

Findings are sentences that a reader of the report should know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from penstock.capacity import CapacityCurve, TokenCurve
from penstock.manifest import CandidateFacts, Outcome, PlanTrial, ReasonCode, served_latency
from penstock.recipe import Plan, Recipe
from penstock.resources.endpoint import Objective
from penstock_optimizer.report.view import why_fp32
from penstock_optimizer.search.climb import SearchStep
from penstock_optimizer.search.space import expected_milliseconds

NOISY = 0.15
"""Above this scatter of repeated measurements, small differences mean nothing."""
WORTH_CACHING = 0.1
"""From this share of repeated texts on, the cache of answers is recommended."""
SHARED_CPUS = (
    "The load generator shared the cores with the server, since there were no others: "
    "its own work is in the latencies of the capacity curve."
)
UNMEASURED = "Nothing was measured yet: this is the fp32 graph as it was exported."
NEAR = 1.05
"""Within this factor of the chosen recipe's latency, the plan search decided."""


def conclude(
    candidates: Sequence[CandidateFacts],
    *,
    chosen: Plan,
    reference: Recipe,
    expected: Sequence[int],
    steps: Sequence[SearchStep],
    search_finished: bool = True,
) -> tuple[CandidateFacts, ...]:
    """The candidates with their final outcomes and reasons. `expected`: lengths to weigh the latency over."""
    if not search_finished:
        candidates = _without_turn(candidates, chosen=chosen, expected=expected, steps=steps)
    by_recipe = {one.recipe: one for one in candidates}
    return tuple(
        _concluded(one, by_recipe, chosen=chosen, reference=reference, expected=expected, steps=steps)
        for one in candidates
    )


def _is_open(facts: CandidateFacts) -> bool:
    """True for a candidate that passed the guard and was not ruled out before the plan search."""
    return facts.outcome is Outcome.SLOWER and facts.reason_code is ReasonCode.WITHIN_BUDGET


def _without_turn(
    candidates: Sequence[CandidateFacts], *, chosen: Plan, expected: Sequence[int], steps: Sequence[SearchStep]
) -> list[CandidateFacts]:
    """Mark as skipped the candidates that are faster than the chosen one as measured, but of which the plan search had
    no time to try a plan."""
    tried = {plan.recipe for step in steps for plan in (step.challenger, step.incumbent)}.union(chosen.recipes)
    served = next((one for one in candidates if one.recipe == chosen.recipe), None)

    def is_left(one: CandidateFacts) -> bool:
        if one.recipe in tried or not _is_open(one):
            return False
        faster = _ratio(served, one, expected)
        return faster is not None and faster > NEAR

    return [one.settled(Outcome.SKIPPED, ReasonCode.NO_PLAN_TRIED) if is_left(one) else one for one in candidates]


def _concluded(
    facts: CandidateFacts,
    by_recipe: Mapping[Recipe, CandidateFacts],
    *,
    chosen: Plan,
    reference: Recipe,
    expected: Sequence[int],
    steps: Sequence[SearchStep],
) -> CandidateFacts:
    if facts.recipe == chosen.recipe:
        gain = _ratio(by_recipe.get(reference), facts, expected)
        if facts.recipe == reference:
            reason = why_fp32([one for one in by_recipe.values() if one.recipe != reference])
        elif gain is None:
            reason = "best for the objective within the accuracy budget"
        else:
            reason = (
                f"best for the objective within the accuracy budget: {gain:.1f} times as fast as fp32 over the workload"
            )
        return facts.settled(Outcome.CHOSEN, reason)
    if chosen.short is not None and facts.recipe == chosen.short.recipe:
        reason = f"serves rows of up to {chosen.short.longest_tokens} tokens next to {chosen.recipe.name}"
        return facts.settled(facts.outcome, f"{reason}, which it is faster than there")
    if not _is_open(facts):
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
    return facts.settled(facts.outcome, reason)


def _ratio(slow: CandidateFacts | None, fast: CandidateFacts | None, expected: Sequence[int]) -> float | None:
    """Expected latency of `slow` over the expected latency of `fast`; None when either was not measured."""
    if slow is None or fast is None or not slow.latency or not fast.latency:
        return None
    return expected_milliseconds(slow.milliseconds, expected) / expected_milliseconds(fast.milliseconds, expected)


def speed_up(reference: CandidateFacts, plan: Plan, by_recipe: Mapping[Recipe, CandidateFacts]) -> dict[int, float]:
    """fp32 time over the time of the chosen plan, by tokens."""
    slow = reference.milliseconds
    fast = {point.tokens: point.p50_milliseconds for point in served_latency(plan, by_recipe.values())}
    return {tokens: slow[tokens] / fast[tokens] for tokens in sorted(slow.keys() & fast.keys()) if fast[tokens] > 0}


def plan_trials(steps: Sequence[SearchStep]) -> tuple[PlanTrial, ...]:
    """The plan search as the manifest stores it."""
    return tuple(
        PlanTrial(plan=step.challenger, against=step.incumbent, promoted=step.promoted, reason=step.reason)
        for step in steps
    )


def sentences(clauses: Iterable[str]) -> Iterator[str]:
    """Clauses as sentences."""
    return (f"{one[:1].upper()}{one[1:].rstrip('.')}." for one in clauses)


def late(candidates: Sequence[CandidateFacts]) -> int:
    """How many candidates a larger time budget would try, or try again. A plan that was not tried does not count: a
    larger budget need not give the plan search more time."""
    codes = [one.reason_code for one in candidates]
    return sum(
        (code.is_out_of_time and code is not ReasonCode.NO_PLAN_TRIED) or code is ReasonCode.TIMED_OUT for code in codes
    )


def of_late_candidates(candidates: Sequence[CandidateFacts]) -> Iterator[str]:
    """The time budget was too small for all candidates."""
    if count := late(candidates):
        yield (
            f"The time budget ended before {count} candidate{'s' if count > 1 else ''} "
            "had a turn: a larger one goes on from here."
        )


def of_plan(
    plan: Plan,
    candidates: Sequence[CandidateFacts],
    reference: Recipe,
    *,
    noise: float,
    search_finished: bool = True,
    second_graph_bytes: int | None = None,
) -> Iterator[str]:
    """Findings about an encoder's plan and the search for it."""
    if not search_finished:
        yield "The time budget ended the plan search before all neighbours of the plan were tried."
    if noise > NOISY:
        yield (
            f"Repeated measurements differed by {noise:.0%}: something else ran on this machine, or its clock moved. "
            "Differences below that are not to be trusted."
        )
    first = next((one for one in candidates if one.recipe == reference), None)
    if first is not None and not first.fused_nodes:
        yield "Nothing was fused in the fp32 graph: this architecture runs node by node, slower than it could."
    if plan.recipe == reference and any(one.outcome is Outcome.REJECTED for one in candidates):
        yield (
            "Faster candidates were rejected for their answers: see the accuracy budget "
            "(docs/reference/accuracy-budgets.md)."
        )
    if plan.short is not None:
        size = next((one.size_bytes for one in candidates if one.recipe == plan.short.recipe), 0)
        memory = f"{second_graph_bytes / 1e6:.0f} MB of memory" if second_graph_bytes else "its memory was not measured"
        yield (
            f"Rows of up to {plan.short.longest_tokens} tokens have a graph of their own ({plan.short.recipe.name}): "
            f"{memory}, {size / 1e6:.0f} MB of the artefact."
        )


def of_repeated_texts(texts: Sequence[str]) -> Iterator[str]:
    """The workload repeats texts, so that the cache of answers pays."""
    if (repeated := repeated_share(texts)) >= WORTH_CACHING:
        yield (
            f"{repeated:.0%} of the workload's texts repeat an earlier one: serving.caches.answersMebibytes answers "
            "such requests from memory."
        )


def repeated_share(texts: Sequence[str]) -> float:
    """The share of texts that repeat an earlier one; 0 without texts."""
    return 1 - len(set(texts)) / len(texts) if texts else 0.0


def of_missed_rate(capacity: CapacityCurve, wanted: float | None) -> Iterator[str]:
    """The rate that the endpoint wants (requests/s) is not reached within its p95. `wanted` None: it states no rate, or
    the curve is incomplete."""
    limit, rate = capacity.p95_objective_milliseconds, capacity.requests_per_second
    if wanted is None or limit is None or (rate or 0.0) >= wanted:
        return
    reached = f"takes {rate:,.4g} of them" if rate is not None else "is over that p95 at any rate that was measured"
    yield (
        f"The {wanted:,.4g} requests/s within a p95 of {limit:,.4g} ms are not reached: one replica {reached}. "
        "Give it more cores, or ask for less."
    )


def of_token_curve(curve: TokenCurve, objective: Objective) -> Iterator[str]:
    """The capacity of a replica that generates text was not measured, or misses the objective."""
    wanted = objective.tokens_per_second
    if not curve.points:
        yield "The capacity of a replica was not measured: the time budget was too short."
    elif curve.within is None:
        yield f"{curve.summary[:1].upper()}{curve.summary[1:]}: give it more cores, or a smaller model."
    elif wanted is not None and (reached := curve.within.tokens_per_second) < wanted:
        yield f"The {wanted:.4g} tokens/s of the objective are not reached: one replica takes {reached:.4g} of them."


def measured_noise(search: float, candidates: Sequence[CandidateFacts]) -> float:
    """Relative scatter of repeated measurements: the larger one of the plan search and of the single runs."""
    spreads = [point.spread for one in candidates for point in one.latency]
    return max(search, median(spreads) if spreads else 0.0)
