from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ArtefactError
from penstock.manifest import Axes, GraphIO
from penstock.recipe import Recipe
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.engines.onnxruntime import fused_nodes
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Batch, Row, collate, run_rows
from tests.runtime.minilm import (
    OPENVINO_BF16,
    OPENVINO_FP32,
    OPENVINO_STATIC,
    ORT_DYNAMIC,
    ORT_FP32,
    graph,
    prepared,
    texts,
)

ALL = pytest.mark.parametrize("recipe", [ORT_FP32, OPENVINO_FP32], ids=lambda recipe: str(recipe.engine))
TWO = Threads(2, 1)


def load(recipe: Recipe, threads: Threads = TWO, *, wide: bool = False) -> Engine:
    path, io = graph(recipe)
    return load_engine(path, io, recipe, threads, wide=wide, max_tokens=512)


def some_rows(count: int = 12) -> list[Row]:
    return [row for text in texts(count, seed=1, longest=60) for row in prepared(text)]


def test_the_engines_agree() -> None:
    rows = some_rows()
    vectors = []
    for recipe in (ORT_FP32, OPENVINO_FP32):
        engine = load(recipe)
        vectors.append([run_rows(engine.run, graph(recipe)[1], [row])[0]["last_hidden_state"] for row in rows])
        engine.close()

    for one, other, row in zip(*vectors, rows, strict=True):
        assert one.shape == other.shape == (row.length, 384)
        assert one.dtype == other.dtype == np.float32
        np.testing.assert_allclose(one, other, atol=2e-5)


@ALL
def test_threads_that_run_at_once_do_not_disturb_each_other(recipe: Recipe) -> None:
    engine = load(recipe)
    io = graph(recipe)[1]
    rows = some_rows(30)
    alone = [run_rows(engine.run, io, [row])[0]["last_hidden_state"] for row in rows]

    with ThreadPoolExecutor(TWO.streams) as pool:
        together = list(pool.map(lambda row: run_rows(engine.run, io, [row])[0]["last_hidden_state"], rows))

    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one, other)
    engine.close()


@ALL
def test_outputs_share_no_memory_with_other_runs(recipe: Recipe) -> None:
    engine = load(recipe, Threads(1, 1))
    one, other = some_rows(2)
    first = engine.run(collate([one]))["last_hidden_state"]
    kept = first.copy()
    engine.run(collate([other]))
    engine.run(collate([other, one]))

    assert np.array_equal(first, kept)
    engine.close()


@ALL
@pytest.mark.parametrize("streams", [1, 2])
def test_a_wide_run_has_the_same_outputs(recipe: Recipe, streams: int) -> None:
    engine = load(recipe, Threads(streams, 1), wide=True)
    batch = collate(some_rows(1))

    assert np.array_equal(engine.run(batch)["last_hidden_state"], engine.run_wide(batch)["last_hidden_state"])
    engine.close()


@pytest.mark.parametrize(
    ("recipe", "streams", "wide", "copies"),
    [
        (ORT_FP32, 2, False, 1),
        (ORT_FP32, 2, True, 1),
        (OPENVINO_FP32, 2, False, 1),
        (OPENVINO_FP32, 1, True, 1),
        (OPENVINO_FP32, 2, True, 2),
    ],
)
def test_facts_report_a_second_copy_of_the_weights(recipe: Recipe, streams: int, wide: bool, copies: int) -> None:
    engine = load(recipe, Threads(streams, 1), wide=wide)

    assert engine.facts.weight_copies == copies
    assert engine.facts.engine == recipe.engine.value
    assert engine.facts.threads == Threads(streams, 1)
    assert engine.facts.version[0].isdigit()
    engine.close()


@pytest.mark.parametrize(
    ("recipe", "precisions"),
    [
        (ORT_FP32, {"f32"}),
        (ORT_DYNAMIC, {"i8"}),
        (OPENVINO_FP32, {"f32"}),
        (OPENVINO_BF16, {"bf16", "f32"}),  # f32 where bf16 is not native
        (OPENVINO_STATIC, {"i8"}),
    ],
    ids=lambda value: getattr(value, "slug", ""),
)
def test_the_precision_in_use_is_reported(recipe: Recipe, precisions: set[str]) -> None:
    engine = load(recipe)

    assert engine.facts.precision in precisions
    engine.close()


def test_fused_nodes_are_read_back_from_the_optimised_graph() -> None:
    plain = fused_nodes(graph(ORT_FP32)[0])
    quantised = fused_nodes(graph(ORT_DYNAMIC)[0])

    assert plain["Attention"] == 6
    assert plain["BiasGelu"] == 6
    assert plain.get("SkipLayerNormalization", 0) + plain.get("LayerNormalization", 0) == 13
    assert quantised["QAttention"] == 6
    assert quantised["DynamicQuantizeMatMul"] == 18


@ALL
def test_a_row_that_the_graph_cannot_take_is_an_inference_failure(recipe: Recipe) -> None:
    path, io = graph(recipe)
    engine = load_engine(path, io, recipe, Threads(1, 1), max_tokens=512)

    with pytest.raises(InferenceFailed, match=recipe.engine.value):
        engine.run(collate([Row([1] * 600)]))  # its position table ends at 512

    assert engine.run(collate([Row([1] * 512)]))["last_hidden_state"].shape == (1, 512, 384)
    engine.close()


@ALL
def test_an_exception_of_the_library_is_an_inference_failure_and_the_next_run_succeeds(recipe: Recipe) -> None:
    engine = load(recipe, Threads(1, 1))
    good = collate(some_rows(1))
    crooked = Batch(good.input_ids, np.ones((1, 3), dtype=np.int64), good.token_type_ids)
    before = engine.run(good)["last_hidden_state"]

    with pytest.raises(InferenceFailed, match=recipe.engine.value):
        engine.run(crooked)

    assert np.array_equal(engine.run(good)["last_hidden_state"], before)
    engine.close()


@ALL
@pytest.mark.parametrize("content", [None, b"", b"not a graph", b"\x08\x08truncated"])
def test_a_file_that_does_not_load_is_an_artefact_error(recipe: Recipe, content: bytes | None, tmp_path: Path) -> None:
    source, io = graph(recipe)
    path = tmp_path / source.name
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ArtefactError, match=r"missing|does not load") as caught:
        load_engine(path, io, recipe, Threads(1, 1))

    assert str(path) in caught.value.message
    assert caught.value.remedy


def test_weights_that_are_missing_or_cut_are_an_artefact_error(tmp_path: Path) -> None:
    source, io = graph(OPENVINO_FP32)
    path = tmp_path / source.name
    path.write_bytes(source.read_bytes())
    for content in (None, b"cut"):
        if content is not None:
            path.with_suffix(".bin").write_bytes(content)
        with pytest.raises(ArtefactError, match="does not load"):
            load_engine(path, io, OPENVINO_FP32, Threads(1, 1))


@ALL
@pytest.mark.parametrize(
    "io",
    [
        GraphIO(inputs=("input_ids", "attention_mask"), outputs={"last_hidden_state": Axes.TOKENS}),
        GraphIO(inputs=("input_ids", "attention_mask", "pixels"), outputs={"last_hidden_state": Axes.TOKENS}),
        GraphIO(inputs=("input_ids", "attention_mask", "token_type_ids"), outputs={"logits": Axes.ROW}),
    ],
)
def test_another_graph_than_described_is_an_artefact_error(recipe: Recipe, io: GraphIO) -> None:
    with pytest.raises(ArtefactError, match=r"described|missing"):
        load_engine(graph(recipe)[0], io, recipe, Threads(1, 1))


def test_an_engine_is_imported_only_when_a_recipe_wants_it() -> None:
    code = (
        "import sys; import penstock_runtime.engines.load, penstock_runtime.serving.predictor;"
        "print([name for name in ('onnxruntime', 'openvino', 'torch') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)

    assert found.stdout.strip() == "[]"
