"""Whether a row's outputs depend on what it shares a run with, and so how far it may be batched. Pure.

A server that batches strangers' requests owes each of them the answer that it would get alone. Dynamic int8 breaks
this: the scale of its activations comes from the whole batch. Static and fp32 graphs hold it up to the last bits of
floating point, which move where a product is summed in another order, and which rounding to int8 can amplify to a
single step of its grid here and there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.manifest import GraphIO, Metric
from penstock.recipe import Batching
from penstock_runtime.batching.rectangle import run_rows
from penstock_runtime.engines.base import Engine
from penstock_runtime.rows import Outputs, Row

Forward = Callable[[Sequence[Row]], Sequence[Outputs]]
"""Runs rows in one batch, padded to the longest, and returns each row's own outputs, padding cut off."""

TOLERANCE = 0.01
"""The largest relative difference |batched - alone| / |alone| of a row's outputs that counts as the same answer."""
ROWS_PER_GROUP = 4
GROUPS = 12
"""Of each kind."""
SPREAD = 0.25
"""Padded groups: the longest row is at most this much longer than the shortest (or by `NEAR_TOKENS`)."""
NEAR_TOKENS = 4


def forward_of(engine: Engine, io: GraphIO) -> Forward:
    """An engine's forward, by the code that serves."""
    return partial(run_rows, engine, io)


def equal_length_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups of rows of exactly the same length, of as many lengths as there are, from short to long."""
    by_length: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_length[row.length].append(row)
    full = [by_length[length][:ROWS_PER_GROUP] for length in sorted(by_length) if len(by_length[length]) > 1]
    return _spread_out(full)


def padded_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups of rows of near-equal, but not all equal, length, from short to long."""
    order = sorted(rows, key=lambda row: row.length)
    groups = [order[start : start + ROWS_PER_GROUP] for start in range(0, len(order), ROWS_PER_GROUP)]
    return _spread_out(
        [
            group
            for group in groups
            if group[0].length < group[-1].length
            and group[-1].length <= max(group[0].length * (1 + SPREAD), group[0].length + NEAR_TOKENS)
        ]
    )


def _spread_out(groups: list[list[Row]]) -> list[list[Row]]:
    if len(groups) <= GROUPS:
        return groups
    picked = np.linspace(0, len(groups) - 1, GROUPS).round().astype(int)
    return [groups[index] for index in picked]


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


def measure_invariance(forward: Forward, rows: Sequence[Row], *, tolerance: float = TOLERANCE) -> Invariance:
    """Run groups of rows together and each row alone; the widest batching in which all rows stay the same.

    Where the rows offer no group of a kind, that kind is not proved: fails closed.
    """
    metrics = []
    widest = Batching.SINGLE
    for batching, groups in (
        (Batching.EQUAL_LENGTH, equal_length_groups(rows)),
        (Batching.PADDED, padded_groups(rows)),
    ):
        worst = max((_worst(forward, group) for group in groups), default=float("inf"))
        held = worst <= tolerance
        if np.isfinite(worst):
            metrics.append(
                Metric(
                    name=f"batch_invariance_{batching.value}",
                    value=worst,
                    budget=tolerance,
                    higher_is_better=False,
                    passed=held,
                )
            )
        if not held:
            break
        widest = batching
    return Invariance(widest, tuple(metrics))


def _worst(forward: Forward, group: Sequence[Row]) -> float:
    together = forward(group)
    return max(relative_difference(forward([row])[0], batched) for row, batched in zip(group, together, strict=True))
