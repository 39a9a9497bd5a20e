"""Runs the judging requests through the tasks and the engine that serve, and asks for a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.manifest import Verdict
from penstock.resources.endpoint import AccuracyBudget
from penstock_optimizer.guard.invariance import FP32, Alone, Arithmetic, Forward, measure_invariance
from penstock_optimizer.guard.judge import judge
from penstock_optimizer.guard.sample import Observed, Sample
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.errors import InferenceFailed, InvalidInput
from penstock_runtime.rows import Row
from penstock_runtime.tasks.base import Prepared, Task


@dataclass(frozen=True, eq=False)
class Teacher:
    """The judging requests, tokenised once, with the fp32 graph's outcomes."""

    prepared: tuple[Prepared, ...]
    observed: tuple[Observed, ...]

    @property
    def rows(self) -> list[Row]:
        """All rows of all requests."""
        return [row for prepared in self.prepared for row in prepared.rows]


def prepare(task: Task, samples: Sequence[Sample]) -> tuple[Prepared, ...]:
    """Tokenise requests; those that the task refuses (too long where nothing may be cut), and those of which nothing is
    left to run, are left out."""
    result = []
    for sample in samples:
        try:
            prepared = task.prepare(task.parse(sample.inputs, sample.parameters))
        except InvalidInput:
            continue
        if prepared.rows:
            result.append(prepared)
    return tuple(result)


def observe(task: Task, forward: Forward, prepared: Prepared) -> Observed:
    """One request's outcome, each of its rows run alone. InferenceFailed for NaN, as when serving."""
    reduced = tuple(task.reduce(row, forward([row])[0]) for row in prepared.rows)
    return Observed(task.assemble(prepared, reduced), reduced)


def teach(task: Task, forward: Forward, samples: Sequence[Sample]) -> Teacher:
    """The teacher's side, once for all candidates."""
    prepared = prepare(task, samples)
    return Teacher(prepared, tuple(observe(task, forward, one) for one in prepared))


def guard_candidate(
    task: Task,
    forward: Forward,
    teacher: Teacher,
    budget: AccuracyBudget,
    *,
    arithmetic: Arithmetic = FP32,
    grid: ShapeGrid | None = None,
) -> Verdict:
    """Judge a candidate: its answers one row at a time, and whether they stay the same in company, as far as its
    arithmetic (`arithmetic_of`) can, in the shapes that its engine rounds to (`grid`).

    A candidate whose engine fails or whose outputs hold NaN is not accepted; other errors are the caller's.
    """
    try:
        alone = Alone(forward)
        observed = [observe(task, alone, prepared) for prepared in teacher.prepared]
    except InferenceFailed as error:
        return Verdict(passed=False, reason=f"a judging request failed: {error.message}", texts=len(teacher.prepared))
    verdict = judge(task.name, teacher.observed, observed, budget)
    if not verdict.passed:
        return verdict
    invariance = measure_invariance(forward, teacher.rows, alone=alone, arithmetic=arithmetic, grid=grid)
    return verdict.model_copy(
        update={"metrics": (*verdict.metrics, *invariance.metrics), "batching": invariance.batching.value}
    )


def guard_answers(task: Task, forward: Forward, teacher: Teacher, budget: AccuracyBudget) -> Verdict:
    """Judge the answers alone, row by row: for two graphs that were each proved in company, and now serve together."""
    try:
        observed = [observe(task, forward, prepared) for prepared in teacher.prepared]
    except InferenceFailed as error:
        return Verdict(passed=False, reason=f"a judging request failed: {error.message}", texts=len(teacher.prepared))
    return judge(task.name, teacher.observed, observed, budget)
