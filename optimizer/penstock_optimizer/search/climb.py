"""Stage 2: hill-climbing from the plan that experience suggests, one axis at a time, against measured noise.

A challenger is measured right before the incumbent (a pair), and promoted only when it is better by more than the pairs
scatter. One pair is enough to drop a challenger that is clearly worse; a promising one gets more. Promotions on a later
criterion (more requests, equal latency) must not add up to a loss on the first one: each is compared with the last plan
that won by the first criterion. Before the climb the best of the first plans may get a route by length, which its
neighbours then keep.

`Trials` stores the measurements, one JSON line each, so that an interrupted search continues. A torn last line is
dropped; any other line that cannot be read is an error, since wrong measurements are worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from penstock.errors import ArtefactError
from penstock.manifest import Frozen
from penstock.recipe import Plan
from penstock_optimizer.search.goal import Comparison, Goal, Pair, PlanSample, Ranking, RouteGoal
from penstock_optimizer.search.space import PlanLimits, neighbours

CLEARLY_WORSE = 0.10
"""A loss above this on the first criterion drops a challenger after one pair."""
CLEARLY_BETTER = 0.25
"""A gain above this on the first criterion needs only two pairs."""
PAIRS = 3
MOST_PAIRS = 5
"""For a challenger with a gain near its noise."""


class PlanFailed(Exception):
    """A plan could not be measured: it crashed, timed out, or gave an error."""

    def __init__(self, reason: str, plan: Plan, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.plan = plan
        self.timed_out = timed_out


MeasurePlan = Callable[[Plan], PlanSample]
"""Measures one plan once; raises PlanFailed when the plan cannot run."""


@dataclass(frozen=True)
class SearchStep:
    """One challenge, for the report and the log."""

    challenger: Plan
    incumbent: Plan
    comparison: Comparison | None
    """None: the challenger failed."""
    promoted: bool
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """The result of the search."""

    plan: Plan
    sample: PlanSample | None
    """Median of the winner's samples; None: not measured."""
    steps: tuple[SearchStep, ...]
    finished: bool
    """False: the time ended before all neighbours were tried."""
    noise: float
    """Median scatter of the pairs, relative: smaller gains promoted nothing."""
    second_graph_bytes: int | None = None
    """The memory that the graph of the short rows adds to the server, where the plan has one."""


class HillClimb:
    """Compares plans by measuring, and keeps the incumbent."""

    def __init__(
        self,
        goal: Goal,
        measure: MeasurePlan,
        *,
        trials: Trials | None = None,
        time_left: Callable[[], bool] = lambda: True,
        on_step: Callable[[SearchStep], None] = lambda _: None,
    ) -> None:
        self._goal = goal
        self._measure = measure
        self._trials = trials if trials is not None else Trials()
        self._time_left = time_left
        self._on_step = on_step
        self._steps: list[SearchStep] = []
        self._failed: set[Plan] = set()

    def challenge(
        self, challenger: Plan, incumbent: Plan, *, least_pairs: int = 1, judge: Goal | RouteGoal | None = None
    ) -> Comparison | None:
        """Measure pairs until it is clear which plan is better, or that it does not matter; None when the challenger
        fails.

        `judge`: compares the pairs; None: the goal.
        """
        judge = judge or self._goal
        pairs = [match.pair for match in self._trials.between(challenger, incumbent)]
        while len(pairs) < MOST_PAIRS and not self._settled(pairs, least_pairs, judge):
            try:
                sample = self._measure(challenger)
            except PlanFailed:
                self._failed.add(challenger)
                return None
            match = Trial(
                challenger=challenger,
                incumbent=incumbent,
                challenger_sample=sample,
                incumbent_sample=self._measure(incumbent),
            )
            self._trials.add(match)
            pairs.append(match.pair)
        return judge.compare(pairs)

    def _settled(self, pairs: Sequence[Pair], least_pairs: int, judge: Goal | RouteGoal) -> bool:
        if not pairs or (len(pairs) < least_pairs and self._time_left()):
            return False
        found = judge.compare(pairs)
        if found.by_first and found.gain < -CLEARLY_WORSE:
            return True
        if found.by_first and found.gain > CLEARLY_BETTER and len(pairs) > 1:
            return True
        if len(pairs) < PAIRS:
            return not self._time_left()
        near = abs(found.gain) < 2 * found.noise and found.ranking is Ranking.BETTER
        return not near or not self._time_left()

    def best_of(self, plans: Sequence[Plan]) -> Plan:
        """The winner of the plans in order: each must beat the best so far beyond the noise.

        The plan that should win a draw comes first. Plans that fail are skipped.
        """
        best = plans[0]
        for plan in plans[1:]:
            if not self._time_left():
                break
            # A recipe gets a second chance, which a neighbouring plan does not: each recipe has only one first plan.
            if self._promote(plan, best, anchor=best, least_pairs=2) is not None:
                best = plan
        return best

    def search(
        self,
        starts: Sequence[Plan],
        limits: Callable[[Plan], PlanLimits],
        *,
        routes: Callable[[Plan], Iterable[Plan]] = lambda _: (),
    ) -> SearchResult:
        """Find the best of the first plans, add a route by length where one pays, and climb from there.

        At the end the winner is compared once more with the first of `starts` (the fp32 reference), which is returned
        if the winner is no better. `routes`: the plan's promising variants with a route, with its own recipe for the
        long rows or for the short ones, best first; requested one by one. Raises PlanFailed when the incumbent stops
        working.
        """
        best = self.best_of(starts)
        routed = self._with_route(best, routes)
        if routed.short is not None:
            # The recipe that is best for all rows need not be the best for the long ones alone.
            routed = self._with_route(routed, routes)
        result = self.climb(routed, limits)
        reference = starts[0]
        # The reference gets no route: a plan with a route and its recipe comes from a search without the reference.
        of_first = result.plan.short is not None and result.plan.recipe == reference.recipe
        if result.plan == reference or of_first:
            return result
        final = self.challenge(result.plan, reference)
        if final is not None and final.ranking is Ranking.BETTER:
            return result
        reason = "could not be measured again" if final is None else _reason(final)
        self.note(SearchStep(result.plan, reference, final, promoted=False, reason=f"against the fp32 plan: {reason}"))
        return SearchResult(reference, self._sample_of(reference), tuple(self._steps), result.finished, self.noise)

    def note(self, step: SearchStep) -> None:
        """Record a challenge that was decided elsewhere."""
        self._steps.append(step)
        self._on_step(step)

    def _with_route(self, plan: Plan, routes: Callable[[Plan], Iterable[Plan]]) -> Plan:
        """The first of the plan's routes that is better than the plan, else the plan."""
        offered = iter(routes(plan))
        # The time is checked before the next one is requested: finding it takes seconds.
        while self._time_left() and (challenger := next(offered, None)) is not None:
            if challenger.short is None or challenger == plan:
                continue
            judge: Goal | RouteGoal = self._goal
            if challenger.recipe == plan.recipe:
                # Short rows hardly weigh in the goal, so they have a separate one. Long rows weigh.
                judge = RouteGoal(self._goal, challenger.short.longest_tokens)
            if self._promote(challenger, plan, anchor=plan, least_pairs=2, judge=judge) is not None:
                return challenger
        return plan

    def climb(self, start: Plan, limits: Callable[[Plan], PlanLimits]) -> SearchResult:
        """Climb from `start` to a plan that no neighbour beats, or until the time ends.

        `limits` gives the limits of a plan's recipe. Raises PlanFailed when the incumbent cannot be measured.
        """
        incumbent = anchor = start
        tried = {start}
        finished = True
        moved = True
        while moved and finished:
            moved = False
            for neighbour in neighbours(incumbent, limits(incumbent)):
                if neighbour in tried or neighbour in self._failed:
                    continue
                if not self._time_left():
                    finished = False
                    break
                tried.add(neighbour)
                comparison = self._promote(neighbour, incumbent, anchor=anchor)
                if comparison is not None:
                    anchor = neighbour if comparison.by_first else anchor
                    incumbent = neighbour
                    moved = True
                    break
        return SearchResult(
            incumbent,
            self._sample_of(incumbent),
            tuple(self._steps),
            finished,
            self.noise,
            self._second_graph_bytes(incumbent),
        )

    @property
    def noise(self) -> float:
        """Median scatter of the comparisons with several pairs so far; 0 without any."""
        several = (step.comparison for step in self._steps if step.comparison is not None)
        scatter = [comparison.noise for comparison in several if comparison.pairs > 1]
        return median(scatter) if scatter else 0.0

    def _promote(
        self,
        challenger: Plan,
        incumbent: Plan,
        *,
        anchor: Plan,
        least_pairs: int = 1,
        judge: Goal | RouteGoal | None = None,
    ) -> Comparison | None:
        """The comparison when the challenger replaces the incumbent, else None; a step is recorded either way."""
        comparison = self.challenge(challenger, incumbent, least_pairs=least_pairs, judge=judge)
        promoted = comparison is not None and comparison.ranking is Ranking.BETTER
        if comparison is None:
            reason = "could not be measured"
        else:
            reason = _reason(comparison)
            if promoted and comparison.pairs == 1 and not (comparison.by_first and comparison.gain > CLEARLY_BETTER):
                # The time ended: a single pair counts only with a large gain.
                promoted = False
                reason = f"{reason}: too little to be sure"
            if promoted and not comparison.by_first and anchor != incumbent and self._lost_ground(challenger, anchor):
                promoted = False
                reason = f"{reason}, but slower than an earlier plan by the first criterion"
        self.note(SearchStep(challenger, incumbent, comparison, promoted, reason))
        return comparison if promoted else None

    def _lost_ground(self, challenger: Plan, anchor: Plan) -> bool:
        comparison = self.challenge(challenger, anchor)
        return comparison is None or (comparison.by_first and comparison.ranking is Ranking.WORSE)

    def _second_graph_bytes(self, plan: Plan) -> int | None:
        """As measured with the plan or with one that has the same route: the memory is measured when the graph is first
        loaded."""
        alike = [match for match in self._trials.all() if match.challenger.short == plan.short]
        weighed = [match.challenger_sample.second_graph_bytes for match in alike if plan.short is not None]
        return max((one for one in weighed if one is not None), default=None)

    def _sample_of(self, plan: Plan) -> PlanSample:
        samples = self._trials.samples(plan)
        if not samples:
            return self._measure(plan)
        ordered = sorted(samples, key=lambda sample: self._goal.criteria[0].cost(sample, self._goal))
        return ordered[len(ordered) // 2]


def _reason(comparison: Comparison) -> str:
    """One clause, such as `12 % better by requests/s (noise 3 %)`."""
    if comparison.ranking is Ranking.SAME:
        return f"no difference beyond the noise ({comparison.noise:.0%})"
    word = "better" if comparison.ranking is Ranking.BETTER else "worse"
    seen = f"noise {comparison.noise:.0%}" if comparison.pairs > 1 else "measured once"
    return f"{abs(comparison.gain):.0%} {word} by {comparison.criterion} ({seen})"


class Trial(Frozen):
    """One pair of measurements of two plans."""

    challenger: Plan
    incumbent: Plan
    challenger_sample: PlanSample
    incumbent_sample: PlanSample

    @property
    def pair(self) -> Pair:
        """The samples alone."""
        return Pair(self.challenger_sample, self.incumbent_sample)


class Trials:
    """Trials in memory, and in a file when a path is given."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._matches: list[Trial] = []
        if path is not None and path.exists():
            self._matches = _read(path)

    def __len__(self) -> int:
        return len(self._matches)

    def all(self) -> Sequence[Trial]:
        """All trials, oldest first."""
        return tuple(self._matches)

    def between(self, challenger: Plan, incumbent: Plan) -> Sequence[Trial]:
        """The trials of these two plans, oldest first."""
        return [m for m in self._matches if m.challenger == challenger and m.incumbent == incumbent]

    def samples(self, plan: Plan) -> Sequence[PlanSample]:
        """All samples of a plan, as challenger and as incumbent."""
        found = []
        for match in self._matches:
            if match.challenger == plan:
                found.append(match.challenger_sample)
            if match.incumbent == plan:
                found.append(match.incumbent_sample)
        return found

    def add(self, match: Trial) -> None:
        """Store a trial, on disk first."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(match.model_dump_json() + "\n")
        self._matches.append(match)


def _read(path: Path) -> list[Trial]:
    # Bytes: a torn line, or one that is no trial, need not be text.
    complete, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        path.write_bytes(complete + b"\n" if complete else b"")
    matches = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            matches.append(Trial.model_validate_json(line))
        except ValidationError as error:
            raise ArtefactError(
                f"{path}, line {number} is not a trial of this version", remedy=f"Delete {path.parent} and start again"
            ) from error
    return matches
