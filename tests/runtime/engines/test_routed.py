from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.recipe import Recipe
from penstock_runtime.engines.base import Parallelism, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.engines.routed import RoutedEngine
from penstock_runtime.rows import collate, run_rows
from tests.runtime.batching.echo import EchoEngine, RowEchoEngine, rows
from tests.runtime.minilm import OPENVINO_FP32, ORT_DYNAMIC, graph, prepared, texts

LONGEST = 16


def test_a_batch_runs_on_the_engine_of_its_longest_row() -> None:
    long, short = EchoEngine(), EchoEngine()
    engine = RoutedEngine(long, short, LONGEST)

    for lengths in ([16, 3], [17], [1], [17, 40]):
        engine.run(collate(rows(lengths)))
    engine.run_wide(collate(rows([16])))
    engine.run_wide(collate(rows([64])))
    engine.run_widening(collate(rows([15])))
    engine.run_widening(collate(rows([63])))

    assert short.batches == [[16, 3], [1], [16], [15]]
    assert long.batches == [[17], [17, 40], [64], [63]]
    assert (short.wide, long.wide) == ([16], [64])
    assert (short.widening, long.widening) == ([15], [63])


def test_a_single_row_runs_on_the_engine_of_its_length() -> None:
    long, short = RowEchoEngine(), RowEchoEngine()
    engine = RoutedEngine(long, short, LONGEST)

    breadths = (Parallelism.NARROW, Parallelism.WIDE, Parallelism.WIDENING, Parallelism.WIDE)
    for one, parallelism in zip(rows([1, 16, 17, 64]), breadths, strict=True):
        outputs = engine.run_row(one, parallelism)
        assert outputs is not None
        assert outputs["sum"] == 7 * one.length

    assert short.alone == [(1, Parallelism.NARROW), (16, Parallelism.WIDE)]
    assert long.alone == [(17, Parallelism.WIDENING), (64, Parallelism.WIDE)]


def test_a_single_row_run_exists_if_the_engine_of_that_length_has_one() -> None:
    for long, short in ((RowEchoEngine(), EchoEngine()), (EchoEngine(), RowEchoEngine())):
        engine = RoutedEngine(long, short, LONGEST)

        ways = [engine.run_row(one, Parallelism.NARROW) is not None for one in rows([16, 17])]

        assert ways == [isinstance(short, RowEchoEngine), isinstance(long, RowEchoEngine)]
        assert (long.batches, short.batches) == ([], [])


def test_closing_closes_both_and_facts_cover_both() -> None:
    long, short = EchoEngine(streams=2), EchoEngine(streams=2)
    engine = RoutedEngine(long, short, LONGEST)

    assert engine.facts == replace(long.facts, weight_copies=2, short=short.facts)
    engine.close()
    assert long.closed
    assert short.closed


def test_each_row_is_answered_as_by_its_own_engine() -> None:
    def load(recipe: Recipe) -> tuple[Any, ...]:
        path, io = graph(recipe)
        return load_engine(path, io, recipe, Threads(2, 1), wide=True, max_tokens=256), io

    long, io = load(OPENVINO_FP32)
    short, _ = load(ORT_DYNAMIC)
    engine = RoutedEngine(long, short, LONGEST)
    some = [row for text in texts(40, seed=3, median=10, longest=40) for row in prepared(text)]
    assert 10 < sum(row.length <= LONGEST for row in some) < len(some) - 10

    for row in some:
        own = short if row.length <= LONGEST else long
        for run, own_run in ((engine.run, own.run), (engine.run_wide, own.run_wide)):
            found = run_rows(run, io, [row])[0]["last_hidden_state"]
            alone = run_rows(own_run, io, [row])[0]["last_hidden_state"]
            assert np.array_equal(found, alone), row.length
    assert (engine.facts.engine, engine.facts.weight_copies) == ("openvino", 3)
    assert engine.facts.short is not None
    assert (engine.facts.short.engine, engine.facts.short.precision) == ("onnxruntime", "i8")
    engine.close()
