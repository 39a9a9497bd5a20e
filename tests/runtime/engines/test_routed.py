from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.recipe import Recipe
from penstock_runtime.batching.rectangle import run_rows, stack
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.engines.routed import RoutedEngine
from tests.runtime.batching.echo import EchoEngine, rows
from tests.runtime.minilm import OPENVINO_FP32, ORT_DYNAMIC, graph, prepared, texts

LONGEST = 16


def test_a_batch_goes_where_its_longest_row_belongs() -> None:
    long, short = EchoEngine(), EchoEngine()
    engine = RoutedEngine(long, short, LONGEST)

    for lengths in ([16, 3], [17], [1], [17, 40]):
        engine.run(stack(rows(lengths)))
    engine.run_wide(stack(rows([16])))
    engine.run_wide(stack(rows([64])))

    assert short.batches == [[16, 3], [1], [16]]
    assert long.batches == [[17], [17, 40], [64]]
    assert (short.wide, long.wide) == ([16], [64])


def test_closing_closes_both_and_facts_tell_of_both() -> None:
    long, short = EchoEngine(streams=2), EchoEngine(streams=2)
    engine = RoutedEngine(long, short, LONGEST)

    assert engine.facts == replace(long.facts, weight_copies=2, short=short.facts)
    engine.close()
    assert long.closed
    assert short.closed


def test_each_row_is_answered_as_by_its_own_engine() -> None:
    def load(recipe: Recipe) -> tuple[object, ...]:
        path, io = graph(recipe)
        return load_engine(path, io, recipe, Threads(2, 1), wide=True, max_tokens=256), io

    long, io = load(OPENVINO_FP32)
    short, _ = load(ORT_DYNAMIC)
    engine = RoutedEngine(long, short, LONGEST)  # type: ignore[arg-type] # engines, as loaded above
    some = [row for text in texts(40, seed=3, median=10, longest=40) for row in prepared(text)]
    assert 10 < sum(row.length <= LONGEST for row in some) < len(some) - 10

    for row in some:
        own = short if row.length <= LONGEST else long
        for wide in (False, True):
            found = run_rows(engine, io, [row], wide=wide)[0]["last_hidden_state"]  # type: ignore[arg-type]
            alone = run_rows(own, io, [row], wide=wide)[0]["last_hidden_state"]  # type: ignore[arg-type]
            assert np.array_equal(found, alone), row.length
    assert (engine.facts.engine, engine.facts.weight_copies) == ("openvino", 3)
    assert engine.facts.short is not None
    assert (engine.facts.short.engine, engine.facts.short.precision) == ("onnxruntime", "i8")
    engine.close()
