"""The guard with real tasks and engines: small models of every task, and a candidate with wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from penstock.manifest import GraphIO
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_optimizer.export import export
from penstock_optimizer.guard.gate import (
    Forward,
    Reference,
    forward_of,
    judge_candidate,
    judging_samples,
    observe_reference,
    own_corpus,
    prepare,
    samples,
    split,
)
from penstock_optimizer.guard.judge import SampleRequest
from penstock_optimizer.search.recipes import REFERENCE
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Outputs, Row
from penstock_runtime.tasks import Task, make_task
from tests.golden.models import write_model
from tests.tasks import COMMON_TASKS


@dataclass
class Subject:
    """A model with its reference."""

    task: Task
    forward: Forward
    reference: Reference
    io: GraphIO


SubjectOf = Callable[[TaskName], Subject]


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> SubjectOf:
    @cache
    def make(name: TaskName) -> Subject:
        folder = tmp_path_factory.mktemp(name.value)
        pooled = name in {TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY}
        model = ModelFolder.open(write_model(folder / "model", name, pooled=pooled))
        task = make_task(name, model)
        exported = export(model, HEAD_OF_TASK[name], folder / "fp32")
        forward = forward_of(load_engine(exported.path, exported.io, REFERENCE, Threads(1, 1)), exported.io)
        requests = judging_samples(task, samples(name, split(own_corpus())[1]), at_most=60)
        return Subject(task, forward, observe_reference(task, forward, requests), exported.io)

    return make


@dataclass
class Noisy:
    """A forward pass with noise in proportion to each output, the same for the same row."""

    forward: Forward
    size: float
    rows: list[Row] = field(default_factory=list)

    def __call__(self, rows: Sequence[Row]) -> list[Outputs]:
        """The outputs with noise."""
        self.rows += rows
        return [self._noise(row, one) for row, one in zip(rows, self.forward(rows), strict=True)]

    def _noise(self, row: Row, outputs: Outputs) -> Outputs:
        generator = np.random.default_rng(abs(hash(tuple(row.ids))))
        return {
            name: (value + self.size * np.abs(value).mean() * generator.standard_normal(value.shape)).astype(np.float32)
            for name, value in outputs.items()
        }


@pytest.mark.parametrize("name", COMMON_TASKS)
def test_the_reference_is_accepted_as_a_candidate_and_may_be_batched(name: TaskName, subject_of: SubjectOf) -> None:
    context = subject_of(name)

    verdict = judge_candidate(context.task, context.forward, context.reference, AccuracyBudget())

    assert verdict.passed
    assert verdict.batching == "padded"
    assert verdict.texts == len(context.reference.prepared) > 30
    assert [m.name for m in verdict.metrics if m.higher_is_better and m.value != pytest.approx(1)] == []


@pytest.mark.parametrize("name", COMMON_TASKS)
def test_a_candidate_with_little_noise_passes_and_one_with_much_noise_fails(
    name: TaskName, subject_of: SubjectOf
) -> None:
    context = subject_of(name)

    def passed(size: float) -> bool:
        noisy = Noisy(context.forward, size)
        return judge_candidate(context.task, noisy, context.reference, AccuracyBudget()).passed

    assert passed(1e-4)
    assert not passed(2.0)


def test_every_request_is_run_row_by_row(subject_of: SubjectOf) -> None:
    context = subject_of(TaskName.TEXT_RANKING)
    noisy = Noisy(context.forward, 2.0)

    judge_candidate(context.task, noisy, context.reference, AccuracyBudget())

    wanted = [row.ids for row in context.reference.rows]
    assert [row.ids for row in noisy.rows[: len(wanted)]] == wanted


@pytest.mark.parametrize("name", COMMON_TASKS)
def test_nan_outputs_give_a_verdict_and_no_exception(name: TaskName, subject_of: SubjectOf) -> None:
    context = subject_of(name)

    def broken(rows: Sequence[Row]) -> list[Outputs]:
        return [{key: np.full_like(value, np.nan) for key, value in one.items()} for one in context.forward(rows)]

    verdict = judge_candidate(context.task, broken, context.reference, AccuracyBudget())

    assert not verdict.passed
    assert verdict.batching == ""


def test_a_failing_engine_gives_a_verdict_with_its_reason(subject_of: SubjectOf) -> None:
    context = subject_of(TaskName.FILL_MASK)

    def failing(_: Sequence[Row]) -> list[Outputs]:
        raise InferenceFailed("onnxruntime: no kernel")

    verdict = judge_candidate(context.task, failing, context.reference, AccuracyBudget())

    assert (verdict.passed, verdict.reason) == (False, "a judging request failed: onnxruntime: no kernel")


def test_requests_that_the_endpoint_refuses_are_left_out(subject_of: SubjectOf, tmp_path: Path) -> None:
    folder = ModelFolder.open(write_model(tmp_path, TaskName.TEXT_CLASSIFICATION))
    strict = make_task(TaskName.TEXT_CLASSIFICATION, folder, truncate=False)

    prepared = prepare(strict, [SampleRequest("short"), SampleRequest("long " * 500), SampleRequest("short too")])

    assert len(prepared) == 2
