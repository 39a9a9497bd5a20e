"""Stage 2, the plan search: measures plans of the finalists in their processes, and proposes routes by length.

`PlanSearch` runs the hill-climbing of `search.climb` on real measurements. `Router` finds recipes that serve the short
or the long rows faster than the chosen one, and proposes them as plans with two graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.errors import OptimizationError
from penstock.manifest import Outcome, ReasonCode
from penstock.recipe import Batching, Plan, Recipe
from penstock_optimizer.candidate.isolation import Failure, WorkerFailed
from penstock_optimizer.candidate.runner import Lab, Session
from penstock_optimizer.job.screening import MOST_PLANS_SECONDS, RAISE_BUDGET, Budget, Entrant, TryOut
from penstock_optimizer.search.climb import Climbed, Climber, MeasurementFailed, Step, Trials
from penstock_optimizer.search.goal import NOISE_FLOOR, Goal, Sample
from penstock_optimizer.search.space import (
    LEAST_SHARE,
    NEVER_WIDE,
    Limits,
    Timed,
    WideFrom,
    boundary,
    expected_milliseconds,
    finalists,
    first_plan,
    looked_at,
    rivals,
    routed,
    share_within,
    wide_from,
)

SAMPLE_SECONDS = 60.0
"""One measurement of a plan takes a few seconds; a process that takes this long hangs."""
MOST_REOPENED = 2
"""How often a finalist's process is started again after it died on some plan."""
UNMEASURED_WIDE_FROM = WideFrom(64, 64)
LEAST_PLANS_SHARE = 0.5
"""Of the plans' seconds: the rest may go to finding out from which length on all cores pay. Which recipe is the best
weighs more."""


@dataclass
class Planner:
    """Finds the plan."""

    tryout: TryOut
    lab: Lab
    budget: Budget
    goal: Goal
    cores: int
    lengths: Sequence[int]
    """Measured lengths, rising."""
    expected: Sequence[int]
    """A sample of the workload's lengths."""
    may_serve: Callable[[Recipe], bool]
    """False for the teacher when the endpoint allows neither its engine nor its precision: then it is served only
    where there is nothing else."""
    on_step: Callable[[Step], None]

    def __post_init__(self) -> None:
        self._reopened: dict[Recipe, int] = {}
        self._last_failure: dict[Recipe, WorkerFailed] = {}
        self._wide: dict[Recipe, WideFrom] = {}

    def search(self, trials: Trials) -> Climbed:
        """The plan for the goal. OptimizationError when not even the teacher can be measured."""
        timed = self.tryout.timed()
        teacher = next((one for one in timed if one.recipe == self.tryout.teacher.recipe), None)
        if teacher is None:
            raise OptimizationError(
                "the fp32 graph could not be measured within the time budget",
                remedy=RAISE_BUDGET,
            )
        recipes = finalists([one for one in timed if one is not teacher], teacher, self.expected)
        if not self.may_serve(teacher.recipe) and len(recipes) > 1:
            recipes.remove(teacher.recipe)
        for entrant in self.tryout.entrants:
            if entrant.recipe not in recipes:
                entrant.close()
        while True:
            starts = self._starts(recipes)
            time_left = self.budget.plans_deadline()
            if not time_left():
                return self._unmeasured([one for one in timed if one.recipe in recipes])
            climber = Climber(
                self.goal,
                self._measure,
                trials=trials,
                time_left=time_left,
                on_step=self.on_step,
            )
            router = Router(self, climber, open_for_good=recipes)
            try:
                return climber.search(starts, lambda plan: self.limits(plan.recipe), routes=router.routes)
            except MeasurementFailed as failure:
                if self.budget.left_for_plans() <= 0:
                    # Cut off by the clock, not by a fault: the best so far by its latencies wins.
                    return self._unmeasured([one for one in timed if one.recipe in recipes])
                # The incumbent's, since a challenger's failure does not end the climb.
                broken = failure.plan.recipe
                entrant = self.entrant(broken)
                entrant.close()
                reason = f"{failure} while its plans were measured"
                code = ReasonCode.TIMED_OUT if failure.timed_out else ReasonCode.OTHER
                entrant.settle(Outcome.FAILED, reason, code)
                # One that came in by a route is none of them, and is not offered again after it has failed.
                recipes = [recipe for recipe in recipes if recipe != broken]
                if not recipes:
                    raise OptimizationError(
                        f"no plan could be measured: {failure}", remedy="See the log of the optimisation"
                    ) from failure

    @property
    def limit(self) -> float:
        """Seconds that one call may take."""
        return max(min(SAMPLE_SECONDS, self.budget.left_for_capacity()), 1.0)

    def _unmeasured(self, timed: Sequence[Timed]) -> Climbed:
        """The first plan of the recipe with the lowest expected latency, when no time is left to try plans: of fp32,
        unless that recipe is faster by more than the runs of the two scatter."""

        def expected(one: Timed) -> float:
            return expected_milliseconds(one.milliseconds, self.expected)

        best = min(timed, key=expected)
        teacher = next((one for one in timed if one.recipe == self.tryout.teacher.recipe), best)
        latencies = [self.entrant(one.recipe).facts.latency for one in (best, teacher)]
        noise = max(NOISE_FLOOR, *(median([point.spread for point in points]) for points in latencies))
        if expected(teacher) <= (1 + noise) * expected(best):
            best = teacher
        plan = first_plan(best.recipe, self.limits(best.recipe), wide_from=self._wide[best.recipe])
        return Climbed(plan, None, (), finished=False, noise=noise)

    def _starts(self, recipes: Sequence[Recipe]) -> list[Plan]:
        plans = []
        for recipe in recipes:
            if recipe not in self._wide:
                self._wide[recipe] = self._wide_from(self.entrant(recipe))
            plans.append(first_plan(recipe, self.limits(recipe), wide_from=self._wide[recipe]))
        return plans

    def limits(self, recipe: Recipe) -> Limits:
        """What the plans of a recipe may use."""
        return Limits(self.cores, self.entrant(recipe).batching, tuple(self.lengths))

    def _wide_from(self, entrant: Entrant) -> WideFrom:
        if self.cores == 1 or entrant.session is None:
            return NEVER_WIDE
        if self.budget.left_for_plans() < LEAST_PLANS_SHARE * self.budget.plans_seconds:
            return UNMEASURED_WIDE_FROM
        try:
            return entrant.session.wide_from(self.lengths, timeout_seconds=self.limit)
        except WorkerFailed:
            # The search will find out whether its plans run.
            entrant.close()
            return UNMEASURED_WIDE_FROM

    def _measure(self, plan: Plan) -> Sample:
        entrant = self.entrant(plan.recipe)
        if entrant.session is None:
            again = self._reopened.get(plan.recipe, 0)
            if again >= MOST_REOPENED or entrant.built is None:
                raise self._failed(plan)
            self._reopened[plan.recipe] = again + 1
            entrant.session = self.lab.open(plan.recipe, built=entrant.built)
        try:
            return entrant.session.sample(plan, timeout_seconds=self.limit)
        except WorkerFailed as failure:
            entrant.close()
            self._last_failure[plan.recipe] = failure
            raise self._failed(plan) from failure

    def _failed(self, plan: Plan) -> MeasurementFailed:
        failure = self._last_failure.get(plan.recipe)
        if failure is None:
            return MeasurementFailed("its process ended", plan)
        return MeasurementFailed(failure.reason, plan, timed_out=failure.failure is Failure.TIMED_OUT)

    def entrant(self, recipe: Recipe) -> Entrant:
        """The candidate of a recipe."""
        return next(one for one in self.tryout.entrants if one.recipe == recipe)


def had_its_time(climbed: Climbed, budget: Budget) -> bool:
    """True where a larger budget has nothing to add to the plan search: it came to its end, or had the most that it may
    take. One without a step had none of that: what came before it took it all."""
    return climbed.finished or (bool(climbed.steps) and budget.plans_seconds >= MOST_PLANS_SECONDS)


TURNS = 5
"""Of measuring the two recipes, one after the other."""


class Router:
    """Proposes routes for one plan."""

    def __init__(self, planner: Planner, climber: Climber, *, open_for_good: Collection[Recipe]) -> None:
        """Processes of other recipes than `open_for_good` are ended again, unless a proposal needs them."""
        self._planner = planner
        self._climber = climber
        self._open_for_good = open_for_good

    def routes(self, plan: Plan) -> Iterator[Plan]:
        """Plans of other recipes with the plan's own for their short rows, then the plan with another recipe for its
        short rows, or with another one than it has: measured to be faster in turns with each other, judged together."""
        planner = self._planner
        shortest = planner.entrant(plan.recipe if plan.short is None else plan.short.recipe)
        # Who is served fp32 is so because nothing else is better within the budget.
        if plan.recipe == planner.tryout.teacher.recipe or not shortest.medians:
            return
        accepted = [one for one in planner.tryout.entrants if one.accepted and one.built is not None]
        others = [_timed(one) for one in accepted if one.recipe not in plan.recipes]
        alone = {one.recipe for one in accepted if one.batching is Batching.SINGLE}
        if plan.short is None:
            for recipe in rivals(_timed(shortest), others, max(shortest.medians), alone=alone):
                long = self._long_plan(plan, planner.entrant(recipe))
                if long is not None:
                    yield from self._proposal(long, shortest, rival=recipe)
        for recipe in rivals(_timed(shortest), others, min(shortest.medians), alone=alone):
            yield from self._proposal(plan.unrouted, planner.entrant(recipe), rival=recipe)

    def _long_plan(self, plan: Plan, rival: Entrant) -> Plan | None:
        """How the rival's rows would be served in the place of the plan's; None when it breaks."""
        try:
            wide = self._session(rival).wide_from(self._planner.lengths, timeout_seconds=self._planner.limit)
        except WorkerFailed:
            rival.close()
            return None
        found = first_plan(
            rival.recipe, self._planner.limits(rival.recipe), wide_from=wide if plan.streams > 1 else NEVER_WIDE
        )
        return found.model_copy(update={"streams": plan.streams, "threads_per_stream": plan.threads_per_stream})

    def _proposal(self, plan: Plan, short: Entrant, *, rival: Recipe) -> Iterator[Plan]:
        """`plan` with another recipe for its short rows, where that pays. `rival`: which of both is the challenger."""
        own = self._planner.entrant(plan.recipe)
        found = None
        try:
            found = self._measured(plan, own, short)
            found = found if found is not None and self._judged(found, plan, own) else None
        except WorkerFailed:
            # Its own process, if it was that, is started again by the search.
            for one in (own, short):
                one.close()
        finally:
            if rival not in self._open_for_good and (found is None or found.recipe != rival):
                self._planner.entrant(rival).close()
        if found is not None:
            yield found

    def _measured(self, plan: Plan, own: Entrant, short: Entrant) -> Plan | None:
        """The lone rows of both in turns, each as a client that is alone would be served: on one core, or on all."""
        if own.built is None or short.built is None or own.built.io.outputs != short.built.io.outputs:
            return None
        found = looked_at(self._planner.lengths, _timed(short), _timed(own))
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
        wide_at = wide_from(lengths, lambda n: min(narrow[n]), lambda n: min(wide[n])) if may_be_wide else NEVER_WIDE
        alone = wide_at.alone
        longest = boundary(ours, {n: (narrow if alone is None or n < alone else wide)[n] for n in lengths})
        if longest is None or 1 - self._share(longest) < LEAST_SHARE:
            return None
        limits = self._planner.limits(short.recipe)
        return routed(plan, short.recipe, limits, longest_tokens=longest, wide_from=wide_at)

    def _add(self, times: dict[int, list[float]], entrant: Entrant, lengths: Sequence[int], *, wide: bool) -> None:
        if lengths:
            found = self._session(entrant).lone(lengths, wide=wide, timeout_seconds=self._planner.limit)
            for tokens, milliseconds in found.items():
                times[tokens].append(milliseconds)

    def _judged(self, routed: Plan, plan: Plan, own: Entrant) -> bool:
        """Both passed the guard alone; answers of the two together (neighbours, orders) are another question."""
        try:
            verdict = self._session(own).judge_plan(routed, timeout_seconds=self._planner.limit)
        except WorkerFailed as failure:
            own.close()
            self._climber.note(
                Step(routed, plan, None, promoted=False, reason=f"could not be judged: {failure.reason}")
            )
            return False
        if not verdict.passed:
            reason = f"the two recipes together: {verdict.reason}"
            self._climber.note(Step(routed, plan, None, promoted=False, reason=reason))
        return verdict.passed

    def _session(self, entrant: Entrant) -> Session:
        if entrant.session is None:
            entrant.session = self._planner.lab.open(entrant.recipe, built=entrant.built)
        return entrant.session

    def _share(self, tokens: int) -> float:
        return share_within(self._planner.expected, tokens)


def _is_wide(plan: Plan, tokens: int) -> bool:
    return plan.streams > 1 and plan.is_wide(tokens, alone=True)


def _timed(entrant: Entrant) -> Timed:
    return Timed(entrant.recipe, entrant.medians)
