"""A single-row run gives the same bits as a batch of that row, or does not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.manifest import Axes, GraphIO
from penstock_runtime.engines.base import Parallelism, RunsRows, Threads, run_of
from penstock_runtime.engines.native import NativeEngine
from penstock_runtime.engines.native.graph_file import NativeGraph
from penstock_runtime.engines.native.library import best_kernels
from penstock_runtime.engines.native.runs import MAX_SINGLE_ROW_TOKENS
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Outputs, Pooling, Row, collate, run_rows
from tests.runtime.engines.native import programs
from tests.runtime.engines.native.programs import needs_library
from tests.runtime.engines.native.test_native_engine import POSITIONS, WIDTH, WORDS, choosing, encoder, opened

pytestmark = needs_library
TYPES = 3
SPARE = 7


def row(length: int, pooling: Pooling | None, *, types: bool = False) -> Row:
    rng = np.random.default_rng(length)
    type_ids = rng.integers(0, TYPES, length).tolist() if types else None
    return Row(rng.integers(2, WORDS, length).tolist(), type_ids, pooling)


def typed() -> NativeGraph:
    """With a vector for each type of tokens."""
    graph = encoder()
    first, *others = graph.steps
    table = np.random.default_rng(3).normal(0, 1, (TYPES, WIDTH)).astype(np.float32)
    first = first.model_copy(update={"types": TYPES, "tensors": {**first.tensors, "type_table": "types"}})
    return NativeGraph((first, *others), graph.output, {**graph.tensors, "types": table})


def changed(graph: NativeGraph, **output: Any) -> NativeGraph:
    return NativeGraph(graph.steps, graph.output.model_copy(update=output), graph.tensors)


def columns(graph: NativeGraph) -> NativeGraph:
    return changed(graph, columns=tuple(f"column {index}" for index in range(WIDTH)))


def narrower(graph: NativeGraph) -> NativeGraph:
    return changed(graph, width=WIDTH - SPARE)


def as_batch(engine: NativeEngine, wanted: Row, parallelism: Parallelism) -> Outputs:
    """What a batch of this row gives for it."""
    axes = Axes.ROW if engine._graph.output.per_row else Axes.TOKENS
    io = GraphIO(inputs=("input_ids",), outputs=dict.fromkeys(engine._graph.output.names, axes))
    (outputs,) = run_rows(run_of(engine, parallelism), io, [wanted])
    return outputs


def assert_same(engine: NativeEngine, wanted: Row, parallelism: Parallelism) -> None:
    found, expected = engine.run_row(wanted, parallelism), as_batch(engine, wanted, parallelism)

    assert found is not None
    assert list(found) == list(expected)
    for name, values in found.items():
        assert (values.dtype, values.shape) == (np.dtype(np.float32), expected[name].shape)
        assert values.tobytes() == expected[name].tobytes()


@pytest.mark.parametrize("threads", [Threads(1, 1), Threads(1, 3), Threads(2, 1), Threads(2, 2)], ids=str)
@pytest.mark.parametrize(
    ("make", "pooling"),
    [
        pytest.param(encoder, Pooling.MEAN, id="mean"),
        pytest.param(encoder, Pooling.CLS, id="cls"),
        pytest.param(lambda: encoder(padding=0), Pooling.MEAN, id="mean, positions from the padding on"),
        pytest.param(typed, Pooling.MEAN, id="mean, types"),
        pytest.param(lambda: narrower(encoder()), Pooling.MEAN, id="mean, spare numbers"),
        pytest.param(lambda: narrower(encoder()), Pooling.CLS, id="cls, spare numbers"),
        pytest.param(lambda: encoder(first=True), None, id="line"),
        pytest.param(lambda: encoder(first=True), Pooling.MEAN, id="line that is not pooled"),
        pytest.param(lambda: narrower(encoder(first=True)), None, id="line, spare numbers"),
    ],
)
def test_a_single_row_run_has_the_same_bits_as_a_batch_of_that_row(
    make: Callable[[], NativeGraph], pooling: Pooling | None, threads: Threads
) -> None:
    engine = opened(make(), threads)
    for length in (1, 2, 8, 9, 33, POSITIONS - 1, 5, 1):
        for types in (False, True, False):
            for parallelism in Parallelism:
                assert_same(engine, row(length, pooling, types=types), parallelism)
    engine.close()


def test_a_single_row_run_uses_the_token_types_of_the_row() -> None:
    engine = opened(typed(), Threads(1, 1))
    ids, answers = [5, 6, 7], []
    for type_ids in ([0, 1, 2], None, [0, 0, 0], [2, 1, 0]):
        outputs = engine.run_row(Row(ids, type_ids, Pooling.MEAN), Parallelism.NARROW)
        assert outputs is not None
        answers.append(outputs["pooled"].tobytes())

    assert answers[1] == answers[2]
    assert len(set(answers)) == 3
    engine.close()


@pytest.mark.parametrize("helpers", [True, False])
def test_a_single_row_run_has_the_parameters_of_a_batch(*, helpers: bool) -> None:
    engine = opened(encoder(), Threads(2, 2), helpers=helpers)
    assert isinstance(engine, RunsRows)
    fields = ("model", "floats", "rows", "tokens", "threads", "when_idle", "pooling")
    for parallelism in (*Parallelism, *reversed(Parallelism)):
        wanted = row(9, Pooling.CLS)
        engine.run_row(wanted, parallelism)
        job, lone = engine.new_run(collate([wanted]), parallelism).record, engine._single_row._record

        assert [getattr(lone, name) for name in fields] == [getattr(job, name) for name in fields]
    engine.close()


def test_rows_longer_than_the_prepared_mask_have_no_single_row_run() -> None:
    step, tensors = programs.source(np.random.default_rng(4).random((MAX_SINGLE_ROW_TOKENS + 1, 32), np.float32))
    engine = programs.engine([step], tensors, kernels=best_kernels(), threads=2)

    assert_same(engine, Row([0] * MAX_SINGLE_ROW_TOKENS, None, Pooling.MEAN), Parallelism.WIDE)
    assert engine.run_row(Row([0] * (MAX_SINGLE_ROW_TOKENS + 1), None, Pooling.MEAN), Parallelism.WIDE) is None
    engine.close()


@pytest.mark.parametrize(
    ("make", "poolings"),
    [
        pytest.param(encoder, [None, Pooling.MAX, Pooling.WEIGHTED_MEAN], id="a line for each token"),
        pytest.param(lambda: columns(encoder()), [None, *Pooling], id="columns"),
        pytest.param(lambda: columns(encoder(first=True)), [None, *Pooling], id="columns of a line"),
        pytest.param(lambda: choosing(7), [None, *Pooling], id="lines for some tokens"),
        pytest.param(
            lambda: changed(choosing(7), per_row=True), [None, *Pooling], id="lines for some, and for each row"
        ),
    ],
)
def test_outputs_of_several_lines_have_no_single_row_run(
    make: Callable[[], NativeGraph], poolings: list[Pooling | None]
) -> None:
    engine = opened(make(), Threads(1, 1))

    assert [engine.run_row(Row([7, 8], None, pooling), Parallelism.NARROW) for pooling in poolings] == [None] * len(
        poolings
    )
    engine.close()


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        pytest.param(encoder, Row([2, -1, 3], None, Pooling.MEAN), id="an id below 0"),
        pytest.param(encoder, Row([2, WORDS, 3], None, Pooling.MEAN), id="an id beyond the words"),
        pytest.param(encoder, Row([2, 2**40, 3], None, Pooling.CLS), id="a large id"),
        pytest.param(encoder, Row([2] * (POSITIONS + 1), None, Pooling.MEAN), id="too many tokens"),
        pytest.param(encoder, Row([], None, Pooling.MEAN), id="no tokens"),
        pytest.param(typed, Row([2, 3], [0, TYPES], Pooling.MEAN), id="a type beyond the types"),
        pytest.param(typed, Row([2, 3], [0, -1], Pooling.MEAN), id="a type below 0"),
        pytest.param(lambda: encoder(first=True), Row([WORDS]), id="an id, one line"),
        pytest.param(lambda: changed(encoder(), per_row=True), Row([2, 3]), id="more lines than the graph has"),
    ],
)
def test_a_row_that_cannot_be_run_fails_as_a_batch_of_it_does(make: Callable[[], NativeGraph], wrong: Row) -> None:
    engine = opened(make(), Threads(1, 2))
    for parallelism in Parallelism:
        with pytest.raises(InferenceFailed) as found:
            engine.run_row(wrong, parallelism)
        with pytest.raises(InferenceFailed) as expected:
            as_batch(engine, wrong, parallelism)

        assert (found.value.message, found.value.remedy) == (expected.value.message, expected.value.remedy)
    if not engine._graph.output.per_row:
        assert_same(engine, row(6, Pooling.MEAN), Parallelism.WIDE)
    engine.close()


@pytest.mark.parametrize("first", [True, False])
def test_an_answer_is_not_overwritten_by_later_runs(*, first: bool) -> None:
    engine = opened(encoder(first=first), Threads(1, 1))
    wanted = [row(length, Pooling.MEAN) for length in range(1, 20)]
    made = [engine.run_row(one, Parallelism.NARROW) for one in wanted]
    engine.run_row(row(30, Pooling.MEAN), Parallelism.NARROW)

    for one, found in zip(wanted, made, strict=True):
        assert found is not None
        for name, values in as_batch(engine, one, Parallelism.NARROW).items():
            assert found[name].tobytes() == values.tobytes()
    engine.close()
