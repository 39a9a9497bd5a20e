"""Servers of classifiers that find words: the real server, tasks and tokenizer around a rule instead of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.resources.endpoint_parts.guard_policy import GuardPolicy
from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_runtime.app.server import Server, request_limits
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Outputs, Row
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from penstock_runtime.tasks.factory import make_task
from tests.runtime.http.serving import Endpoint, Model, running, write_folder

TEXTS, TOKENS = TaskName.TEXT_CLASSIFICATION, TaskName.TOKEN_CLASSIFICATION
LABELS = {TEXTS: ("SAFE", "INJECTION"), TOKENS: ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")}
BLOCKING = {"labels": {"INJECTION": {"above": 0.9, "reason": "prompt injection", "category": "illicit"}}}
MASKING = {"labels": {"PER": {"action": "Mask"}, "LOC": {"action": "Mask", "replacement": "[{label}]"}}}


class Words(Model):
    """INJECTION in texts with `bad` (in part with `dog`); PER at `clara` and LOC at `berkeley`."""

    def _run(self, row: Row) -> Outputs:
        ids = {word: self.task.tokenizer.id_of(word) for word in ("bad", "dog", "clara", "berkeley")}
        if self.task.name is TEXTS:
            logit = 5.0 if ids["bad"] in row.ids else 1.0 if ids["dog"] in row.ids else -5.0
            return {"logits": np.array([0.0, logit], np.float32)}
        logits = np.zeros((len(row.ids), 5), np.float32)
        logits[:, 0] = 5
        logits[[one == ids["clara"] for one in row.ids], 1] = 10
        logits[[one == ids["berkeley"] for one in row.ids], 3] = 10
        return {"logits": logits}


def words(path: Path, task: TaskName, *, problem: str = "") -> Words:
    """The model for a task."""
    folder = write_folder(path, task)
    config = json.loads((folder / "config.json").read_bytes())
    config |= {
        "id2label": dict(enumerate(LABELS[task])),
        "label2id": {name: at for at, name in enumerate(LABELS[task])},
    }
    if problem:
        config["problem_type"] = problem
    (folder / "config.json").write_text(json.dumps(config))
    opened = ModelFolder.open(folder, weights=False)
    made = make_task(task, opened, limits=request_limits(Settings()))
    return Words(made, HEAD_OF_TASK[task], len(LABELS[task]), opened.config["vocab_size"])


@contextmanager
def guarding(
    predictor: Any, task: TaskName = TEXTS, policy: Mapping[str, Any] | None = BLOCKING, **flags: Any
) -> Iterator[Endpoint]:
    """A server of a classifier with this policy."""

    def make(settings: Settings) -> tuple[Server, Any]:
        status = ServerStatus("guard", task, limits={"max_input_tokens": 64})
        status.guard_policy = None if policy is None else GuardPolicy.model_validate_json(json.dumps(policy))
        return Server(status, settings, predictor), predictor

    with running(make, **flags) as endpoint:
        yield endpoint
