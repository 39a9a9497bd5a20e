"""Whole models on the native engine: its outputs are near those of the ONNX graph, with every batch policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from penstock.errors import OptimizationError
from penstock.recipe import EngineName, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_optimizer.export import Exported, Flavour, export
from penstock_optimizer.guard.gate import (
    arithmetic_of,
    calibration_rows,
    forward_of,
    judge_candidate,
    judging_samples,
    observe_reference,
    own_corpus,
    samples,
    split,
)
from penstock_optimizer.quantise import build
from penstock_optimizer.quantise.native.steps import native_graph
from penstock_optimizer.quantise.quantiser import RowwiseWriter, quantise_graph
from penstock_optimizer.search.recipes import REFERENCE
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Row, collate
from penstock_runtime.tasks import make_task
from penstock_runtime.tokens.tokenizer import Tokenizer
from tests.golden.models import BERT, KINDS, LABELS, MPNET, ROBERTA, Kind, Sizes, write_model
from tests.runtime.engines.native.programs import needs_library

pytestmark = needs_library
SIZES = Sizes(width=128, layers=2, heads=4, inner=256, positions=64)
TUNED = Recipe(
    engine=EngineName.NATIVE, precision=Precision.INT8_ROWWISE, options=("compensated", "per-channel", "smooth")
)
BARE = Recipe(engine=EngineName.NATIVE, precision=Precision.INT8_ROWWISE)
PLAIN = Recipe(engine=EngineName.NATIVE, precision=Precision.INT8_ROWWISE, options=("per-channel",))
TASKS = (
    TaskName.FEATURE_EXTRACTION,
    TaskName.TEXT_CLASSIFICATION,
    TaskName.TOKEN_CLASSIFICATION,
    TaskName.QUESTION_ANSWERING,
    TaskName.FILL_MASK,
)


def exported(folder: Path, kind: Kind, task: TaskName, sizes: Sizes = SIZES) -> tuple[Exported, list[Row]]:
    """The fused graph, and rows to calibrate with."""
    model = ModelFolder.open(write_model(folder / "model", task, kind, sizes))
    calibrating, _ = split(own_corpus())
    requests = samples(task, calibrating, mask=Tokenizer.load(model).mask_token or "")
    rows = calibration_rows(make_task(task, model), requests, at_most=24)
    return export(model, HEAD_OF_TASK[task], folder / "graph", flavour=Flavour.FUSED), rows


def engine_of(path: Path, graph: Exported) -> Engine:
    return load_engine(path, graph.io, TUNED, Threads(1, 1))


EXTENDED = (pytest.mark.extended,)
PAIRS = [
    pytest.param(
        kind,
        task,
        id=f"{kind.name}-{task.value}",
        # Each kind and each task twice by default, once in the fast loop.
        marks=((), (pytest.mark.slow,))[offset] if (offset := (i - j) % min(len(KINDS), len(TASKS))) < 2 else EXTENDED,
    )
    for i, kind in enumerate(KINDS)
    for j, task in enumerate(TASKS)
]


@pytest.mark.parametrize(("kind", "task"), PAIRS)
def test_the_engine_has_the_outputs_of_the_graph(kind: Kind, task: TaskName, tmp_path: Path) -> None:
    graph, rows = exported(tmp_path, kind, task)
    written = tmp_path / "rowwise.onnx"
    quantise_graph(TUNED, graph.path, graph.io, rows, written, writer=RowwiseWriter, threads=2)

    built = build(TUNED, graph.path, graph.io, rows, tmp_path / "native", threads=2)

    expected_session, fp32_session = (
        ort.InferenceSession(str(one), providers=["CPUExecutionProvider"]) for one in (written, graph.path)
    )
    engine = engine_of(built.path, graph)
    off: list[tuple[float, ...]] = []
    for row in rows:
        batch = collate([row])
        feed = {name: getattr(batch, name) for name in graph.io.inputs}
        answers = engine.run(batch)
        found = np.stack([answers[name] for name in graph.io.outputs])
        expected, true = (
            np.stack(session.run(list(graph.io.outputs), feed)) for session in (expected_session, fp32_session)
        )
        assert found.shape == expected.shape
        pairs = ((found, expected), (found, true), (expected, true))
        off.append(tuple(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs))
    engine.close()
    # The last bit of a sum sometimes decides which step of the grid a number falls on, and later layers amplify that:
    # the two are about as far from each other as from fp32, and the engine is no further from fp32.
    from_each_other, from_fp32, reference_from_fp32 = np.mean(off, axis=0)
    assert from_each_other <= 1.5 * reference_from_fp32
    assert from_fp32 <= 1.25 * reference_from_fp32


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_head_of_one_label_answers_as_fp32(kind: Kind, tmp_path: Path) -> None:
    graph, rows = exported(tmp_path, kind, TaskName.TEXT_RANKING)
    reference = ort.InferenceSession(str(graph.path), providers=["CPUExecutionProvider"])
    engine = engine_of(build(TUNED, graph.path, graph.io, rows, tmp_path / "native", threads=2).path, graph)

    true, found = [], []
    for row in rows:
        batch = collate([row])
        true.append(reference.run(None, {name: getattr(batch, name) for name in graph.io.inputs})[0])
        found.append(engine.run(batch)["logits"])
    engine.close()

    assert {one.shape for one in found} == {(1, 1)}
    assert np.linalg.norm(np.subtract(found, true)) <= 0.1 * np.linalg.norm(true)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", [ROBERTA, MPNET], ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_in_any_batch(kind: Kind, task: TaskName, tmp_path: Path) -> None:
    graph, rows = exported(tmp_path, kind, task)
    built = build(PLAIN, graph.path, graph.io, rows, tmp_path / "native")
    engine = engine_of(built.path, graph)
    forward = forward_of(engine, built.io)

    together = forward(rows[:12])

    for row, outputs in zip(rows[:12], together, strict=True):
        (alone,) = forward([row])
        for name, values in alone.items():
            np.testing.assert_array_equal(outputs[name], values)
    engine.close()


@pytest.mark.parametrize("task", [TaskName.QUESTION_ANSWERING, TaskName.FILL_MASK])
def test_the_guard_accepts_its_answers_and_every_batch(task: TaskName, tmp_path: Path) -> None:
    sizes = Sizes(width=128, layers=2, heads=4, inner=256, positions=128)
    graph, rows = exported(tmp_path, BERT, task, sizes)
    model = ModelFolder.open(tmp_path / "model")
    tasks = make_task(task, model)
    requests = samples(task, split(own_corpus())[1], mask=Tokenizer.load(model).mask_token or "")
    reference_engine = load_engine(graph.path, graph.io, REFERENCE, Threads(1, 1))
    reference = observe_reference(
        tasks, forward_of(reference_engine, graph.io), judging_samples(tasks, requests, at_most=40)
    )
    engine = engine_of(build(TUNED, graph.path, graph.io, rows, tmp_path / "native", threads=2).path, graph)

    verdict = judge_candidate(
        tasks, forward_of(engine, graph.io), reference, AccuracyBudget(), arithmetic=arithmetic_of(TUNED)
    )

    engine.close()
    reference_engine.close()
    assert (verdict.passed, verdict.batching) == (True, "padded"), verdict.reason


def test_the_same_graph_and_rows_make_the_same_file(tmp_path: Path) -> None:
    graph, rows = exported(tmp_path, BERT, TaskName.FEATURE_EXTRACTION)

    files = [build(TUNED, graph.path, graph.io, rows, tmp_path / n, threads=2).path.read_bytes() for n in "ab"]

    assert files[0] == files[1]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["model.native"]


def refused(folder: Path, kind: Kind, task: TaskName, sizes: Sizes = SIZES) -> str:
    graph, rows = exported(folder, kind, task, sizes)
    with pytest.raises(OptimizationError) as error:
        build(PLAIN, graph.path, graph.io, rows, folder / "native")
    assert not list((folder / "native").iterdir())
    return str(error.value)


def rowwise(folder: Path, graph: Exported, rows: list[Row]) -> Any:
    """The quantised ONNX graph that the native steps are read from."""
    path = folder / "rowwise.onnx"
    return quantise_graph(BARE, graph.path, graph.io, rows, path, writer=RowwiseWriter, threads=1)[0]


def test_three_products_of_one_source_are_one_and_no_tensor_is_left_over(tmp_path: Path) -> None:
    graph, rows = exported(tmp_path, MPNET, TaskName.FEATURE_EXTRACTION)

    made = native_graph(rowwise(tmp_path, graph, rows))

    products = [(step.inputs, step.outputs) for step in made.steps if step.operator == "linear8"]
    assert products == 2 * [(128, 384), (128, 128), (128, 256), (256, 128)]
    assert {name for step in made.steps for name in step.tensors.values()} == set(made.tensors)


def test_a_bias_on_the_scores_that_is_not_one_of_distances_is_refused_with_the_reason(tmp_path: Path) -> None:
    graph, rows = exported(tmp_path, MPNET, TaskName.FEATURE_EXTRACTION)
    model = rowwise(tmp_path, graph, rows)
    (bias,) = [one for one in model.graph.initializer if one.name == "distance.bias"]
    array = numpy_helper.to_array(bias).copy()
    array[0, 1, 5, 7] += 1
    bias.CopyFrom(numpy_helper.from_array(array, bias.name))

    with pytest.raises(OptimizationError, match="not one of distances"):
        native_graph(model)


@pytest.mark.parametrize("outputs", [("start_logits",), ("end_logits", "start_logits"), ("start_logits", "words")])
def test_outputs_that_are_not_the_columns_of_one_product_are_refused(outputs: tuple[str, ...], tmp_path: Path) -> None:
    graph, rows = exported(tmp_path, BERT, TaskName.QUESTION_ANSWERING)
    model = rowwise(tmp_path, graph, rows)
    known = {output.name: output for output in model.graph.output}
    del model.graph.output[:]
    model.graph.output.extend(known.get(name, helper.make_empty_tensor_value_info(name)) for name in outputs)

    with pytest.raises(OptimizationError, match=f"what the outputs are: {', '.join(outputs)}"):
        native_graph(model)


def test_widths_that_the_kernels_have_no_tails_for_are_refused_with_the_reason(tmp_path: Path) -> None:
    sizes = Sizes(width=144, layers=1, heads=4, inner=256, positions=64)

    assert "no multiple of 32" in refused(tmp_path, BERT, TaskName.FEATURE_EXTRACTION, sizes)


@pytest.mark.parametrize("task", [TaskName.TEXT_CLASSIFICATION, TaskName.TOKEN_CLASSIFICATION])
def test_many_labels_are_padded_to_an_8_bit_product_and_the_padding_is_removed(
    task: TaskName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LABELS, task, tuple(f"LABEL_{index}" for index in range(150)))
    graph, rows = exported(tmp_path, BERT, task)
    reference = ort.InferenceSession(str(graph.path), providers=["CPUExecutionProvider"])

    built = build(TUNED, graph.path, graph.io, rows, tmp_path / "native", threads=2)

    engine = engine_of(built.path, graph)
    batch = collate(rows[:5])
    (true,), found = reference.run(None, {name: getattr(batch, name) for name in graph.io.inputs}), engine.run(batch)
    engine.close()
    assert "linear32" not in built.fused_nodes
    assert found["logits"].shape == true.shape
    kept = batch.attention_mask.astype(bool) if task is TaskName.TOKEN_CLASSIFICATION else slice(None)
    assert np.linalg.norm((found["logits"] - true)[kept]) <= 0.1 * np.linalg.norm(true[kept])


@pytest.mark.parametrize("operator", ["Erf", "Sigmoid", "Conv"])
def test_an_operator_that_it_does_not_know_is_named(tmp_path: Path, operator: str) -> None:
    graph, _ = exported(tmp_path, BERT, TaskName.FEATURE_EXTRACTION)
    model = onnx.load(str(graph.path))
    node: Any = helper.make_node(operator, [model.graph.node[0].output[0]], ["more"], "more")
    model.graph.node.insert(1, node)

    with pytest.raises(OptimizationError, match=operator):
        native_graph(model)


def test_without_the_library_nothing_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    graph, rows = exported(tmp_path, BERT, TaskName.FEATURE_EXTRACTION)

    with pytest.raises(OptimizationError, match="was not compiled") as error:
        build(TUNED, graph.path, graph.io, rows, tmp_path / "native")

    assert "gcc" in error.value.remedy
