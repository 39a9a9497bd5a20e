"""Whether a row's outputs depend on what it shares a run with, and so how far it may be batched. Pure.

A server that batches strangers' requests owes each of them the answer that it would get alone. Dynamic int8 breaks
this: the scale of its activations comes from the whole batch. Static and fp32 graphs hold it, as long as a row's own
numbers are summed in the same order whatever stands beside it; where they are not, the last bits of floating point
move, and rounding to int8 turns that, now and then, into a step of its grid that every later layer makes larger.

The groups are those that the batcher itself makes of the judging rows, since it is what decides on company.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from penstock.manifest import GraphIO, Metric
from penstock.recipe import BF16_REST, Batching, Precision, Recipe
from penstock_optimizer.search.space import BATCH_TOKENS, PADDING_SHARES
from penstock_runtime.batching.collate import run_rows
from penstock_runtime.batching.queue import Company, WaitingRows
from penstock_runtime.engines.base import Engine
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.rows import Outputs, Row

Forward = Callable[[Sequence[Row]], Sequence[Outputs]]
"""Runs rows in one batch, padded to the longest, and returns each row's own outputs, padding cut off."""

TOLERANCE = 1e-4
"""The largest relative difference |batched - alone| / |alone| of a row's outputs that counts as the same answer: what
fp32 may do to itself by summing in another order, in a deep model. It turns a vector by 5e-9 of cosine."""
BF16_TOLERANCE = 2.0**-8
"""The same where activations are rounded to bf16: the largest error of one such rounding."""
ROWS_PER_BATCH = 8
LONG_TOKENS = 64
LONG_ROWS = 4
"""Of rows longer than that, so many are looked at: they cost much, and their sums are those of shorter ones."""
WAITING = 24
"""Rows that wait at a time while padded batches are made of them, as under load."""
SEED = 20261121
"""Of the order in which they wait."""


@dataclass(frozen=True)
class Arithmetic:
    """What a recipe computes in, as far as company is concerned."""

    tolerance: float = TOLERANCE
    rounds: bool = False
    """Activations are rounded on the way. Where sums come out differently in their last bits, a number crosses a
    rounding limit so rarely that samples may show nothing (2 of 100 pairs of MiniLM's rows), and then by 2 %."""


FP32 = Arithmetic()


def arithmetic_of(recipe: Recipe) -> Arithmetic:
    """Of a recipe."""
    if recipe.precision is Precision.FP32:
        return FP32
    is_bf16 = recipe.precision is Precision.BF16 or BF16_REST in recipe.options
    return Arithmetic(BF16_TOLERANCE if is_bf16 else TOLERANCE, rounds=True)


def forward_of(engine: Engine, io: GraphIO) -> Forward:
    """An engine's forward, by the code that serves."""
    return partial(run_rows, engine.run, io)


@dataclass(eq=False)
class Alone:
    """A forward of one row at a time that remembers what shorter rows gave: the guard asks for them twice."""

    forward: Forward
    _kept: dict[int, tuple[Row, Outputs]] = field(default_factory=dict)

    def __call__(self, rows: Sequence[Row]) -> list[Outputs]:
        """Each row's outputs, run by itself."""
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Outputs:
        if id(row) not in self._kept:
            outputs = self.forward([row])[0]
            if row.length > LONG_TOKENS:
                return outputs
            # With the row, so that no other one can get its identity.
            self._kept[id(row)] = (row, outputs)
        return self._kept[id(row)][1]


def equal_groups(rows: Sequence[Row], grid: ShapeGrid | None = None) -> list[list[Row]]:
    """Batches that the batcher makes of rows of the same length (to an engine that pads to a grid: the same point of
    it)."""
    company = Company(Batching.EQUAL_LENGTH, ROWS_PER_BATCH, BATCH_TOKENS[-1], 0.0, grid)
    return _batches(_looked_at(rows), company)


def padded_groups(rows: Sequence[Row], grid: ShapeGrid | None = None) -> list[list[Row]]:
    """Batches of rows of different lengths that the batcher makes with the widest padding that a plan may allow."""
    company = Company(Batching.PADDED, ROWS_PER_BATCH, BATCH_TOKENS[-1], PADDING_SHARES[-1], grid)
    some = _looked_at(rows)
    order = random.Random(SEED).sample(some, len(some))  # noqa: S311 - reproducible, not secret
    groups = []
    for start in range(0, len(order), WAITING):
        groups += _batches(order[start : start + WAITING], company)
    return [group for group in groups if len({company.length(row) for row in group}) > 1]


def _looked_at(rows: Sequence[Row]) -> list[Row]:
    short = [row for row in rows if row.length <= LONG_TOKENS]
    long = sorted((row for row in rows if row.length > LONG_TOKENS), key=lambda row: row.length)
    return [*short, *long[:LONG_ROWS]]


def _batches(rows: Sequence[Row], company: Company) -> list[list[Row]]:
    """What one worker takes out of a queue of these rows, without those that run alone."""
    queue = WaitingRows(company)
    queue.push(rows, None, arrived=0.0, deadline=math.inf, tokens_per_second=1.0)
    groups = []
    while taken := queue.take(workers=1, now=0.0).rows:
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
    """How far a recipe may be batched, and the evidence."""

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
    """Run groups of rows together and each row alone; the widest batching in which all rows stay the same.

    `alone` runs rows one by one (default: by `forward`); `grid` is the engine's, if it has one: its sums depend on the
    shape, and arithmetic that rounds is not padded to another one. Where the rows offer no group of a kind, that kind
    is not proved: fails closed.
    """
    metrics = []
    widest = Batching.SINGLE
    one_by_one = alone or Alone(forward)
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
