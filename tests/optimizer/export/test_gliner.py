"""GLiNER: the entities are those of the package gliner, which `gliner/record.py` has recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptModel, UnsupportedModel
from penstock.recipe import EngineName, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import TaskName
from penstock_optimizer.export import export
from penstock_optimizer.guard.gate import judge_candidate, observe, observe_reference
from penstock_optimizer.guard.judge import SampleRequest
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.gliner import HEAD_FILE
from penstock_runtime.rows import Outputs, Row, run_rows
from penstock_runtime.tasks.base import HeadInAssemble
from penstock_runtime.tasks.extraction.zero_shot_token_classification import spans
from penstock_runtime.tasks.factory import head_of, make_task
from tests.optimizer.export.gliner.folders import CASES, LABELS, TEXTS, THRESHOLD, write_gliner

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
NAME = TaskName.ZERO_SHOT_TOKEN_CLASSIFICATION
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "gliner" / "golden.json").read_text())


class Asked:
    """The task of a folder with its fp32 graph."""

    def __init__(self, folder: ModelFolder, out: Path, engine: EngineName = EngineName.ONNXRUNTIME) -> None:
        self.task = make_task(NAME, folder)
        exported = export(folder, head_of(NAME, folder), out)
        recipe = Recipe(engine=engine, precision=Precision.FP32)
        self.engine = load_engine(exported.path, exported.io, recipe, Threads(1, 1), max_tokens=folder.max_tokens)
        self.io = exported.io

    def forward(self, rows: Sequence[Row]) -> list[Outputs]:
        """The outputs of rows in a batch."""
        return run_rows(self.engine.run, self.io, rows)

    def __call__(self, inputs: Any, **parameters: Any) -> Any:
        request = self.task.parse(inputs, {"candidate_labels": list(LABELS), **parameters})
        return observe(self.task, self.forward, self.task.prepare(request)).answer


@pytest.mark.parametrize("case", CASES)
def test_entities_are_those_of_the_package(case: str, tmp_path: Path) -> None:
    asked = Asked(ModelFolder.open(write_gliner(tmp_path / "model", case)), tmp_path / "out")

    for kind, expected in GOLDEN[case].items():
        answers = asked(list(TEXTS), threshold=THRESHOLD, multi_label=kind == "multi_label")

        for text, found, wanted in zip(TEXTS, answers, expected, strict=True):
            key = [(one["start"], one["end"], one["entity_group"]) for one in found]
            assert sorted(key) == sorted((start, end, label) for start, end, label, _ in wanted)
            scores = {(start, end, label): score for start, end, label, score in wanted}
            np.testing.assert_allclose([one["score"] for one in found], [scores[one] for one in key], atol=1e-4)
            assert all(one["word"] == text[one["start"] : one["end"]] for one in found)
            assert [one["start"] for one in found] == sorted(one["start"] for one in found)
    assert sum(map(len, GOLDEN[case]["flat"])) > 3
    assert asked(TEXTS[0], threshold=THRESHOLD) == asked([TEXTS[0]], threshold=THRESHOLD)[0]
    asked.engine.close()


def test_the_other_engine_gives_the_same(tmp_path: Path) -> None:
    folder = ModelFolder.open(write_gliner(tmp_path / "model", "deberta"))
    one, other = (Asked(folder, tmp_path / name, name) for name in (EngineName.ONNXRUNTIME, EngineName.OPENVINO))
    for mine, theirs in zip(one(list(TEXTS)), other(list(TEXTS)), strict=True):
        assert [entity["word"] for entity in mine] == [entity["word"] for entity in theirs]
    one.engine.close()
    other.engine.close()


def test_the_widest_entity_that_the_files_state_does_not_decide_how_much_is_computed(tmp_path: Path) -> None:
    path = write_gliner(tmp_path / "model", "deberta")
    file = path / "gliner_config.json"
    answers = []
    for widest in (100, 10**9):
        file.write_text(json.dumps({**json.loads(file.read_text()), "max_width": widest}))
        asked = Asked(ModelFolder.open(path), tmp_path / "out")
        answers.append(asked(list(TEXTS), threshold=THRESHOLD))
        asked.engine.close()
    assert answers[0] == answers[1]


def test_an_artefact_has_the_head(tmp_path: Path) -> None:
    path = write_gliner(tmp_path / "model", "deberta")
    folder = ModelFolder.open(path)
    files = folder.artefact_files
    assert set(files) == {HEAD_FILE}
    assert path / "gliner_config.json" in folder.settings
    (path / "model.safetensors").unlink()
    (path / HEAD_FILE).write_bytes(files[HEAD_FILE])

    head = ModelFolder.open(path, weights=False).gliner

    assert head is not None
    assert folder.gliner is not None
    words, labels = np.random.default_rng(1).normal(size=(2, 5, 24)).astype(np.float32)
    np.testing.assert_allclose(head.logits(words, labels), folder.gliner.logits(words, labels), atol=1e-5)


def test_long_texts_are_cut_after_a_word_or_refused(tmp_path: Path) -> None:
    folder = ModelFolder.open(write_gliner(tmp_path / "model", "deberta"))
    task = make_task(NAME, folder)
    long = "born in london " * 30
    prepared = task.prepare(task.parse([long, "x"], {"candidate_labels": "person, city"}))

    assert prepared.truncated == 1
    assert isinstance(task, HeadInAssemble)
    # The model reads 40 words.
    assert prepared.cut_at == (len("born in london " * 13 + "born"), None)
    with pytest.raises(InvalidInput, match=r"inputs\[0\] is too long: its first 40 words fit"):
        task.prepare(task.parse([long, "x"], {"candidate_labels": ["person"], "truncate": False}))
    with pytest.raises(InvalidInput, match="the labels leave no room for a text"):
        task.prepare(task.parse("x", {"candidate_labels": ["person"] * 9 + [f"thing {n}" for n in range(60)]}))
    assert task.prepare(task.parse(["  ", "\n"], {"candidate_labels": "person"})).rows == []


def test_other_architectures_and_tasks_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_gliner(tmp_path / "model", "deberta")
    with pytest.raises(UnsupportedModel, match="is a GLiNER model") as caught:
        make_task(TaskName.TOKEN_CLASSIFICATION, ModelFolder.open(path))
    assert "zero-shot-token-classification" in caught.value.remedy
    original = json.loads((path / "gliner_config.json").read_text())
    for change, message in (
        ({"span_mode": "token_level"}, "span_mode is 'token_level'"),
        ({"subtoken_pooling": "mean"}, "subtoken_pooling is 'mean'"),
        ({"labels_encoder": "x"}, "labels_encoder is 'x'"),
        ({"encoder_config": None}, "has no encoder_config"),
    ):
        (path / "gliner_config.json").write_text(json.dumps({**original, **change}))
        with pytest.raises(UnsupportedModel, match=message):
            ModelFolder.open(path)
    (path / "gliner_config.json").write_text(json.dumps({**original, "num_rnn_layers": 3}))
    with pytest.raises(CorruptModel, match=r"rnn\.lstm\.bias_ih_l1' is missing"):
        make_task(NAME, ModelFolder.open(path))


def test_the_guard_rejects_other_entities(tmp_path: Path) -> None:
    folder = ModelFolder.open(write_gliner(tmp_path / "model", "modernbert"))
    asked = Asked(folder, tmp_path / "out")
    samples = [SampleRequest(text, {"candidate_labels": list(LABELS)}) for text in TEXTS * 3]
    reference = observe_reference(asked.task, asked.forward, samples)
    passed = judge_candidate(asked.task, asked.forward, reference, AccuracyBudget())
    assert passed.passed
    assert {"span_agreement", "entity_f1"} <= {metric.name for metric in passed.metrics}

    def other(rows: Sequence[Row]) -> list[Outputs]:
        return [{"last_hidden_state": -outputs["last_hidden_state"]} for outputs in asked.forward(rows)]

    verdict = judge_candidate(asked.task, other, reference, AccuracyBudget())
    assert not verdict.passed
    assert "span_agreement" in verdict.reason
    asked.engine.close()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
def test_flat_entities_do_not_overlap(seed: int, words: int, multi_label: bool) -> None:
    scores = np.random.default_rng(seed).random((words, 3, 2)).astype(np.float32)
    for first in range(words):
        scores[first, words - first :] = 0
    found = spans(scores, 0.4, multi_label=multi_label)

    places = [(first, last) for first, last, _, _ in found]
    assert places == sorted(places)
    if not multi_label:
        assert len(set(places)) == len(places)
    for one in set(places):
        assert all(other == one or other[1] < one[0] or one[1] < other[0] for other in places)
    first, width, label = map(int, np.unravel_index(int(scores.argmax()), scores.shape))
    if scores[first, width, label] > 0.4:
        assert (first, first + width) in places
