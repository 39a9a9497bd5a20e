"""Warm-up runs before the first request: allocate buffers, compile kernels for shapes, measure the throughput."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import perf_counter

import numpy as np

from penstock.errors import CorruptModel
from penstock.recipe import Batching, Plan
from penstock_runtime.engines.base import EngineFacts
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.rows import Row, run_rows
from penstock_runtime.serving.loaded_model import LoadedModel

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
SECONDS, SECONDS_OF_GRIDS = 0.3, 2.0
"""No new shape is started after this, so that the server gets ready soon; the first request of a remaining shape takes
a few milliseconds longer. Engines with a grid prepare kernels for each of its shapes, which takes longer."""
_ANY_TOKEN = 1
"""An id in every vocabulary."""


def warm_up(model: LoadedModel) -> list[tuple[int, float]]:
    """Run the plan's shapes on every stream at once: the tokens and seconds of each run after its shape's first.

    InferenceFailed when the graph cannot run, CorruptModel when what it gives is not a number: better now than with a
    client's request.
    """
    plan = model.plan
    ran: list[tuple[int, float]] = []
    facts = model.engine.facts
    has_grid = facts.grid is not None or (facts.short is not None and facts.short.grid is not None)
    end = perf_counter() + (SECONDS_OF_GRIDS if has_grid else SECONDS)
    # Each stream has separate kernels and buffers. All run at once, so that no stream runs the work of two.
    at_once = facts.in_flight or plan.streams
    together = Barrier(at_once)
    with ThreadPoolExecutor(max_workers=at_once, thread_name_prefix="penstock-warm-up") as pool:
        for rows, length in all_shapes(plan, model.max_tokens, facts):
            batch = [Row([_ANY_TOKEN] * length)] * rows
            if not ran:
                pool.submit(_check_numbers, model, batch).result()
            for again in (False, True):
                runs = [pool.submit(_timed, model, batch, together) for _ in range(at_once)]
                for run in runs:
                    seconds = run.result()
                    if again:
                        ran.append((rows * length, seconds))
            if rows == 1 and _may_run_wide(plan, length):
                run_rows(model.engine.run_wide, model.io, batch)
            if perf_counter() > end:
                break
    return ran


def _check_numbers(model: LoadedModel, batch: list[Row]) -> None:
    """CorruptModel for weights that make outputs NaN or infinite."""
    for outputs in run_rows(model.engine.run, model.io, batch):
        for name, values in outputs.items():
            if np.isfinite(values).all():
                continue
            source = model.manifest.model.source if model.manifest is not None else "the model"
            raise CorruptModel(
                f"{source}: the {model.plan.recipe.name} graph gives NaN or infinity as {name}",
                remedy="Look for such values in the weights, and fetch the model again",
            )


def all_shapes(plan: Plan, max_tokens: int, facts: EngineFacts) -> Iterator[tuple[int, int]]:
    """Rows and length of the batches to run. Where short rows have a separate engine: its shapes, then the shapes of
    the other that no short row has."""
    short_plan = plan.of_short_rows
    if plan.short is None or short_plan is None or facts.short is None:
        yield from shapes(plan, max_tokens, facts.grid)
        return
    longest = plan.short.longest_tokens
    short = shapes(short_plan, min(longest, max_tokens), facts.short.grid)
    long = ((rows, length) for rows, length in shapes(plan, max_tokens, facts.grid) if length > longest)
    yield from sorted((*short, *long), key=lambda shape: shape[0] > 1)


def _may_run_wide(plan: Plan, length: int) -> bool:
    short_plan = plan.of_short_rows
    is_short = plan.short is not None and length <= plan.short.longest_tokens
    side = short_plan if is_short and short_plan is not None else plan
    # With a single client, the case in which the shortest rows run wide.
    return side.is_wide(length, alone=True)


def shapes(plan: Plan, max_tokens: int, grid: ShapeGrid | None = None) -> Iterator[tuple[int, int]]:
    """Rows and length of the batches to run: single rows first, then the largest batches that the plan allows; with a
    grid all of its shapes, the usual lengths first."""
    longest = min(max_tokens, LENGTHS[-1])
    lengths = [length for length in LENGTHS if length < longest] + [longest]
    if grid is not None:
        lengths += [length for length in grid.lengths(longest) if length not in lengths]
    for length in lengths:
        yield 1, length
    if plan.batching is Batching.SINGLE:
        return
    for length in lengths:
        rows = min(plan.max_batch_rows, plan.max_batch_tokens // length)
        if rows > 1:
            yield (rows if grid is None else grid.rows(rows)), length


def _timed(model: LoadedModel, batch: list[Row], together: Barrier) -> float:
    together.wait()
    start = perf_counter()
    run_rows(model.engine.run, model.io, batch)
    return perf_counter() - start
