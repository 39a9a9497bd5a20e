"""Stage 1, screening: builds each candidate, times it briefly, judges it, and measures the promising ones alternately.

Each candidate runs in a separate process. Its outcome is a record: a candidate that crashes, hangs or gives wrong
answers does not end the stage. `Budget` divides the time of the whole optimisation, so that the last stages always get
their share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from penstock.errors import OutOfDisk
from penstock.manifest import CandidateFacts, LatencyPoint, Outcome, ReasonCode, Verdict
from penstock.recipe import Batching, Recipe
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from penstock_optimizer.candidate.runner import CandidateRunner, CandidateSession
from penstock_optimizer.candidate.work_folder import BuiltFacts, CandidateRecord, WorkFolder, digests
from penstock_optimizer.load.generator import relative_spread
from penstock_optimizer.search.space import MeasuredRecipe, expected_milliseconds, is_dominated
from penstock_optimizer.targets.target import MAX_REMAINING_SHARE, Budget
from penstock_runtime.host.disk import full_disk_error, is_full

KILL_SECONDS = 1.0
"""A call to a worker is cut this long before its stage ends: killing and cleaning up take time too."""
ROUNDS = 3
"""Interleaved rounds of measuring at length."""
QUICK_SECONDS = 0.05
MEASURE_SECONDS = 0.25
"""For each length and round."""
MAX_OPEN = 6
"""Processes that wait to be measured; each holds a model."""
MEMORY_PER_GRAPH_BYTE = 3.0
"""Memory of such a process over the size of the fp32 graph: file, weights and packed weights."""
PROCESS_BYTES = 150_000_000
"""Python and its libraries."""
LEAST_SECONDS = 3.0
"""A candidate is not started with less time than this: its process could not even start."""
HANGS_SECONDS = 15.0
"""A call that does not end within this time fails the candidate; one that had less time is put down to the time budget.
"""
WORK = "the work folder"


@dataclass
class CandidateRun:
    """One candidate during an optimisation: its process, its measurements and its outcome so far."""

    recipe: Recipe
    facts: CandidateFacts
    built: BuiltFacts | None = None
    session: CandidateSession | None = None
    milliseconds: dict[int, list[float]] = field(default_factory=dict)

    @classmethod
    def skipped(cls, recipe: Recipe, reason: str | ReasonCode) -> CandidateRun:
        """A candidate that is not tried."""
        return cls(
            recipe, CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason="").settled(Outcome.SKIPPED, reason)
        )

    @property
    def medians(self) -> dict[int, float]:
        """Median milliseconds by tokens."""
        return {tokens: median(values) for tokens, values in self.milliseconds.items() if values}

    @property
    def fastest(self) -> dict[int, float]:
        """Fastest run in milliseconds by tokens: a quick sample shows no more on a machine that does other work."""
        return {tokens: min(values) for tokens, values in self.milliseconds.items() if values}

    @property
    def accepted(self) -> bool:
        """True when the guard accepts it and it runs."""
        return self.facts.outcome in {Outcome.REFERENCE, Outcome.SLOWER, Outcome.CHOSEN}

    @property
    def batching(self) -> Batching:
        """The widest batching that the guard has proved."""
        verdict = self.facts.verdict
        return Batching(verdict.batching) if verdict is not None and verdict.batching else Batching.SINGLE

    def settle(self, outcome: Outcome, reason: str | ReasonCode, code: ReasonCode = ReasonCode.OTHER) -> None:
        """Set the outcome and its reason."""
        self.facts = self.facts.settled(outcome, reason, code)

    def settle_failed(self, failure: WorkerFailed, when: str = "") -> None:
        """Set how it failed; where the time was too short to know, that the budget cut it off."""
        self.facts = failed_facts(self.facts, failure, when)

    def close(self) -> None:
        """End its process."""
        if self.session is not None:
            self.session.close()
            self.session = None


def failed_facts(facts: CandidateFacts, failure: WorkerFailed, when: str = "") -> CandidateFacts:
    """Facts of a candidate with a process that failed; where the time was too short to know, the budget cut it off."""
    reason = f"{failure.reason}{when}"
    if failure.failure is not CallFailure.TIMED_OUT:
        return facts.settled(Outcome.FAILED, reason)
    if failure.seconds >= HANGS_SECONDS:
        return facts.settled(Outcome.FAILED, reason, ReasonCode.TIMED_OUT)
    passed = facts.verdict is not None and facts.verdict.passed
    return facts.settled(Outcome.SKIPPED, ReasonCode.NOT_MEASURED if passed else ReasonCode.CUT_OFF)


def raise_full_disk(failure: WorkerFailed, work: WorkFolder) -> None:
    """OutOfDisk if a full disk explains the failure: with space on the disk the candidate may be the best of all."""
    if failure.kind == OutOfDisk.__name__ or (failure.failure is not CallFailure.TIMED_OUT and is_full(work.path)):
        raise full_disk_error(work.path, what=WORK) from failure


class Screening:
    """Runs the stage. `close` ends all processes."""

    def __init__(
        self,
        runner: CandidateRunner,
        work: WorkFolder,
        budget: Budget,
        *,
        lengths: Sequence[int],
        expected: Sequence[int] = (),
        on_settled: Callable[[CandidateRun], None] = lambda _: None,
        max_open: int = MAX_OPEN,
    ) -> None:
        self._runner = runner
        self._work = work
        self._budget = budget
        self._lengths = tuple(lengths)
        self._expected = tuple(expected) or self._lengths
        """A sample of the workload's lengths, to weigh a quick sample with."""
        self._on_settled = on_settled
        self.max_open = max_open
        self.runs: list[CandidateRun] = []

    def close(self) -> None:
        """End all processes."""
        for run in self.runs:
            run.close()

    @property
    def reference(self) -> CandidateRun:
        """The run of the fp32 reference, which is the first."""
        return self.runs[0]

    def run_of(self, recipe: Recipe) -> CandidateRun:
        """The run of a recipe."""
        return next(one for one in self.runs if one.recipe == recipe)

    def enter(self, recipe: Recipe, *, reference: bool = False) -> CandidateRun:
        """Try one candidate: load it from disk where it is known, else build it, time it briefly and judge it.

        The reference comes first; its failure is raised: WorkerFailed. OutOfDisk when the disk is full.
        """
        run = CandidateRun.skipped(recipe, ReasonCode.NO_TURN)
        self.runs.append(run)
        known = self._work.load(recipe)
        if reference and known is not None and not (known.taught and known.taught == self._work.reference_digest()):
            # The outcomes that all candidates are judged by are lost or damaged: compute them again.
            known = None
        try:
            if known is not None:
                self._recall(run, known)
            elif reference or self._left() > LEAST_SECONDS:
                self._try(run, reference=reference)
        except WorkerFailed as failure:
            run.close()
            if reference:
                raise
            raise_full_disk(failure, self._work)
            run.settle_failed(failure)
            # A candidate that ran out of time or memory may succeed with more of it in the next run: only real failures
            # are stored.
            if failure.failure is not CallFailure.TIMED_OUT and not failure.out_of_memory:
                self._remember(run)
        self._on_settled(run)
        self._make_room()
        return run

    def skip(self, recipe: Recipe, reason: str) -> None:
        """Record a candidate that is not tried."""
        self.runs.append(CandidateRun.skipped(recipe, reason))
        self._on_settled(self.runs[-1])

    def measure(self, *, on_round: Callable[[int], None] = lambda _: None) -> None:
        """Measure the open candidates at length, in rounds, so that drifts of the machine affect all alike."""
        for number in range(ROUNDS):
            for run in [one for one in self.runs if one.session is not None]:
                left = self._budget.left_for_plans() - KILL_SECONDS
                if left < LEAST_SECONDS and (number or run is not self.reference):
                    break
                limit = self._limit(reference=True) if run is self.reference else left
                self._measure_once(run, max(limit, LEAST_SECONDS), first=number == 0)
            on_round(number + 1)
        for run in self.runs:
            if run.milliseconds:
                run.facts = run.facts.model_copy(update={"latency": latency_points(run.milliseconds)})
            if run is not self.reference and run.session is not None and not self._is_timed(run):
                # A quick sample does not compare: it must not make a candidate the slower one.
                run.close()
                run.settle(Outcome.SKIPPED, ReasonCode.NOT_MEASURED)
                self._on_settled(run)

    def timed(self) -> list[MeasuredRecipe]:
        """The accepted candidates that were measured at length and still run, the reference included."""
        return [
            MeasuredRecipe(one.recipe, one.medians)
            for one in self.runs
            if one.accepted and one.session is not None and self._is_timed(one)
        ]

    def _is_timed(self, run: CandidateRun) -> bool:
        return set(self._lengths) <= run.medians.keys()

    def _measure_once(self, run: CandidateRun, left: float, *, first: bool) -> None:
        assert run.session is not None  # noqa: S101 - only open ones are measured
        try:
            times = run.session.time(self._lengths, seconds=MEASURE_SECONDS, timeout_seconds=left)
        except WorkerFailed as failure:
            run.close()
            if run is self.reference:
                raise
            run.settle_failed(failure, " while it was measured")
            self._on_settled(run)
            return
        if first:
            # The quick sample was warm-up.
            run.milliseconds = {}
        for tokens, values in times.items():
            run.milliseconds.setdefault(tokens, []).extend(values)

    def _left(self) -> float:
        return self._budget.left_for_candidates() - KILL_SECONDS

    def _try(self, run: CandidateRun, *, reference: bool) -> None:
        run.session = session = self._runner.open(run.recipe)
        run.built = built = session.build(timeout_seconds=self._limit(reference=reference))
        run.facts = run.facts.model_copy(
            update={
                "fused_nodes": built.fused_nodes,
                "build_seconds": built.seconds,
                "size_bytes": built.size_bytes,
            }
        )
        self._measure_quickly(run, self._limit(reference=reference))
        run.facts = run.facts.model_copy(update={"latency": latency_points(run.milliseconds)})
        verdict = session.judge(timeout_seconds=self._limit(reference=reference))
        self._decide(run, verdict, reference=reference)
        self._remember(run)

    def _recall(self, run: CandidateRun, known: CandidateRecord) -> None:
        """Load a candidate from disk: its verdict stays, its times are measured again with all candidates."""
        run.facts = known.facts
        run.milliseconds = {point.tokens: [point.p50_milliseconds] for point in known.facts.latency}
        run.built = known.built
        goes_on = run is self.reference or run.facts.reason_code is ReasonCode.WITHIN_BUDGET
        if goes_on and run.accepted and run.built is not None:
            run.session = self._runner.open(run.recipe, built=run.built)
            if self._left() > LEAST_SECONDS:
                # A quick sample of another run, on a machine that may have been busy then, does not compare with one of
                # now.
                run.milliseconds = {}
                self._measure_quickly(run, self._limit(reference=run is self.reference))
                run.facts = run.facts.model_copy(update={"latency": latency_points(run.milliseconds)})

    def _decide(self, run: CandidateRun, verdict: Verdict, *, reference: bool) -> None:
        run.facts = run.facts.model_copy(update={"verdict": verdict})
        if reference:
            run.settle(Outcome.REFERENCE, "the fp32 graph that the others are judged by")
        elif not verdict.passed:
            run.settle(Outcome.REJECTED, verdict.reason)
            run.close()
        elif (best := self._best(run)) is not None and self._is_dominated(run, best):
            ours, theirs = run.fastest, best.fastest
            factor = min(ours[tokens] / theirs[tokens] for tokens in ours.keys() & theirs.keys())
            run.facts = run.facts.model_copy(update={"latency": latency_points(run.milliseconds)})
            run.settle(Outcome.SLOWER, f"at first sight at least {factor:.1f} times as slow as {best.recipe.name}")
            run.close()
        else:
            run.settle(Outcome.SLOWER, ReasonCode.WITHIN_BUDGET)

    def _is_dominated(self, run: CandidateRun, best: CandidateRun) -> bool:
        """True when it is far slower in the quick sample and still is when both are sampled again alternately: one
        disturbed sample must not exclude the best candidate."""
        if not is_dominated(run.fastest, best.fastest):
            return False
        for one in (best, run) * 2:
            try:
                self._measure_quickly(one, self._limit(reference=False))
            except WorkerFailed as failure:
                if one is run or one is self.reference:
                    raise
                one.close()
                one.settle_failed(failure, " while it was measured")
                return False
        return is_dominated(run.fastest, best.fastest)

    def _measure_quickly(self, run: CandidateRun, timeout_seconds: float) -> None:
        """Time a few runs at a few lengths, and add them to those timed before."""
        assert run.session is not None  # noqa: S101 - only open ones are sampled
        sample = run.session.time(self._quick_lengths, seconds=QUICK_SECONDS, timeout_seconds=timeout_seconds)
        for tokens, values in sample.items():
            run.milliseconds.setdefault(tokens, []).extend(values)

    def _best(self, other_than: CandidateRun) -> CandidateRun | None:
        """The fastest accepted candidate so far, by quick samples."""
        open_ones = [
            one
            for one in self.runs
            if one is not other_than and one.accepted and one.session is not None and one.milliseconds
        ]
        return min(open_ones, key=self._quick_expected, default=None)

    def _quick_expected(self, run: CandidateRun) -> float:
        """Expected milliseconds over the workload. Not a sum over lengths, which the longest would decide alone."""
        return expected_milliseconds(run.fastest, self._expected)

    def _make_room(self) -> None:
        """Close the slowest processes when too many are open; the reference stays open."""
        open_ones = [one for one in self.runs[1:] if one.session is not None and one.milliseconds]
        while len(open_ones) >= self.max_open:
            slowest = max(open_ones, key=self._quick_expected)
            slowest.close()
            slowest.settle(Outcome.SLOWER, f"slower at first sight than {len(open_ones) - 1} others")
            open_ones.remove(slowest)

    @property
    def _quick_lengths(self) -> tuple[int, ...]:
        """Three of the lengths: short, middle and long, without the longest, which would take most of the time."""
        last = max(len(self._lengths) - 2, 0)
        return tuple(dict.fromkeys(self._lengths[position] for position in (0, last // 2, last)))

    def _limit(self, *, reference: bool) -> float:
        """The reference may use the time of the next stages too: without it there is no result."""
        left = self._budget.left_for_capacity() if reference else MAX_REMAINING_SHARE * self._left()
        return max(left, 0.1)

    def _remember(self, run: CandidateRun) -> None:
        built = run.built
        folder = self._work.candidate(run.recipe)
        files: dict[str, str] = {}
        if built is not None:
            with contextlib.suppress(OSError):
                files = digests(folder)
        self._work.save(
            CandidateRecord(
                facts=run.facts,
                graph=built.graph if built else "",
                io=built.io if built else None,
                files=files,
                taught=self._work.reference_digest() if run is self.reference else "",
            )
        )


def max_open_processes(available_bytes: int, graph_bytes: int) -> int:
    """How many processes besides the reference's fit the memory: at least two, to have something to compare; half of
    the free memory is left alone."""
    each = MEMORY_PER_GRAPH_BYTE * graph_bytes + PROCESS_BYTES
    return max(2, min(MAX_OPEN, int(available_bytes / 2 / each) - 1))


def latency_points(milliseconds: Mapping[int, Sequence[float]]) -> tuple[LatencyPoint, ...]:
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
