"""Judges a candidate with the tasks and the engine that serve: its answers alone, and whether batching changes them.

In a batch, each request must get the answer that it would get alone. Dynamic int8 breaks this: the scale of its
activations comes from the whole batch. Static and fp32 graphs keep it, if a row's numbers are summed in the same order
whatever the other rows are; otherwise the last bits change, and rounding to int8 sometimes makes that a step of
its grid, which every later layer enlarges.

The batches are those that the runtime's batch policy makes of the judging rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from penstock.manifest import GraphIO, Metric, Verdict
from penstock.recipe import BF16_REST, LARGEST_BATCH_TOKENS, LARGEST_PADDING_SHARE, Batching, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget
from penstock_optimizer.guard.judge import ObservedAnswer, SampleRequest, judge
from penstock_runtime.batching.collate import run_rows
from penstock_runtime.batching.queue import BatchPolicy, RowQueue
from penstock_runtime.engines.base import Engine
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.errors import InferenceFailed, InvalidInput
from penstock_runtime.rows import Outputs, Row
from penstock_runtime.tasks.base import Judged, JudgedWith, Prepared, Task

Forward = Callable[[Sequence[Row]], Sequence[Outputs]]
"""Runs rows in one batch, padded to the longest, and returns each row's outputs without padding."""

TOLERANCE = 1e-4
"""The largest relative difference |batched - alone| / |alone| of a row's outputs that counts as equal: what summing in
another order changes in a deep fp32 model. It changes the cosine of a vector by 5e-9."""
BF16_TOLERANCE = 2.0**-8
"""The same where activations are rounded to bf16: the largest error of one rounding."""
ROWS_PER_BATCH = 8
LONG_TOKENS = 64
LONG_ROWS = 4
"""How many longer rows are compared: they cost much, and their sums are made in the same way as for shorter ones."""
WAITING = 24
"""Rows in the queue while padded batches are made, as under load."""
SEED = 20261121
"""Seed of their order in the queue."""


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a recipe, as far as batching matters."""

    tolerance: float = TOLERANCE
    rounds: bool = False
    """Activations are rounded on the way. Where sums differ in their last bits, a number crosses a rounding limit so
    rarely that samples may not show it (2 of 100 pairs of MiniLM's rows), and then changes by 2 %."""


FP32 = Arithmetic()


def arithmetic_of(recipe: Recipe) -> Arithmetic:
    """The arithmetic of a recipe."""
    if recipe.precision is Precision.FP32:
        return FP32
    is_bf16 = recipe.precision is Precision.BF16 or BF16_REST in recipe.options
    return Arithmetic(BF16_TOLERANCE if is_bf16 else TOLERANCE, rounds=True)


def forward_of(engine: Engine, io: GraphIO) -> Forward:
    """An engine's forward pass, with the code that serves."""
    return partial(run_rows, engine.run, io)


@dataclass(eq=False)
class SingleRowForward:
    """Runs one row at a time, and caches the outputs of shorter rows: the guard needs them twice."""

    forward: Forward
    _kept: dict[int, tuple[Row, Outputs]] = field(default_factory=dict)

    def __call__(self, rows: Sequence[Row]) -> list[Outputs]:
        """Each row's outputs, run alone."""
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Outputs:
        if id(row) not in self._kept:
            outputs = self.forward([row])[0]
            if row.length > LONG_TOKENS:
                return outputs
            # The row is stored too, so that no other one can get its id.
            self._kept[id(row)] = (row, outputs)
        return self._kept[id(row)][1]


def equal_groups(rows: Sequence[Row], grid: ShapeGrid | None = None) -> list[list[Row]]:
    """The batches that the batch policy makes of rows of equal length (for an engine that pads to a grid: of equal
    points on it)."""
    policy = BatchPolicy(Batching.EQUAL_LENGTH, ROWS_PER_BATCH, LARGEST_BATCH_TOKENS, 0.0, grid)
    return _batches(_sampled(rows), policy)


def padded_groups(rows: Sequence[Row], grid: ShapeGrid | None = None) -> list[list[Row]]:
    """The batches that the batch policy makes of rows of different lengths with the largest padding that a plan may
    allow."""
    policy = BatchPolicy(Batching.PADDED, ROWS_PER_BATCH, LARGEST_BATCH_TOKENS, LARGEST_PADDING_SHARE, grid)
    some = _sampled(rows)
    order = random.Random(SEED).sample(some, len(some))  # noqa: S311 - reproducible, not secret
    groups = []
    for start in range(0, len(order), WAITING):
        groups += _batches(order[start : start + WAITING], policy)
    return [group for group in groups if len({policy.length(row) for row in group}) > 1]


def _sampled(rows: Sequence[Row]) -> list[Row]:
    short = [row for row in rows if row.length <= LONG_TOKENS]
    long = sorted((row for row in rows if row.length > LONG_TOKENS), key=lambda row: row.length)
    return [*short, *long[:LONG_ROWS]]


def _batches(rows: Sequence[Row], policy: BatchPolicy) -> list[list[Row]]:
    """The batches that one worker takes from a queue of these rows, without batches of one."""
    queue = RowQueue(policy)
    queue.push(rows, None, arrived=0.0, deadline=math.inf, tokens_per_second=1.0)
    groups = []
    while taken := queue.take(streams=1, now=0.0).rows:
        if len(taken) > 1:
            groups.append([entry.row for entry in taken])
    return groups


def relative_difference(alone: Outputs, batched: Outputs) -> float:
    """|batched - alone| / |alone| over all outputs of a row; inf for other shapes or values that are not finite."""
    squared = norm = 0.0
    for name, expected in alone.items():
        actual = batched[name]
        if actual.shape != expected.shape:
            return float("inf")
        squared += float(np.sum((actual.astype(np.float64) - expected) ** 2))
        norm += float(np.sum(expected.astype(np.float64) ** 2))
    result = float(np.sqrt(squared / max(norm, 1e-30)))
    return result if np.isfinite(result) else float("inf")


@dataclass(frozen=True)
class Invariance:
    """The widest batching that changes no row, and the evidence."""

    batching: Batching
    metrics: tuple[Metric, ...]


def measure_invariance(
    forward: Forward,
    rows: Sequence[Row],
    *,
    alone: Forward | None = None,
    arithmetic: Arithmetic = FP32,
    grid: ShapeGrid | None = None,
) -> Invariance:
    """Run rows in batches and alone; find the widest batching in which all rows stay the same.

    `alone` runs rows one by one (default: by `forward`). `grid` is the engine's, if it has one: its sums depend on the
    shape, and arithmetic that rounds is not padded to another one. A kind of batch that the rows do not offer is not
    proved: it fails closed.
    """
    metrics = []
    widest = Batching.SINGLE
    one_by_one = alone or SingleRowForward(forward)
    for batching, groups in (
        (Batching.EQUAL_LENGTH, equal_groups(rows, grid)),
        (Batching.PADDED, padded_groups(rows, grid)),
    ):
        if batching is Batching.PADDED and arithmetic.rounds and grid is not None:
            break
        worst = max((_worst(forward, one_by_one, group) for group in groups), default=float("inf"))
        held = worst <= arithmetic.tolerance
        if np.isfinite(worst):
            metrics.append(
                Metric(
                    name=f"batch_invariance_{batching.value}",
                    value=worst,
                    budget=arithmetic.tolerance,
                    higher_is_better=False,
                    passed=held,
                )
            )
        if not held:
            break
        widest = batching
    return Invariance(widest, tuple(metrics))


def _worst(forward: Forward, alone: Forward, group: Sequence[Row]) -> float:
    return max(map(relative_difference, alone(group), forward(group)))


@dataclass(frozen=True, eq=False)
class Reference:
    """The judging requests, tokenised once, with the outcomes of the fp32 reference."""

    prepared: tuple[Prepared, ...]
    observed: tuple[ObservedAnswer, ...]

    @property
    def rows(self) -> list[Row]:
        """All rows of all requests."""
        return [row for prepared in self.prepared for row in prepared.rows]


def prepare(task: Task, samples: Sequence[SampleRequest]) -> tuple[Prepared, ...]:
    """Tokenise requests, without those that the task refuses (too long where nothing may be truncated), and those
    without a row."""
    result = []
    further = task.judging_parameters if isinstance(task, JudgedWith) else {}
    for sample in samples:
        try:
            prepared = task.prepare(task.parse(sample.inputs, {**sample.parameters, **further}))
        except InvalidInput:
            continue
        if prepared.rows:
            result.append(prepared)
    return tuple(result)


def observe(task: Task, forward: Forward, prepared: Prepared) -> ObservedAnswer:
    """Run each row of a request alone. InferenceFailed for NaN, as when serving."""
    reduced = tuple(task.reduce(row, forward([row])[0]) for row in prepared.rows)
    kept: tuple[Any, ...] = reduced
    if isinstance(task, Judged):
        # Arrays, which are stored between processes.
        kept = tuple(array for row, one in zip(prepared.rows, reduced, strict=True) for array in task.judged(row, one))
    return ObservedAnswer(task.assemble(prepared, reduced), kept)


def observe_reference(task: Task, forward: Forward, samples: Sequence[SampleRequest]) -> Reference:
    """Run the judging requests through the reference, once for all candidates."""
    prepared = prepare(task, samples)
    return Reference(prepared, tuple(observe(task, forward, one) for one in prepared))


def judge_candidate(
    task: Task,
    forward: Forward,
    reference: Reference,
    budget: AccuracyBudget,
    *,
    arithmetic: Arithmetic = FP32,
    grid: ShapeGrid | None = None,
) -> Verdict:
    """Judge a candidate: its answers one row at a time, and whether batches change them, as far as its arithmetic
    (`arithmetic_of`) can, in the shapes of its engine's `grid`.

    A candidate is rejected if its engine fails or its outputs hold NaN; other errors are raised.
    """
    alone = SingleRowForward(forward)
    verdict = judge_answers(task, alone, reference, budget)
    if not verdict.passed:
        return verdict
    invariance = measure_invariance(forward, reference.rows, alone=alone, arithmetic=arithmetic, grid=grid)
    return verdict.model_copy(
        update={"metrics": (*verdict.metrics, *invariance.metrics), "batching": invariance.batching.value}
    )


def judge_answers(task: Task, forward: Forward, reference: Reference, budget: AccuracyBudget) -> Verdict:
    """Judge only the answers, row by row: for two graphs that were each proved in batches, and serve together."""
    try:
        observed = [observe(task, forward, prepared) for prepared in reference.prepared]
    except InferenceFailed as error:
        return Verdict(passed=False, reason=f"a judging request failed: {error.message}", texts=len(reference.prepared))
    return judge(task.name, reference.observed, observed, budget)
