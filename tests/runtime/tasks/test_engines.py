"""The tasks on the engines that have an fp32 plan: its answers, alone and in padded batches.

The native engine has none: tests/optimizer/quantise/native/test_steps.py holds its outputs against fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.manifest import GraphIO
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_optimizer.export import export
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.rows import run_rows
from penstock_runtime.tasks import Task, make_task
from tests.runtime.tasks.answers import assert_alike
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import FAMILIES, Built, Family
from tests.runtime.tasks.texts import HARD, LONG, MORE

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]

CLASSES = TaskName.TEXT_CLASSIFICATION
TEXTS = [*HARD.values(), *MORE]
BATCH_ROWS = 5
"""Rows of one run: of all lengths, so that most are padded."""

LABELS = {"candidate_labels": ["sports", "economy", "urgent"]}


@dataclass(frozen=True)
class Served:
    """A task on an engine."""

    task: Task
    engine: Engine
    io: GraphIO

    def __call__(self, inputs: Any, *, rows_per_run: int = 1, **parameters: Any) -> Any:
        """The answer, with `rows_per_run` rows in each run, padded to the longest."""
        prepared = self.task.prepare(self.task.parse(inputs, parameters))
        reduced = []
        for start in range(0, len(prepared.rows), rows_per_run):
            rows = prepared.rows[start : start + rows_per_run]
            outputs = run_rows(self.engine.run, self.io, rows)
            reduced += [self.task.reduce(row, own) for row, own in zip(rows, outputs, strict=True)]
        return self.task.assemble(prepared, reduced)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture(params=[EngineName.ONNXRUNTIME, EngineName.OPENVINO])
def engine_name(request: pytest.FixtureRequest) -> EngineName:
    chosen: EngineName = request.param
    return chosen


@pytest.fixture
def serve(engine_name: EngineName, tmp_path: Path) -> Iterator[Any]:
    """`serve(built, task)`: the task on the engine, from the graph that the exporter makes."""
    loaded: list[Engine] = []

    def of(built: Built, name: TaskName) -> Served:
        exported = export(built.folder(), HEAD_OF_TASK[name], tmp_path / name.value)
        recipe = Recipe(engine=engine_name, precision=Precision.FP32)
        engine = load_engine(exported.path, exported.io, recipe, Threads(streams=1, per_stream=1))
        loaded.append(engine)
        return Served(make_task(name, built.folder()), engine, exported.io)

    yield of
    for engine in loaded:
        engine.close()


@pytest.mark.parametrize("rows_per_run", [1, BATCH_ROWS])
def test_text_classification_has_the_answers_of_fp32(
    rows_per_run: int, family: Family, built: Build, serve: Any
) -> None:
    model = built(CLASSES, family)
    expected = [model.pipeline(CLASSES)(text, top_k=None, truncation=True) for text in TEXTS]
    assert_alike(serve(model, CLASSES)(TEXTS, rows_per_run=rows_per_run), expected, within=1e-4)


def in_their_order(found: dict[str, Any], expected: dict[str, Any], *, within: float) -> dict[str, Any]:
    """An answer with its labels in the order of the other one. Only scores that may be taken for each other, each being
    off by `within`, may have changed places: random weights have some (0.000195 apart)."""
    theirs = dict(zip(expected["labels"], expected["scores"], strict=True))
    in_order = [theirs[label] for label in found["labels"]]
    assert all(later <= earlier + 2 * within for earlier, later in pairwise(in_order)), found
    assert found["scores"] == sorted(found["scores"], reverse=True)
    ours = dict(zip(found["labels"], found["scores"], strict=True))
    return {**found, "labels": list(theirs), "scores": [ours[label] for label in theirs]}


def test_zero_shot_classification_has_the_answers_of_fp32(family: Family, built: Build, serve: Any) -> None:
    name = TaskName.ZERO_SHOT_CLASSIFICATION
    model = built(name, family)
    expected = model.pipeline(name)(TEXTS, **LABELS)

    found = serve(model, name)(TEXTS, rows_per_run=BATCH_ROWS, **LABELS)

    ordered = [in_their_order(one, other, within=1e-4) for one, other in zip(found, expected, strict=True)]
    assert_alike(ordered, expected, within=1e-4)


def test_token_classification_has_the_answers_of_fp32(family: Family, built: Build, serve: Any) -> None:
    name = TaskName.TOKEN_CLASSIFICATION
    model = built(name, family)
    theirs, ours = model.pipeline(name), serve(model, name)
    for strategy in ("none", "average"):
        expected = [theirs(text, aggregation_strategy=strategy) for text in TEXTS]
        assert_alike(ours(TEXTS, rows_per_run=BATCH_ROWS, aggregation_strategy=strategy), expected, within=1e-4)


def test_question_answering_has_the_answers_of_fp32(family: Family, built: Build, serve: Any) -> None:
    name = TaskName.QUESTION_ANSWERING
    model = built(name, family)
    asked = [{"question": "What is my name?", "context": context} for context in (*MORE, LONG)]
    expected = [model.pipeline(name)(**one) for one in asked]
    assert_alike(serve(model, name)(asked, rows_per_run=BATCH_ROWS), expected, within=1e-4)


def test_fill_mask_has_the_answers_of_fp32(family: Family, built: Build, serve: Any) -> None:
    name = TaskName.FILL_MASK
    model = built(name, family)
    mask = model.tokenizer.mask_token
    texts = [masked for text in MORE[:5] for masked in (f"{mask} {text}", f"{mask} and {mask}: {text}")]
    expected = [model.pipeline(name)(text, tokenizer_kwargs={"truncation": True}) for text in texts]
    assert_alike(serve(model, name)(texts, rows_per_run=BATCH_ROWS), expected, within=1e-4)


def test_feature_extraction_has_the_answers_of_fp32(family: Family, built: Build, serve: Any) -> None:
    name = TaskName.FEATURE_EXTRACTION
    model = built(name, family)
    found = serve(model, name)(TEXTS, rows_per_run=BATCH_ROWS)
    assert_alike([matrix.tolist() for matrix in found], model.pipeline(name)(TEXTS, truncation=True), within=1e-4)


def test_text_ranking_has_the_answers_of_fp32(family: Family, built: Build, serve: Any) -> None:
    name = TaskName.TEXT_RANKING
    model = built(name, family)
    pairs = [[MORE[0], text] for text in TEXTS]
    assert_alike(serve(model, name)(pairs, rows_per_run=BATCH_ROWS), model.task(name)(pairs), within=1e-4)
