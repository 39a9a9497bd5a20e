from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import CorruptModel
from penstock.recipe import Batching
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.engines.routed import RoutedEngine
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Batch, Outputs
from penstock_runtime.serving.warmup import all_shapes, shapes, warm_up
from tests.runtime.batching.echo import EchoEngine, plan, route
from tests.runtime.serving.small import small_model


@pytest.mark.parametrize(
    ("batching", "max_tokens", "wanted"),
    [
        (Batching.SINGLE, 40, [(1, 8), (1, 16), (1, 32), (1, 40)]),
        (Batching.SINGLE, 5, [(1, 5)]),
        (Batching.SINGLE, 8, [(1, 8)]),
        (Batching.EQUAL_LENGTH, 20, [(1, 8), (1, 16), (1, 20), (6, 8), (3, 16), (2, 20)]),
        (Batching.SINGLE, 8192, [(1, length) for length in (8, 16, 32, 64, 128, 256, 512)]),
    ],
)
def test_the_shapes_are_those_of_the_plan(batching: Batching, max_tokens: int, wanted: list[tuple[int, int]]) -> None:
    assert list(shapes(plan(batching, rows=6, tokens=50), max_tokens)) == wanted


def test_a_grid_is_warmed_completely_with_the_usual_lengths_first() -> None:
    found = list(shapes(plan(Batching.EQUAL_LENGTH, rows=8, tokens=128), 64, ShapeGrid()))

    assert found[:4] == [(1, 8), (1, 16), (1, 32), (1, 64)]
    assert {length for rows, length in found if rows == 1} == set(range(8, 65, 8))
    assert {rows for rows, _ in found} <= {1, 2, 4, 8}
    assert all(rows * length <= 128 for rows, length in found)


def test_both_engines_of_a_route_are_warmed_with_their_own_lengths() -> None:
    long, short = EchoEngine(grid=ShapeGrid()), EchoEngine()
    engine = RoutedEngine(long, short, 16)
    served = plan(Batching.EQUAL_LENGTH, rows=4, tokens=64).model_copy(update={"short": route(16, wide_from=16)})
    model = small_model(engine, served=served)
    model.max_tokens = 32

    warm_up(model)

    assert {tuple(batch) for batch in short.batches} == {(8,), (16,)}
    assert short.wide == [16]
    assert {len(batch) for batch in long.batches} == {1, 2}
    assert {length for batch in long.batches for length in batch} == {24, 32}
    found = list(all_shapes(served, 32, engine.facts))
    assert found == [(1, 8), (1, 16), (1, 32), (1, 24), (2, 32), (2, 24)]


@pytest.mark.parametrize(
    ("wide_from", "wide_alone", "wide"),
    [(64, None, [64, 128]), (64, 32, [32, 64, 128]), (None, 128, [128]), (None, None, [])],
)
def test_wide_runs_are_warmed_as_well(wide_from: int | None, wide_alone: int | None, wide: list[int]) -> None:
    engine = EchoEngine(streams=2)
    served = plan(Batching.SINGLE, streams=2, wide_from=wide_from, wide_alone=wide_alone)
    model = small_model(engine, served=served)
    model.max_tokens = 128

    ran = warm_up(model)

    assert engine.wide == wide
    assert [tokens for tokens, _ in ran] == [length for length in (8, 16, 32, 64, 128) for _ in range(2)]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_with_nan_outputs_is_refused(value: float) -> None:
    class Broken(EchoEngine):
        def run(self, batch: Batch) -> Outputs:
            return {**super().run(batch), "sum": np.full(len(batch.input_ids), value, np.float32)}

    with pytest.raises(CorruptModel, match="gives NaN or infinity as sum"):
        warm_up(small_model(Broken()))


def test_a_graph_that_cannot_run_is_found_out_before_the_first_request() -> None:
    engine = EchoEngine(streams=2)
    engine.run = lambda batch: {}  # type: ignore[method-assign] # a graph without the promised outputs

    with pytest.raises((InferenceFailed, KeyError)):
        warm_up(small_model(engine))
