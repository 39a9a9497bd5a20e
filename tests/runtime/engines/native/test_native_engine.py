"""The engine as the server uses it: several callers, helper threads, and unusual token ids."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ArtefactError
from penstock.manifest import Axes, GraphIO
from penstock.recipe import EngineName, Precision, Recipe
from penstock_runtime.engines.base import EngineFacts, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.engines.native import NativeEngine
from penstock_runtime.engines.native.graph_file import DISTANCES_SPARE, GraphOutput, GraphStep, NativeGraph, write
from penstock_runtime.engines.native.library import best_kernels
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import POOLED, Batch, Int, Pooling
from penstock_runtime.tasks.embeddings.embedding import pool
from tests.runtime.engines.native.programs import needs_library

pytestmark = needs_library
needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a caller and a helper need two CPUs")
WIDTH, INNER, WORDS, POSITIONS = 96, 192, 50, 40
RECIPE = Recipe(engine=EngineName.NATIVE, precision=Precision.INT8_ROWWISE)
IO = GraphIO(inputs=("input_ids", "attention_mask"), outputs={"last_hidden_state": Axes.TOKENS})


def encoder(*, padding: int = -1, first: bool = False) -> NativeGraph:
    """One layer of random numbers."""
    rng = np.random.default_rng(1)

    def linear(name: str, inputs: int, outputs: int) -> dict[str, str]:
        tensors[f"{name}.w"] = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
        tensors[f"{name}.s"] = rng.uniform(0.0005, 0.002, outputs).astype(np.float32)
        tensors[f"{name}.b"] = rng.normal(0, 0.1, outputs).astype(np.float32)
        return {"weights": f"{name}.w", "scales": f"{name}.s", "bias": f"{name}.b"}

    tensors: dict[str, Any] = {
        "words": rng.integers(-127, 128, (WORDS, WIDTH)).astype(np.int16),
        "scales": rng.uniform(0.005, 0.02, WORDS).astype(np.float32),
        "positions": rng.normal(0, 0.1, (POSITIONS, WIDTH)).astype(np.float32),
        "g": np.ones(WIDTH, np.float32),
        "b": np.zeros(WIDTH, np.float32),
    }
    norm = {"weights": "g", "bias": "b"}
    table = {"weights": "words", "scales": "scales", "position_table": "positions"}

    def normalised() -> GraphStep:
        return GraphStep(operator="norm", source=0, target=1, outputs=WIDTH, epsilon=1e-12, tensors=norm)

    def product(name: str, source: int, target: int, inputs: int, outputs: int, **more: Any) -> GraphStep:
        return GraphStep(
            operator="linear8", source=source, target=target, inputs=inputs, outputs=outputs,
            tensors=linear(name, inputs, outputs), **more,
        )  # fmt: skip

    steps = [
        GraphStep(
            operator="embed", target=0, inputs=WORDS, outputs=WIDTH, positions=POSITIONS, padding=padding,
            tensors=table,
        ),
        normalised(),
        product("qkv", 1, 2, WIDTH, 3 * WIDTH),
        GraphStep(operator="attention", source=2, keys=2, values=2, target=3, outputs=WIDTH, heads=3, epsilon=32**-0.5),
        product("out", 3, 0, WIDTH, WIDTH, residual=1),
        normalised(),
        product("up", 1, 4, WIDTH, INNER, activation="gelu"),
        product("down", 4, 0, INNER, WIDTH, residual=1),
        normalised(),
    ]  # fmt: skip
    if first:
        steps.append(GraphStep(operator="first", source=1, target=5, outputs=WIDTH))
    output = GraphOutput(name="last_hidden_state", buffer=steps[-1].target, width=WIDTH, per_row=first)
    return NativeGraph(tuple(steps), output, tensors)


def opened(graph: NativeGraph, threads: Threads, *, helpers: bool = True) -> NativeEngine:
    return NativeEngine(graph, EngineFacts("native", "test", threads, "i8"), helpers=helpers, kernels=best_kernels())


def rows(*lengths: int, seed: int = 0) -> Batch:
    """Rows of these lengths, padded to the longest."""
    rng = np.random.default_rng(seed)
    longest = max(lengths)
    mask = np.array([[1] * n + [0] * (longest - n) for n in lengths], np.int64)
    ids = rng.integers(2, WORDS, mask.shape) * mask
    return Batch(ids, mask, np.zeros_like(ids))


def alone(batch: Batch, index: int) -> Batch:
    length = int(batch.attention_mask[index].sum())
    cut = (slice(index, index + 1), slice(0, length))
    return Batch(*(np.ascontiguousarray(a[cut]) for a in _parts(batch)))


def _parts(batch: Batch) -> tuple[Int, Int, Int]:
    return batch.input_ids, batch.attention_mask, batch.token_type_ids


@pytest.mark.parametrize("padding", [-1, 0])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(padding: int) -> None:
    engine = opened(encoder(padding=padding), Threads(1, 1))
    batch = rows(5, 17, 33, 1, 8, 36)

    together = engine.run(batch)["last_hidden_state"]

    for index in range(len(together)):
        own = engine.run(alone(batch, index))["last_hidden_state"][0]
        np.testing.assert_array_equal(together[index, : len(own)], own)
    engine.close()


@pytest.mark.parametrize("lengths", [(1,), (8,), (39,), (33, 33), (3, 30, 17), (40,) * 9])
def test_any_number_of_threads_gives_the_same_bits(lengths: tuple[int, ...]) -> None:
    batch = rows(*lengths)
    expected = None
    for threads in range(1, 6):
        engine = opened(encoder(), Threads(1, threads))
        for _ in range(20):
            found = engine.run_wide(batch)["last_hidden_state"]
            expected = found if expected is None else expected
            np.testing.assert_array_equal(found, expected)
        engine.close()


def test_concurrent_callers_get_their_own_answers() -> None:
    engine = opened(encoder(), Threads(8, 1))
    batches = [rows(*range(1 + n, 2 + 3 * n, 3), seed=n) for n in range(1, 9)]
    expected = [engine.run(batch)["last_hidden_state"] for batch in batches]
    start = threading.Barrier(len(batches))

    def call(number: int) -> None:
        start.wait()
        for turn in range(150):
            # One run with all helpers, and sometimes a second one that finds them busy.
            run = engine.run_wide if number == 0 or (number == 1 and turn % 3 == 0) else engine.run
            if number == 2 or number == turn % 8:
                run = engine.run_widening
            np.testing.assert_array_equal(run(batches[number])["last_hidden_state"], expected[number])

    with ThreadPoolExecutor(len(batches)) as pool:
        for done in [pool.submit(call, number) for number in range(len(batches))]:
            done.result()
    engine.close()


@needs_two_cpus
def test_a_helper_thread_does_not_run_on_the_callers_cpu() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    found: list[list[int]] = []

    def call() -> None:
        os.sched_setaffinity(0, cpus)
        before = _threads()
        engine = opened(encoder(), Threads(2, 1))
        (helper,) = _threads() - before
        for cpu in (*cpus, cpus[0]):
            os.sched_setaffinity(0, {cpu})
            engine.run_wide(rows(12))
            found.append(sorted(os.sched_getaffinity(helper)))
        engine.close()

    _in_thread(call)

    assert found == [[cpus[1]], [cpus[0]], [cpus[1]]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one CPU there is nothing to choose")
def test_the_kernel_places_helpers_where_there_is_not_a_thread_for_each_cpu() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    found: list[list[int]] = []

    def call() -> None:
        before = _threads()
        engine = opened(encoder(), Threads(1, len(cpus) + 1))
        helpers = _threads() - before
        engine.run_wide(rows(12))
        found.extend(sorted(os.sched_getaffinity(helper)) for helper in helpers)
        engine.close()

    _in_thread(call)

    assert found == [cpus] * len(cpus)


def deep(layers: int) -> NativeGraph:
    """The same layer, repeated."""
    graph = encoder()
    return NativeGraph((*graph.steps, *graph.steps[2:] * (layers - 1)), graph.output, graph.tensors)


@needs_two_cpus
@pytest.mark.parametrize(
    ("graph", "batch"),
    [(encoder(), rows(*[40] * 3000)), (deep(200), rows(27))],
    ids=["threads take lines", "threads share phases"],
)
def test_a_run_that_starts_during_others_gets_the_pool_when_they_have_ended(graph: NativeGraph, batch: Batch) -> None:
    before = _threads()
    engine = opened(graph, Threads(2, 1))
    (helper,) = _threads() - before
    expected = engine.run(batch)["last_hidden_state"]
    rested = _processor_seconds(helper)

    # If another program uses its CPU, a helper may wake after the end of the run; it then helps the next one.
    deadline = time.monotonic() + 60
    helped = False
    while not helped and time.monotonic() < deadline:
        found = engine.run_widening(batch)["last_hidden_state"]
        np.testing.assert_array_equal(found, expected)
        helped = _processor_seconds(helper) > rested

    assert helped
    engine.close()


@needs_two_cpus
def test_a_run_during_others_does_not_get_the_pool_until_they_have_ended() -> None:
    before = _threads()
    engine = opened(encoder(), Threads(2, 1))
    (helper,) = _threads() - before
    deadline = time.monotonic() + 60
    outlasted = False
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(threading.get_native_id).result()
        while not outlasted and time.monotonic() < deadline:  # it ends first if another program uses the CPUs
            long_run = pool.submit(engine.run, rows(*[40] * 3000))
            begun = _processor_seconds(other)
            while _processor_seconds(other) - begun < 0.002 and not long_run.done():
                pass
            rested = _processor_seconds(helper)
            engine.run_widening(rows(*[40] * 300))
            had = _processor_seconds(helper) - rested
            outlasted = not long_run.done()
            long_run.result()

    assert outlasted
    assert had < 0.001  # it may still have been falling asleep
    engine.close()


def _processor_seconds(thread: int) -> float:
    """CPU seconds that it has used so far."""
    return float(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def _threads() -> set[int]:
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}


def _in_thread(call: Callable[[], None]) -> None:
    """Affinity belongs to a thread: that of the test's thread does not change."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def test_a_graph_of_first_tokens_gives_one_line_for_each_row() -> None:
    whole, first = opened(encoder(), Threads(1, 1)), opened(encoder(first=True), Threads(1, 1))
    batch = rows(4, 9, 2)

    np.testing.assert_array_equal(
        first.run(batch)["last_hidden_state"], whole.run(batch)["last_hidden_state"][:, 0]
    )  # fmt: skip
    whole.close()
    first.close()


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS, Pooling.LAST])
@pytest.mark.parametrize("lengths", [(1,), (9,), (40, 3, 17), (33,) * 6])
def test_token_vectors_are_pooled_to_the_bits_of_numpy(pooling: Pooling, lengths: tuple[int, ...]) -> None:
    engine = opened(encoder(), Threads(1, 3))
    batch = rows(*lengths)
    every = engine.run(batch)["last_hidden_state"]

    for run in (engine.run, engine.run_wide, engine.run_widening):
        outputs = run(replace(batch, pooling=pooling))

        assert list(outputs) == [POOLED]
        for found, vectors, length in zip(outputs[POOLED], every, lengths, strict=True):
            np.testing.assert_array_equal(found, pool(vectors[:length], pooling))
    engine.close()


@pytest.mark.parametrize("pooling", [Pooling.MAX, Pooling.WEIGHTED_MEAN])
def test_outputs_that_cannot_be_pooled_are_returned_unchanged(pooling: Pooling) -> None:
    engine = opened(encoder(), Threads(1, 1))
    batch = rows(7, 4)

    np.testing.assert_array_equal(
        engine.run(replace(batch, pooling=pooling))["last_hidden_state"], engine.run(batch)["last_hidden_state"]
    )
    engine.close()


def test_outputs_that_are_no_token_vectors_are_not_pooled() -> None:
    batch = rows(4, 9, 2)
    for graph in (encoder(first=True), choosing(int(batch.input_ids[0, 0]))):
        engine = opened(graph, Threads(1, 1))

        found = engine.run(replace(batch, pooling=Pooling.MEAN))

        np.testing.assert_array_equal(found["last_hidden_state"], engine.run(batch)["last_hidden_state"])
        engine.close()


def choosing(number: int) -> NativeGraph:
    """The tokens of one id after the layer, and a product of each."""
    graph = encoder()
    chosen = GraphStep(operator="chosen", source=1, target=5, outputs=WIDTH, padding=number)
    head = GraphStep(
        operator="linear8", source=5, target=6, inputs=WIDTH, outputs=INNER, tensors=graph.steps[6].tensors
    )  # fmt: skip
    output = GraphOutput(name="last_hidden_state", buffer=6, width=INNER - 7, per_row=False, chosen_id=number)
    return NativeGraph((*graph.steps, chosen, head), output, graph.tensors)


def every(graph: NativeGraph) -> NativeGraph:
    """The same for every token."""
    head = graph.steps[-1].model_copy(update={"source": 1})
    return NativeGraph(
        (*graph.steps[:-2], head), graph.output.model_copy(update={"chosen_id": -1}), graph.tensors
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [(9,), (40, 3, 17), (33,) * 6])
def test_a_graph_of_one_token_id_gives_its_tokens_row_by_row(lengths: tuple[int, ...]) -> None:
    batch = rows(*lengths)
    batch.input_ids[:, ::3] = 7
    chosen, whole = opened(choosing(7), Threads(1, 3)), opened(every(choosing(7)), Threads(1, 1))

    for run in (chosen.run, chosen.run_wide):
        found = run(batch)["last_hidden_state"]

        expected = whole.run(batch)["last_hidden_state"][batch.input_ids == 7]
        np.testing.assert_array_equal(found, expected)
        assert found.shape == (np.count_nonzero(batch.input_ids == 7), INNER - 7)
    chosen.close()
    whole.close()


def test_runs_choose_any_number_of_tokens_including_none_and_all() -> None:
    engine, whole = opened(choosing(7), Threads(1, 2)), opened(every(choosing(7)), Threads(1, 1))
    for every_nth in (50, 1, 5, 50, 2):
        batch = rows(20, 20)
        batch.input_ids[batch.input_ids == 7] = 8
        batch.input_ids[:, 1::every_nth][:, : 20 if every_nth < 50 else 0] = 7

        found = engine.run_wide(batch)["last_hidden_state"]

        expected = whole.run(batch)["last_hidden_state"][batch.input_ids == 7]
        np.testing.assert_array_equal(found, expected)
    engine.close()
    whole.close()


def test_columns_are_separate_outputs() -> None:
    whole, graph = encoder(), encoder()
    names = tuple(f"column {index}" for index in range(WIDTH))
    one = opened(whole, Threads(1, 1))
    several = opened(
        NativeGraph(graph.steps, graph.output.model_copy(update={"columns": names}), graph.tensors), Threads(1, 1)
    )
    batch = rows(4, 9, 2)

    together, apart = one.run(batch)["last_hidden_state"], several.run(batch)

    assert tuple(apart) == names
    for index, name in enumerate(names):
        np.testing.assert_array_equal(apart[name], together[..., index])
        assert apart[name].flags["C_CONTIGUOUS"]
    one.close()
    several.close()


@pytest.mark.parametrize("wrong", [-1, WORDS, 2**40])
def test_an_unknown_token_id_is_an_error_and_the_next_run_succeeds(wrong: int) -> None:
    engine = opened(encoder(), Threads(1, 2))
    good = rows(6)
    expected = engine.run(good)["last_hidden_state"]
    bad = rows(6)
    bad.input_ids[0, 3] = wrong

    with pytest.raises(InferenceFailed, match="no vector"):
        engine.run_wide(bad)

    np.testing.assert_array_equal(engine.run(good)["last_hidden_state"], expected)
    engine.close()


def test_a_row_longer_than_the_table_of_positions_is_an_error() -> None:
    engine = opened(encoder(), Threads(1, 1))

    with pytest.raises(InferenceFailed):
        engine.run(rows(POSITIONS + 1))

    engine.close()


def biased(positions: int) -> NativeGraph:
    """The same with a bias on the scores for fewer positions than the table has."""
    graph = encoder(padding=0)
    bias = np.random.default_rng(2).normal(0, 1, (3, 2 * positions - 1 + DISTANCES_SPARE)).astype(np.float32)
    with_bias = {"positions": positions, "tensors": {"distances": "bias"}}
    steps = [step.model_copy(update=with_bias) if step.operator == "attention" else step for step in graph.steps]
    return NativeGraph(tuple(steps), graph.output, {**graph.tensors, "bias": bias})


def test_a_batch_longer_than_its_bias_on_the_scores_is_an_error_even_where_that_is_padding() -> None:
    engine = opened(biased(20), Threads(1, 1))
    fits, padded = rows(20, 3), Batch(*(np.pad(a, ((0, 0), (0, 1))) for a in _parts(rows(20, 3))))

    assert np.isfinite(engine.run(fits)["last_hidden_state"]).all()
    with pytest.raises(InferenceFailed, match="too many"):
        engine.run(padded)
    engine.close()


def test_a_row_has_the_same_bits_alone_and_in_a_batch_with_a_bias_on_the_scores() -> None:
    engine = opened(biased(39), Threads(1, 2))
    batch = rows(5, 17, 33, 1, 8, 36)

    together = engine.run_wide(batch)["last_hidden_state"]

    for index in range(len(together)):
        own = engine.run(alone(batch, index))["last_hidden_state"][0]
        np.testing.assert_array_equal(together[index, : len(own)], own)
    engine.close()


@pytest.mark.parametrize("wrong", [{"per_row": True}, {"chosen_id": 7}])
def test_an_output_that_no_step_writes_is_an_error(wrong: dict[str, Any]) -> None:
    graph = encoder()
    engine = opened(NativeGraph(graph.steps, graph.output.model_copy(update=wrong), graph.tensors), Threads(1, 1))

    with pytest.raises(InferenceFailed, match="does not have the number of lines"):
        engine.run(rows(6))

    engine.close()


def test_a_row_of_padding_alone_is_finite() -> None:
    engine = opened(encoder(), Threads(1, 1))
    zeros = np.zeros((1, 7), np.int64)

    assert np.isfinite(engine.run(Batch(zeros, zeros, zeros))["last_hidden_state"]).all()
    engine.close()


def test_the_engine_is_loaded_by_its_recipe_and_reports_its_facts(tmp_path: Path) -> None:
    write(tmp_path / "model.native", encoder())

    engine = load_engine(tmp_path / "model.native", IO, RECIPE, Threads(2, 1), wide=True)

    assert (engine.facts.engine, engine.facts.precision, engine.facts.threads) == ("native", "i8", Threads(2, 1))
    assert best_kernels().name.lower().replace("_", "-") in engine.facts.version
    assert engine.run_wide(rows(5))["last_hidden_state"].shape == (1, 5, WIDTH)
    engine.close()


def test_a_graph_that_is_described_otherwise_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.native", encoder())
    io = GraphIO(inputs=("input_ids", "attention_mask"), outputs={"logits": Axes.TOKENS})

    with pytest.raises(ArtefactError, match="gives last_hidden_state"):
        load_engine(tmp_path / "model.native", io, RECIPE, Threads(1, 1))


REFUSED: dict[str, Callable[[list[GraphStep]], list[GraphStep]]] = {
    "reads what no step wrote": lambda steps: [steps[0], steps[2]],
    "starts with a product": lambda steps: steps[1:],
    "embeds twice": lambda steps: [steps[0], *steps],
    "adds what has another width": lambda steps: [*steps[:4], steps[4].model_copy(update={"residual": 2}), *steps[5:]],
    "multiplies in place": lambda steps: [*steps[:4], steps[4].model_copy(update={"target": 3}), *steps[5:]],
    "has heads that do not divide": lambda steps: [*steps[:3], steps[3].model_copy(update={"heads": 5}), *steps[4:]],
    "chooses among the chosen": lambda steps: [
        *steps,
        GraphStep(operator="chosen", source=1, target=5, outputs=WIDTH, padding=7),
        GraphStep(operator="chosen", source=5, target=6, outputs=WIDTH, padding=7),
    ],
    "chooses two ids": lambda steps: [
        *steps,
        GraphStep(operator="chosen", source=1, target=5, outputs=WIDTH, padding=7),
        GraphStep(operator="chosen", source=1, target=6, outputs=WIDTH, padding=8),
    ],
    "chooses no id": lambda steps: [*steps, GraphStep(operator="chosen", source=1, target=5, outputs=WIDTH)],
    "attends from the chosen": lambda steps: [
        *steps,
        GraphStep(operator="chosen", source=2, target=5, outputs=3 * WIDTH, padding=7),
        GraphStep(operator="attention", source=5, keys=5, values=5, target=6, outputs=WIDTH, heads=3),
    ],
    "adds the chosen to all": lambda steps: [
        *steps,
        GraphStep(operator="chosen", source=1, target=5, outputs=WIDTH, padding=7),
        steps[4].model_copy(update={"residual": 5, "target": 6}),
    ],
    "multiplies with nothing": lambda steps: [
        *steps[:4],
        steps[4].model_copy(update={"gated": True, "residual": -1}),
        *steps[5:],
    ],
    "activates a gated product": lambda steps: [
        *steps[:4],
        steps[4].model_copy(update={"gated": True, "activation": "gelu"}),
        *steps[5:],
    ],
    "takes the first token twice": lambda steps: [
        *steps,
        GraphStep(operator="first", source=1, target=5, outputs=WIDTH),
        GraphStep(operator="first", source=5, target=6, outputs=WIDTH),
    ],
}


@pytest.mark.parametrize("what", REFUSED)
def test_steps_that_do_not_fit_together_are_refused(what: str) -> None:
    graph = encoder()
    steps = tuple(REFUSED[what](list(graph.steps)))

    with pytest.raises(ArtefactError, match="do not fit together"):
        opened(NativeGraph(steps, graph.output, graph.tensors), Threads(1, 1))


def test_the_engine_may_be_closed_twice_and_while_helpers_sleep() -> None:
    engine = opened(encoder(), Threads(1, 4))
    engine.run_wide(rows(12))

    engine.close()
    engine.close()
