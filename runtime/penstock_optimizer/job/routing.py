"""Stage 2, with processes: finds the recipes that may serve the short or the long rows beside the chosen one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from penstock.recipe import Batching, Plan, Recipe
from penstock_optimizer.candidate.isolation import WorkerFailed
from penstock_optimizer.candidate.lab import Lab, Session
from penstock_optimizer.candidate.measure import wide_from
from penstock_optimizer.job.screening import Entrant, TryOut
from penstock_optimizer.search.climb import Step
from penstock_optimizer.search.route import LEAST_SHARE, boundary, looked_at, rivals, routed, share_within
from penstock_optimizer.search.space import NEVER_WIDE, Limits, first_plan
from penstock_optimizer.search.survivors import Timed

TURNS = 5
"""Of measuring the two recipes, one after the other."""


class Planning(Protocol):
    """What it needs of the planner."""

    tryout: TryOut
    lab: Lab
    lengths: Sequence[int]
    expected: Sequence[int]

    @property
    def limit(self) -> float:
        """Seconds that one call may take."""
        ...

    def entrant(self, recipe: Recipe) -> Entrant:
        """The candidate of a recipe."""
        ...

    def limits(self, recipe: Recipe) -> Limits:
        """What the plans of a recipe may use."""
        ...


class Notes(Protocol):
    """Where a challenge is recorded that was decided here."""

    def note(self, step: Step) -> None:
        """Record it."""
        ...


class Router:
    """Proposes routes for one plan."""

    def __init__(self, planning: Planning, notes: Notes, *, open_for_good: Collection[Recipe]) -> None:
        """Processes of other recipes than `open_for_good` are ended again, unless a proposal needs them."""
        self._planning = planning
        self._notes = notes
        self._open_for_good = open_for_good

    def routes(self, plan: Plan) -> Iterator[Plan]:
        """Plans of other recipes with the plan's own for their short rows, then the plan with another recipe for its
        short rows, or with another one than it has: measured to be faster in turns with each other, judged together."""
        planning = self._planning
        shortest = planning.entrant(plan.recipe if plan.short is None else plan.short.recipe)
        # Who is served fp32 is so because nothing else is better within the budget.
        if plan.recipe == planning.tryout.teacher.recipe or not shortest.medians:
            return
        accepted = [one for one in planning.tryout.entrants if one.accepted and one.built is not None]
        others = [_timed(one) for one in accepted if one.recipe not in plan.recipes]
        alone = {one.recipe for one in accepted if one.batching is Batching.SINGLE}
        if plan.short is None:
            for recipe in rivals(_timed(shortest), others, max(shortest.medians), alone=alone):
                long = self._long_plan(plan, planning.entrant(recipe))
                if long is not None:
                    yield from self._proposal(long, shortest, rival=recipe)
        for recipe in rivals(_timed(shortest), others, min(shortest.medians), alone=alone):
            yield from self._proposal(plan.unrouted, planning.entrant(recipe), rival=recipe)

    def _long_plan(self, plan: Plan, rival: Entrant) -> Plan | None:
        """How the rival's rows would be served in the place of the plan's; None when it breaks."""
        try:
            wide = self._session(rival).wide_from(self._planning.lengths, timeout_seconds=self._planning.limit)
        except WorkerFailed:
            rival.close()
            return None
        found = first_plan(
            rival.recipe, self._planning.limits(rival.recipe), wide_from=wide if plan.streams > 1 else NEVER_WIDE
        )
        return found.model_copy(update={"streams": plan.streams, "threads_per_stream": plan.threads_per_stream})

    def _proposal(self, plan: Plan, short: Entrant, *, rival: Recipe) -> Iterator[Plan]:
        """`plan` with another recipe for its short rows, where that pays. `rival`: which of both is the challenger."""
        own = self._planning.entrant(plan.recipe)
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
                self._planning.entrant(rival).close()
        if found is not None:
            yield found

    def _measured(self, plan: Plan, own: Entrant, short: Entrant) -> Plan | None:
        """The lone rows of both in turns, each as a client that is alone would be served: on one core, or on all."""
        if own.built is None or short.built is None or own.built.io.outputs != short.built.io.outputs:
            return None
        found = looked_at(self._planning.lengths, _timed(short), _timed(own))
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
        limits = self._planning.limits(short.recipe)
        return routed(plan, short.recipe, limits, longest_tokens=longest, wide_from=wide_at)

    def _add(self, times: dict[int, list[float]], entrant: Entrant, lengths: Sequence[int], *, wide: bool) -> None:
        if lengths:
            found = self._session(entrant).lone(lengths, wide=wide, timeout_seconds=self._planning.limit)
            for tokens, milliseconds in found.items():
                times[tokens].append(milliseconds)

    def _judged(self, routed: Plan, plan: Plan, own: Entrant) -> bool:
        """Both passed the guard alone; answers of the two together (neighbours, orders) are another question."""
        try:
            verdict = self._session(own).judge_plan(routed, timeout_seconds=self._planning.limit)
        except WorkerFailed as failure:
            own.close()
            self._notes.note(Step(routed, plan, None, promoted=False, reason=f"could not be judged: {failure.reason}"))
            return False
        if not verdict.passed:
            reason = f"the two recipes together: {verdict.reason}"
            self._notes.note(Step(routed, plan, None, promoted=False, reason=reason))
        return verdict.passed

    def _session(self, entrant: Entrant) -> Session:
        if entrant.session is None:
            entrant.session = self._planning.lab.open(entrant.recipe, built=entrant.built)
        return entrant.session

    def _share(self, tokens: int) -> float:
        return share_within(self._planning.expected, tokens)


def _is_wide(plan: Plan, tokens: int) -> bool:
    return plan.streams > 1 and plan.is_wide(tokens, alone=True)


def _timed(entrant: Entrant) -> Timed:
    return Timed(entrant.recipe, entrant.medians)
