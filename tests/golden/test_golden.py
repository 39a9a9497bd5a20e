"""The answers of each task and each kind of model equal the reviewed ones.

After an intended change: `python -m tests.golden.snapshots`, and review the difference.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from penstock.tasks import TaskName
from penstock_runtime.models.folder import ModelFolder
from tests.golden import pipeline, snapshots
from tests.golden.cases import CASES
from tests.golden.models import BERT, KINDS, Kind, write_model
from tests.runtime.tasks.answers import assert_alike
from tests.tasks import COMMON_TASKS

WITHIN = 1e-4
BERT_DIGEST = "0a01ca76d030877b67c5dfbca877d31c6ca8a55a9ebd7046f0afdbf9224d4298"
"""sha256 of the weights, in the order of their names."""


@pytest.mark.parametrize("task", COMMON_TASKS, ids=lambda task: task.value)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_small_model_answers_as_reviewed(kind: Kind, task: TaskName, tmp_path: Path) -> None:
    assert_alike(snapshots.compute(kind, task, tmp_path), snapshots.load(kind.name, task), within=WITHIN)


@pytest.mark.parametrize("task", snapshots.TASKS_OF_MINILM, ids=lambda task: task.value)
def test_minilm_answers_as_reviewed(task: TaskName, tmp_path: Path) -> None:
    assert_alike(snapshots.compute_minilm(task, tmp_path), snapshots.load("minilm", task), within=WITHIN)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_questions_are_answered_as_by_the_pipeline_of_transformers_4(kind: Kind, tmp_path: Path) -> None:
    expected = json.loads(pipeline.PATH.read_text(encoding="utf-8"))[kind.name]

    assert_alike(pipeline.compute(kind, tmp_path), expected, within=WITHIN)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_snapshots_and_cases_match(kind: Kind) -> None:
    kept = json.loads(snapshots.path_of(kind.name).read_text(encoding="utf-8"))

    assert {task: list(cases) for task, cases in kept.items()} == {
        task.value: list(cases) for task, cases in CASES.items()
    }


def test_every_task_has_cases() -> None:
    assert set(CASES) == set(COMMON_TASKS)


def test_weights_never_change(tmp_path: Path) -> None:
    """When this fails, the models are others: every snapshot would change without a change of ours."""
    model = write_model(tmp_path, TaskName.FEATURE_EXTRACTION, BERT)

    weights = load_file(model / "model.safetensors")
    everything = b"".join(weights[name].astype("<f4").tobytes() for name in sorted(weights))
    assert hashlib.sha256(everything).hexdigest() == BERT_DIGEST
    assert ModelFolder.open(model).max_tokens == 48


def test_answers_of_one_kind_differ_between_cases() -> None:
    """A snapshot of constants would pass whatever the code does."""
    for kind in KINDS:
        best = snapshots.load(kind.name, TaskName.TEXT_CLASSIFICATION)["all classes of several texts"]
        assert len({json.dumps(answer) for answer in best}) == len(best)
