"""Stage 2, with processes: the plan search over the finalists of stage 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import OptimizationError
from penstock.manifest import Outcome
from penstock.recipe import Plan, Recipe
from penstock_optimizer.candidate.isolation import WorkerFailed
from penstock_optimizer.candidate.lab import Lab
from penstock_optimizer.job.budget import MOST_PLANS_SECONDS, RAISE_BUDGET, Budget
from penstock_optimizer.job.routing import Router
from penstock_optimizer.job.screening import Entrant, TryOut
from penstock_optimizer.load.summary import median
from penstock_optimizer.search.climb import Climbed, Climber, MeasurementFailed, Step
from penstock_optimizer.search.goal import NOISE_FLOOR, Goal, Sample
from penstock_optimizer.search.space import NEVER_WIDE, Limits, WideFrom, first_plan
from penstock_optimizer.search.survivors import Timed, expected_milliseconds, finalists
from penstock_optimizer.search.trials import Trials

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
        self._last_reason: dict[Recipe, str] = {}
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
                entrant.settle(Outcome.FAILED, f"{failure} while its plans were measured")
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
                raise MeasurementFailed(self._last_reason.get(plan.recipe, "its process ended"), plan)
            self._reopened[plan.recipe] = again + 1
            entrant.session = self.lab.open(plan.recipe, built=entrant.built)
        try:
            return entrant.session.sample(plan, timeout_seconds=self.limit)
        except WorkerFailed as failure:
            entrant.close()
            self._last_reason[plan.recipe] = failure.reason
            raise MeasurementFailed(failure.reason, plan) from failure

    def entrant(self, recipe: Recipe) -> Entrant:
        """The candidate of a recipe."""
        return next(one for one in self.tryout.entrants if one.recipe == recipe)


def had_its_time(climbed: Climbed, budget: Budget) -> bool:
    """True where a larger budget has nothing to add to the plan search: it came to its end, or had the most that it may
    take. One without a step had none of that: what came before it took it all."""
    return climbed.finished or (bool(climbed.steps) and budget.plans_seconds >= MOST_PLANS_SECONDS)
