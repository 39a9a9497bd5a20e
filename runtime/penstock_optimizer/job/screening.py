"""Stage 1, with processes: builds each candidate, has a first look, asks the guard, and measures the promising ones in
turns. What becomes of a candidate is a record; nothing that a candidate does ends the stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import OutOfDisk
from penstock.manifest import CandidateFacts, LatencyPoint, Outcome, Verdict
from penstock.recipe import Batching, Recipe
from penstock_optimizer.candidate.isolation import Failure, WorkerFailed
from penstock_optimizer.candidate.lab import BuiltFacts, Lab, Session
from penstock_optimizer.job.artefact import digests
from penstock_optimizer.job.budget import KILL_SECONDS, Budget
from penstock_optimizer.job.work_folder import CandidateRecord, WorkFolder
from penstock_optimizer.load.summary import median, relative_spread
from penstock_optimizer.search.survivors import (
    CUT_OFF,
    NO_TURN,
    NOT_MEASURED,
    WITHIN_BUDGET,
    Timed,
    expected_milliseconds,
    hopeless,
)
from penstock_runtime.host.disk import full, is_full

ROUNDS = 3
"""Interleaved rounds of measuring at length."""
LOOK_SECONDS = 0.05
MEASURE_SECONDS = 0.25
"""For each length and round."""
MOST_OPEN = 6
"""Processes that wait for being measured; each holds a model."""
BYTES_OPEN = 3.0
"""Memory of such a process over the size of the fp32 graph: file, weights, packed weights."""
PROCESS_BYTES = 150_000_000
"""Python and libraries."""
MOST_OF_THE_REST = 0.6
"""No candidate may use up more than this share of the stage's remaining time: one that hangs must leave the others
their turn."""
LEAST_SECONDS = 3.0
"""A candidate is not begun with less time than this: it could not even start."""
HANGS_SECONDS = 15.0
"""What does not end within so long is held against the candidate; within less, against the time budget."""
WORK = "the work folder"


@dataclass
class Entrant:
    """A candidate on its way."""

    recipe: Recipe
    facts: CandidateFacts
    built: BuiltFacts | None = None
    session: Session | None = None
    milliseconds: dict[int, list[float]] = field(default_factory=dict)

    @property
    def medians(self) -> dict[int, float]:
        """Median milliseconds by tokens."""
        return {tokens: median(values) for tokens, values in self.milliseconds.items() if values}

    @property
    def fastest(self) -> dict[int, float]:
        """Fastest run in milliseconds by tokens: what a glance can trust on a machine that does other work."""
        return {tokens: min(values) for tokens, values in self.milliseconds.items() if values}

    @property
    def accepted(self) -> bool:
        """True when the guard lets it serve and it can run."""
        return self.facts.outcome in {Outcome.TEACHER, Outcome.SLOWER, Outcome.CHOSEN}

    @property
    def batching(self) -> Batching:
        """The widest batching that the guard proved."""
        verdict = self.facts.verdict
        return Batching(verdict.batching) if verdict is not None and verdict.batching else Batching.SINGLE

    def settle(self, outcome: Outcome, reason: str) -> None:
        """Say what became of it."""
        self.facts = self.facts.model_copy(update={"outcome": outcome, "reason": reason})

    def settle_failed(self, failure: WorkerFailed, when: str = "") -> None:
        """Say how it failed; or, where it had too little time for that to be said, that the budget cut it off."""
        if failure.failure is not Failure.TIMED_OUT or failure.seconds >= HANGS_SECONDS:
            self.settle(Outcome.FAILED, f"{failure.reason}{when}")
        else:
            verdict = self.facts.verdict
            self.settle(Outcome.SKIPPED, NOT_MEASURED if verdict is not None and verdict.passed else CUT_OFF)

    def close(self) -> None:
        """End its process."""
        if self.session is not None:
            self.session.close()
            self.session = None


class TryOut:
    """Runs the stage. `close` ends all processes."""

    def __init__(
        self,
        lab: Lab,
        work: WorkFolder,
        budget: Budget,
        *,
        lengths: Sequence[int],
        expected: Sequence[int] = (),
        on_settled: Callable[[Entrant], None] = lambda _: None,
        most_open: int = MOST_OPEN,
    ) -> None:
        self._lab = lab
        self._work = work
        self._budget = budget
        self._lengths = tuple(lengths)
        self._expected = tuple(expected) or self._lengths
        """A sample of the workload's lengths: what an entrant is worth at first sight."""
        self._on_settled = on_settled
        self.most_open = most_open
        self.entrants: list[Entrant] = []

    def close(self) -> None:
        """End all processes."""
        for entrant in self.entrants:
            entrant.close()

    @property
    def teacher(self) -> Entrant:
        """The first entrant."""
        return self.entrants[0]

    def enter(self, recipe: Recipe, *, teacher: bool = False) -> Entrant:
        """Try one candidate: from disk where it is known, else built, looked at and judged.

        The teacher comes first, and its failure is the caller's: WorkerFailed. OutOfDisk where nothing can be written.
        """
        entrant = Entrant(recipe, CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason=NO_TURN))
        self.entrants.append(entrant)
        known = self._work.load(recipe)
        if teacher and known is not None and not (known.taught and known.taught == self._work.taught()):
            # What all others are judged by is lost or damaged: it is taught again.
            known = None
        try:
            if known is not None:
                self._recall(entrant, known)
            elif teacher or self._left() > LEAST_SECONDS:
                self._try(entrant, teacher=teacher)
        except WorkerFailed as failure:
            entrant.close()
            if teacher:
                raise
            if failure.kind == OutOfDisk.__name__ or (failure.failure is not Failure.TIMED_OUT and self._is_full()):
                # None of its doing: with room on the disk it may be the best of all.
                raise full(self._work.path, what=WORK) from failure
            entrant.settle_failed(failure)
            # What ran out of time or memory may succeed with more of it, which an hour later may be there: only what
            # really failed is remembered.
            if failure.failure is not Failure.TIMED_OUT and not failure.out_of_memory:
                self._remember(entrant)
        self._on_settled(entrant)
        self._make_room()
        return entrant

    def skip(self, recipe: Recipe, reason: str) -> None:
        """Put a candidate on record that is not tried."""
        self.entrants.append(Entrant(recipe, CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason=reason)))
        self._on_settled(self.entrants[-1])

    def measure(self, *, on_round: Callable[[int], None] = lambda _: None) -> None:
        """Measure what is still open at length, in turns, so that drifts of the machine hit all alike."""
        for number in range(ROUNDS):
            for entrant in [one for one in self.entrants if one.session is not None]:
                left = self._budget.left_for_plans() - KILL_SECONDS
                if left < LEAST_SECONDS and (number or entrant is not self.teacher):
                    break
                limit = self._limit(teacher=True) if entrant is self.teacher else left
                self._measure_once(entrant, max(limit, LEAST_SECONDS), first=number == 0)
            on_round(number + 1)
        for entrant in self.entrants:
            if entrant.milliseconds:
                entrant.facts = entrant.facts.model_copy(update={"latency": points(entrant.milliseconds)})
            if entrant is not self.teacher and entrant.session is not None and not self._is_timed(entrant):
                # A glance is not held against the others: nothing may be said to have been beaten by it.
                entrant.close()
                entrant.settle(Outcome.SKIPPED, NOT_MEASURED)
                self._on_settled(entrant)

    def timed(self) -> list[Timed]:
        """The accepted entrants that were measured at length and still run, the teacher included."""
        return [
            Timed(one.recipe, one.medians)
            for one in self.entrants
            if one.accepted and one.session is not None and self._is_timed(one)
        ]

    def _is_timed(self, entrant: Entrant) -> bool:
        return set(self._lengths) <= entrant.medians.keys()

    def _measure_once(self, entrant: Entrant, left: float, *, first: bool) -> None:
        assert entrant.session is not None  # noqa: S101 - only open ones are asked
        try:
            times = entrant.session.time(self._lengths, seconds=MEASURE_SECONDS, timeout_seconds=left)
        except WorkerFailed as failure:
            entrant.close()
            if entrant is self.teacher:
                raise
            entrant.settle_failed(failure, " while it was measured")
            self._on_settled(entrant)
            return
        if first:
            # The first look was warm-up.
            entrant.milliseconds = {}
        for tokens, values in times.items():
            entrant.milliseconds.setdefault(tokens, []).extend(values)

    def _is_full(self) -> bool:
        return is_full(self._work.path)

    def _left(self) -> float:
        return self._budget.left_for_candidates() - KILL_SECONDS

    def _try(self, entrant: Entrant, *, teacher: bool) -> None:
        entrant.session = session = self._lab.open(entrant.recipe)
        entrant.built = built = session.build(timeout_seconds=self._limit(teacher=teacher))
        entrant.facts = entrant.facts.model_copy(
            update={
                "fused_nodes": built.fused_nodes,
                "build_seconds": built.seconds,
                "size_bytes": built.size_bytes,
            }
        )
        self._look(entrant, self._limit(teacher=teacher))
        entrant.facts = entrant.facts.model_copy(update={"latency": points(entrant.milliseconds)})
        verdict = session.judge(timeout_seconds=self._limit(teacher=teacher))
        self._decide(entrant, verdict, teacher=teacher)
        self._remember(entrant)

    def _recall(self, entrant: Entrant, known: CandidateRecord) -> None:
        """Take up a candidate from disk: verdicts stay, times are measured again with all the others."""
        entrant.facts = known.facts
        entrant.milliseconds = {point.tokens: [point.p50_milliseconds] for point in known.facts.latency}
        if known.io is not None and known.graph:
            entrant.built = BuiltFacts(
                graph=known.graph,
                io=known.io,
                fused_nodes=known.facts.fused_nodes,
                size_bytes=known.facts.size_bytes,
                seconds=known.facts.build_seconds,
            )
        goes_on = entrant is self.teacher or entrant.facts.reason == WITHIN_BUDGET
        if goes_on and entrant.accepted and entrant.built is not None:
            entrant.session = self._lab.open(entrant.recipe, built=entrant.built)
            if self._left() > LEAST_SECONDS:
                # A glance of another hour, on a machine that may have been busy then, says nothing beside one of now.
                entrant.milliseconds = {}
                self._look(entrant, self._limit(teacher=entrant is self.teacher))
                entrant.facts = entrant.facts.model_copy(update={"latency": points(entrant.milliseconds)})

    def _decide(self, entrant: Entrant, verdict: Verdict, *, teacher: bool) -> None:
        entrant.facts = entrant.facts.model_copy(update={"verdict": verdict})
        if teacher:
            entrant.settle(Outcome.TEACHER, "the fp32 graph that the others are judged by")
        elif not verdict.passed:
            entrant.settle(Outcome.REJECTED, verdict.reason)
            entrant.close()
        elif (best := self._best(entrant)) is not None and self._is_hopeless(entrant, best):
            ours, theirs = entrant.fastest, best.fastest
            factor = min(ours[tokens] / theirs[tokens] for tokens in ours.keys() & theirs.keys())
            entrant.facts = entrant.facts.model_copy(update={"latency": points(entrant.milliseconds)})
            fastest = f"{best.recipe.engine.value} {best.recipe.precision.value}"
            entrant.settle(Outcome.SLOWER, f"at first sight at least {factor:.1f} times as slow as {fastest}")
            entrant.close()
        else:
            entrant.settle(Outcome.SLOWER, WITHIN_BUDGET)

    def _is_hopeless(self, entrant: Entrant, best: Entrant) -> bool:
        """Far behind at first sight, and still so when both are looked at again in turns: a disturbed first look must
        not cost the best candidate its place."""
        if not hopeless(entrant.fastest, best.fastest):
            return False
        for one in (best, entrant) * 2:
            try:
                self._look(one, self._limit(teacher=False))
            except WorkerFailed as failure:
                if one is entrant or one is self.teacher:
                    raise
                one.close()
                one.settle_failed(failure, " while it was measured")
                return False
        return hopeless(entrant.fastest, best.fastest)

    def _look(self, entrant: Entrant, timeout_seconds: float) -> None:
        """Time a few runs at a few lengths, on top of those that were timed already."""
        assert entrant.session is not None  # noqa: S101 - only open ones are looked at
        look = entrant.session.time(self._look_lengths, seconds=LOOK_SECONDS, timeout_seconds=timeout_seconds)
        for tokens, values in look.items():
            entrant.milliseconds.setdefault(tokens, []).extend(values)

    def _best(self, other_than: Entrant) -> Entrant | None:
        """The fastest entrant so far, by first looks, among those that may serve."""
        open_ones = [
            one
            for one in self.entrants
            if one is not other_than and one.accepted and one.session is not None and one.milliseconds
        ]
        return min(open_ones, key=self._glance, default=None)

    def _glance(self, entrant: Entrant) -> float:
        """Milliseconds to expect over the workload. Not a sum over lengths, which the longest alone would decide."""
        return expected_milliseconds(entrant.fastest, self._expected)

    def _make_room(self) -> None:
        """Close the slowest process when there are too many; the teacher stays."""
        open_ones = [one for one in self.entrants[1:] if one.session is not None and one.milliseconds]
        while len(open_ones) >= self.most_open:
            slowest = max(open_ones, key=self._glance)
            slowest.close()
            slowest.settle(Outcome.SLOWER, f"slower at first sight than {len(open_ones) - 1} others")
            open_ones.remove(slowest)

    @property
    def _look_lengths(self) -> tuple[int, ...]:
        """Three of the lengths: a short, a middling and a long one, the longest left out as it would take longest."""
        last = max(len(self._lengths) - 2, 0)
        return tuple(dict.fromkeys(self._lengths[position] for position in (0, last // 2, last)))

    def _limit(self, *, teacher: bool) -> float:
        """The teacher may use the time of the candidates' and the plans' stages: without it there is nothing."""
        left = self._budget.left_for_capacity() if teacher else MOST_OF_THE_REST * self._left()
        return max(left, 0.1)

    def _remember(self, entrant: Entrant) -> None:
        built = entrant.built
        folder = self._work.candidate(entrant.recipe)
        files: dict[str, str] = {}
        if built is not None:
            with contextlib.suppress(OSError):
                files = digests(folder)
        self._work.save(
            CandidateRecord(
                facts=entrant.facts,
                graph=built.graph if built else "",
                io=built.io if built else None,
                files=files,
                taught=self._work.taught() if entrant is self.teacher else "",
            )
        )


def most_open(available_bytes: int, graph_bytes: int) -> int:
    """How many processes, besides the teacher's, the memory is good for: at least two, to have something to compare,
    and half of what is free is left alone."""
    each = BYTES_OPEN * graph_bytes + PROCESS_BYTES
    return max(2, min(MOST_OPEN, int(available_bytes / 2 / each) - 1))


def points(milliseconds: Mapping[int, Sequence[float]]) -> tuple[LatencyPoint, ...]:
    """Median, minimum and spread at each length."""
    return tuple(
        LatencyPoint(
            tokens=tokens,
            p50_milliseconds=median(values),
            minimum_milliseconds=min(values),
            spread=relative_spread(values),
        )
        for tokens, values in sorted(milliseconds.items())
        if values
    )
