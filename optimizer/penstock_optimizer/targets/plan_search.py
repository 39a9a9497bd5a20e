"""Stage 2, the plan search: measures plans of the finalists in their processes, and proposes routes by length.

`PlanSearch` runs the hill-climbing of `search.climb` on real measurements. `RouteFinder` finds recipes that serve the
short or the long rows faster than the chosen one, and proposes them as plans with two graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.errors import OptimizationError
from penstock.manifest import Outcome, ReasonCode
from penstock.recipe import Batching, Plan, Recipe
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from penstock_optimizer.candidate.runner import CandidateRunner, CandidateSession
from penstock_optimizer.search.climb import HillClimb, PlanFailed, SearchResult, SearchStep, Trials
from penstock_optimizer.search.goal import NOISE_FLOOR, Goal, PlanSample
from penstock_optimizer.search.space import (
    LEAST_SHARE,
    NEVER_WIDE,
    MeasuredRecipe,
    PlanLimits,
    WideFrom,
    expected_milliseconds,
    finalists,
    first_plan,
    lengths_to_compare,
    longest_short_row,
    rivals,
    share_within,
    wide_thresholds,
    with_route,
)
from penstock_optimizer.targets.screening import CandidateRun, Screening
from penstock_optimizer.targets.target import MOST_PLANS_SECONDS, RAISE_BUDGET, Budget

SAMPLE_SECONDS = 60.0
"""One measurement of a plan takes a few seconds; a process that takes this long hangs."""
MOST_REOPENED = 2
"""How often a finalist's process is restarted after it died on a plan."""
UNMEASURED_WIDE_FROM = WideFrom(64, 64)
LEAST_PLANS_SHARE = 0.5
"""Of the plans' seconds: the rest may be spent on finding the length from which all cores pay. Which recipe is best
weighs more."""


@dataclass
class PlanSearch:
    """Finds the plan of stage 2."""

    screening: Screening
    runner: CandidateRunner
    budget: Budget
    goal: Goal
    cores: int
    lengths: Sequence[int]
    """Measured lengths, rising."""
    expected: Sequence[int]
    """A sample of the workload's lengths."""
    may_serve: Callable[[Recipe], bool]
    """False for the reference when the endpoint allows neither its engine nor its precision: then it is served only if
    nothing else can be."""
    on_step: Callable[[SearchStep], None]

    def __post_init__(self) -> None:
        self._reopened: dict[Recipe, int] = {}
        self._last_failure: dict[Recipe, WorkerFailed] = {}
        self._wide: dict[Recipe, WideFrom] = {}

    def search(self, trials: Trials) -> SearchResult:
        """The plan for the goal. OptimizationError when not even the reference could be measured."""
        timed = self.screening.timed()
        reference = next((one for one in timed if one.recipe == self.screening.reference.recipe), None)
        if reference is None:
            raise OptimizationError("the fp32 graph could not be measured within the time budget", remedy=RAISE_BUDGET)
        recipes = finalists([one for one in timed if one is not reference], reference, self.expected)
        if not self.may_serve(reference.recipe) and len(recipes) > 1:
            recipes.remove(reference.recipe)
        for run in self.screening.runs:
            if run.recipe not in recipes:
                run.close()
        while True:
            starts = self._starts(recipes)
            time_left = self.budget.plans_deadline()
            if not time_left():
                return self._unmeasured([one for one in timed if one.recipe in recipes])
            climb = HillClimb(self.goal, self._measure, trials=trials, time_left=time_left, on_step=self.on_step)
            router = RouteFinder(self, climb, keep_open=recipes)
            try:
                return climb.search(starts, lambda plan: self.limits(plan.recipe), routes=router.routes)
            except PlanFailed as failure:
                if self.budget.left_for_plans() <= 0:
                    # The time ended it, not a fault: the best so far by its latencies wins.
                    return self._unmeasured([one for one in timed if one.recipe in recipes])
                # The incumbent failed: a challenger's failure does not end the climb.
                broken = failure.plan.recipe
                run = self.screening.run_of(broken)
                run.close()
                reason = f"{failure} while its plans were measured"
                code = ReasonCode.TIMED_OUT if failure.timed_out else ReasonCode.OTHER
                run.settle(Outcome.FAILED, reason, code)
                # A recipe that came in by a route is not among them, and is not proposed again after it has failed.
                recipes = [recipe for recipe in recipes if recipe != broken]
                if not recipes:
                    raise OptimizationError(
                        f"no plan could be measured: {failure}", remedy="See the log of the optimisation"
                    ) from failure

    @property
    def limit(self) -> float:
        """Seconds that one call may take."""
        return max(min(SAMPLE_SECONDS, self.budget.left_for_capacity()), 1.0)

    def _unmeasured(self, timed: Sequence[MeasuredRecipe]) -> SearchResult:
        """The first plan of the recipe with the lowest expected latency, when no time is left to try plans: of fp32,
        unless that recipe is faster by more than the runs of the two scatter."""

        def expected(one: MeasuredRecipe) -> float:
            return expected_milliseconds(one.milliseconds, self.expected)

        best = min(timed, key=expected)
        reference = next((one for one in timed if one.recipe == self.screening.reference.recipe), best)
        latencies = [self.screening.run_of(one.recipe).facts.latency for one in (best, reference)]
        noise = max(NOISE_FLOOR, *(median([point.spread for point in points]) for points in latencies))
        if expected(reference) <= (1 + noise) * expected(best):
            best = reference
        plan = first_plan(best.recipe, self.limits(best.recipe), wide_from=self._wide[best.recipe])
        return SearchResult(plan, None, (), finished=False, noise=noise)

    def _starts(self, recipes: Sequence[Recipe]) -> list[Plan]:
        plans = []
        for recipe in recipes:
            if recipe not in self._wide:
                self._wide[recipe] = self._wide_from(self.screening.run_of(recipe))
            plans.append(first_plan(recipe, self.limits(recipe), wide_from=self._wide[recipe]))
        return plans

    def limits(self, recipe: Recipe) -> PlanLimits:
        """The limits of a recipe's plans."""
        return PlanLimits(self.cores, self.screening.run_of(recipe).batching, tuple(self.lengths))

    def _wide_from(self, run: CandidateRun) -> WideFrom:
        if self.cores == 1 or run.session is None:
            return NEVER_WIDE
        if self.budget.left_for_plans() < LEAST_PLANS_SHARE * self.budget.plans_seconds:
            return UNMEASURED_WIDE_FROM
        try:
            return run.session.wide_from(self.lengths, timeout_seconds=self.limit)
        except WorkerFailed:
            # The search will find out whether its plans run.
            run.close()
            return UNMEASURED_WIDE_FROM

    def _measure(self, plan: Plan) -> PlanSample:
        run = self.screening.run_of(plan.recipe)
        if run.session is None:
            again = self._reopened.get(plan.recipe, 0)
            if again >= MOST_REOPENED or run.built is None:
                raise self._failed(plan)
            self._reopened[plan.recipe] = again + 1
            run.session = self.runner.open(plan.recipe, built=run.built)
        try:
            return run.session.sample(plan, timeout_seconds=self.limit)
        except WorkerFailed as failure:
            run.close()
            self._last_failure[plan.recipe] = failure
            raise self._failed(plan) from failure

    def _failed(self, plan: Plan) -> PlanFailed:
        failure = self._last_failure.get(plan.recipe)
        if failure is None:
            return PlanFailed("its process ended", plan)
        return PlanFailed(failure.reason, plan, timed_out=failure.failure is CallFailure.TIMED_OUT)


def is_exhaustive(result: SearchResult, budget: Budget) -> bool:
    """True when a larger budget adds nothing to the plan search: it ended by itself, or had the most time that it may
    take. A search without a step had none: the stages before it took all the time."""
    return result.finished or (bool(result.steps) and budget.plans_seconds >= MOST_PLANS_SECONDS)


TURNS = 5
"""How often the two recipes are measured, one after the other."""


class RouteFinder:
    """Proposes routes by length for a plan."""

    def __init__(self, search: PlanSearch, climb: HillClimb, *, keep_open: Collection[Recipe]) -> None:
        """Processes of other recipes than `keep_open` are ended after a proposal, unless it needs them."""
        self._search = search
        self._climb = climb
        self._open_for_good = keep_open

    def routes(self, plan: Plan) -> Iterator[Plan]:
        """Plans of other recipes with the plan's own recipe for their short rows, then the plan with another recipe for
        its short rows: each measured to be faster, alternating with the plan, and judged as a pair."""
        search = self._search
        shortest = search.screening.run_of(plan.recipe if plan.short is None else plan.short.recipe)
        # fp32 is the plan only where nothing else is better within the accuracy budget.
        if plan.recipe == search.screening.reference.recipe or not shortest.medians:
            return
        accepted = [one for one in search.screening.runs if one.accepted and one.built is not None]
        others = [_timed(one) for one in accepted if one.recipe not in plan.recipes]
        alone = {one.recipe for one in accepted if one.batching is Batching.SINGLE}
        if plan.short is None:
            for recipe in rivals(_timed(shortest), others, max(shortest.medians), alone=alone):
                long = self._long_plan(plan, search.screening.run_of(recipe))
                if long is not None:
                    yield from self._proposal(long, shortest, rival=recipe)
        for recipe in rivals(_timed(shortest), others, min(shortest.medians), alone=alone):
            yield from self._proposal(plan.unrouted, search.screening.run_of(recipe), rival=recipe)

    def _long_plan(self, plan: Plan, rival: CandidateRun) -> Plan | None:
        """How the rival would serve the plan's rows; None when it breaks."""
        try:
            wide = self._session(rival).wide_from(self._search.lengths, timeout_seconds=self._search.limit)
        except WorkerFailed:
            rival.close()
            return None
        found = first_plan(
            rival.recipe, self._search.limits(rival.recipe), wide_from=wide if plan.streams > 1 else NEVER_WIDE
        )
        return found.model_copy(update={"streams": plan.streams, "threads_per_stream": plan.threads_per_stream})

    def _proposal(self, plan: Plan, short: CandidateRun, *, rival: Recipe) -> Iterator[Plan]:
        """`plan` with another recipe for its short rows, where that is faster. `rival`: which of both is the
        challenger."""
        own = self._search.screening.run_of(plan.recipe)
        found = None
        try:
            found = self._measured(plan, own, short)
            found = found if found is not None and self._judged(found, plan, own) else None
        except WorkerFailed:
            # The plan's own process, if it was that one, is restarted by the search.
            for one in (own, short):
                one.close()
        finally:
            if rival not in self._open_for_good and (found is None or found.recipe != rival):
                self._search.screening.run_of(rival).close()
        if found is not None:
            yield found

    def _measured(self, plan: Plan, own: CandidateRun, short: CandidateRun) -> Plan | None:
        """The route that lone rows of both recipes support, measured alternately, as a lone client would be served: on
        one core, or on all. None where it does not pay."""
        if own.built is None or short.built is None or own.built.io.outputs != short.built.io.outputs:
            return None
        found = lengths_to_compare(self._search.lengths, _timed(short), _timed(own))
        lengths = [tokens for tokens in found if self._share(tokens) >= LEAST_SHARE]
        if not lengths:
            return None
        ours = {tokens: list[float]() for tokens in lengths}
        narrow = {tokens: list[float]() for tokens in lengths}
        wide = {tokens: list[float]() for tokens in lengths}
        may_be_wide = plan.streams > 1
        for _ in range(TURNS):
            self._add(ours, own, [tokens for tokens in lengths if not _is_wide(plan, tokens)], wide=False)
            self._add(ours, own, [tokens for tokens in lengths if _is_wide(plan, tokens)], wide=True)
            self._add(narrow, short, lengths, wide=False)
            if may_be_wide:
                self._add(wide, short, lengths, wide=True)
        wide_at = (
            wide_thresholds(lengths, lambda n: min(narrow[n]), lambda n: min(wide[n])) if may_be_wide else NEVER_WIDE
        )
        alone = wide_at.alone
        longest = longest_short_row(ours, {n: (narrow if alone is None or n < alone else wide)[n] for n in lengths})
        if longest is None or 1 - self._share(longest) < LEAST_SHARE:
            return None
        limits = self._search.limits(short.recipe)
        return with_route(plan, short.recipe, limits, longest_tokens=longest, wide_from=wide_at)

    def _add(self, times: dict[int, list[float]], run: CandidateRun, lengths: Sequence[int], *, wide: bool) -> None:
        if lengths:
            found = self._session(run).lone(lengths, wide=wide, timeout_seconds=self._search.limit)
            for tokens, milliseconds in found.items():
                times[tokens].append(milliseconds)

    def _judged(self, routed: Plan, plan: Plan, own: CandidateRun) -> bool:
        """Get the guard's verdict on the pair: each recipe passed alone, which does not show how their answers compare
        with each other (neighbours, orders)."""
        try:
            verdict = self._session(own).judge_plan(routed, timeout_seconds=self._search.limit)
        except WorkerFailed as failure:
            own.close()
            self._climb.note(
                SearchStep(routed, plan, None, promoted=False, reason=f"could not be judged: {failure.reason}")
            )
            return False
        if not verdict.passed:
            reason = f"the two recipes together: {verdict.reason}"
            self._climb.note(SearchStep(routed, plan, None, promoted=False, reason=reason))
        return verdict.passed

    def _session(self, run: CandidateRun) -> CandidateSession:
        if run.session is None:
            run.session = self._search.runner.open(run.recipe, built=run.built)
        return run.session

    def _share(self, tokens: int) -> float:
        return share_within(self._search.expected, tokens)


def _is_wide(plan: Plan, tokens: int) -> bool:
    return plan.streams > 1 and plan.is_wide(tokens, alone=True)


def _timed(run: CandidateRun) -> MeasuredRecipe:
    return MeasuredRecipe(run.recipe, run.medians)
