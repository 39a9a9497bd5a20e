"""Stage 2, with processes: finds the recipes that may serve the short rows beside the chosen one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from penstock.recipe import Batching, Plan, Recipe
from penstock_optimizer.isolation import WorkerFailed
from penstock_optimizer.lab import Lab, Session
from penstock_optimizer.measure import wide_from
from penstock_optimizer.search.climb import Step
from penstock_optimizer.search.route import LEAST_SHARE, boundary, looked_at, rivals, routed, share_within
from penstock_optimizer.search.space import Limits
from penstock_optimizer.search.survivors import Timed
from penstock_optimizer.tryout import Entrant, TryOut

TURNS = 5
"""Of measuring the chosen recipe and its rival, one after the other."""


class Planning(Protocol):
    """What it needs of the planner."""

    tryout: TryOut
    lab: Lab
    cores: int
    lengths: Sequence[int]
    expected: Sequence[int]

    @property
    def limit(self) -> float:
        """Seconds that one call may take."""
        ...

    def entrant(self, recipe: Recipe) -> Entrant:
        """The candidate of a recipe."""
        ...


class Notes(Protocol):
    """Where a challenge is recorded that was decided here."""

    def note(self, step: Step) -> None:
        """Record it."""
        ...


class Router:
    """Proposes routes for one plan."""

    def __init__(self, planning: Planning, notes: Notes, *, open_for_good: Collection[Recipe]) -> None:
        """Processes of other recipes than `open_for_good` are ended again."""
        self._planning = planning
        self._notes = notes
        self._open_for_good = open_for_good

    def routes(self, plan: Plan) -> Iterator[Plan]:
        """The plan with another recipe for its short rows: measured to be faster there in turns with its own, and
        judged together with it."""
        planning = self._planning
        lengths = [tokens for tokens in looked_at(planning.lengths) if self._share(tokens) >= LEAST_SHARE]
        # Who is served fp32 is so because nothing else is better within the budget.
        if not lengths or plan.recipe == planning.tryout.teacher.recipe:
            return
        own = planning.entrant(plan.recipe)
        others = [
            Timed(one.recipe, one.medians) for one in planning.tryout.entrants if one.accepted and one.built is not None
        ]
        alone = {one.recipe for one in planning.tryout.entrants if one.batching is Batching.SINGLE}
        for recipe in rivals(Timed(plan.recipe, own.medians), others, alone=alone):
            rival = planning.entrant(recipe)
            if own.built is None or rival.built is None or rival.built.io.outputs != own.built.io.outputs:
                continue
            proposal = self._proposal(plan, own, rival, lengths)
            if proposal is not None:
                yield proposal

    def _proposal(self, plan: Plan, own: Entrant, rival: Entrant, lengths: Sequence[int]) -> Plan | None:
        try:
            found = self._measured(plan, own, rival, lengths)
        except WorkerFailed:
            # Its own process, if it was that, is started again by the search.
            for one in (own, rival):
                one.close()
            return None
        finally:
            if rival.recipe not in self._open_for_good:
                rival.close()
        return found if found is not None and self._judged(found, plan, own) else None

    def _measured(self, plan: Plan, own: Entrant, rival: Entrant, lengths: Sequence[int]) -> Plan | None:
        """The lone rows of both in turns, each as it would be served: on one core, or on all."""
        ours = {tokens: list[float]() for tokens in lengths}
        narrow = {tokens: list[float]() for tokens in lengths}
        wide = {tokens: list[float]() for tokens in lengths}
        may_be_wide = plan.streams > 1
        for _ in range(TURNS):
            self._add(ours, own, [tokens for tokens in lengths if not _is_wide(plan, tokens)], wide=False)
            self._add(ours, own, [tokens for tokens in lengths if _is_wide(plan, tokens)], wide=True)
            self._add(narrow, rival, lengths, wide=False)
            if may_be_wide:
                self._add(wide, rival, lengths, wide=True)
        longest = boundary(ours, narrow)
        if longest is None:
            return None
        short = [tokens for tokens in lengths if tokens <= longest]
        from_tokens = wide_from(short, lambda n: min(narrow[n]), lambda n: min(wide[n])) if may_be_wide else None
        limits = Limits(self._planning.cores, rival.batching, tuple(self._planning.lengths))
        return routed(plan, rival.recipe, limits, longest_tokens=longest, wide_from_tokens=from_tokens)

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
    return plan.streams > 1 and plan.wide_from_tokens is not None and tokens >= plan.wide_from_tokens
