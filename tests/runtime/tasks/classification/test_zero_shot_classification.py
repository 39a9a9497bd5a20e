from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import BertForSequenceClassification

from penstock.errors import UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.tasks.classification.zero_shot_classification import entailment_label
from tests.runtime.tasks.answers import assert_alike
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT, FAMILIES, NLI, SMALL, Built, Family
from tests.runtime.tasks.texts import HARD, LONG, MORE

NAME = TaskName.ZERO_SHOT_CLASSIFICATION
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]

OPTIONS: tuple[dict[str, Any], ...] = (
    {"candidate_labels": ["sports", "economy", "urgent"]},
    {"candidate_labels": ["sports", "economy", "urgent"], "multi_label": True},
    {"candidate_labels": " sports, economy ,,"},
    {"candidate_labels": ["only one"]},
    {"candidate_labels": ["東京", "a {} b"], "hypothesis_template": "It is {}, {{really}}."},
)


def assert_ranked_alike(ours: Any, theirs: Any) -> None:
    """Labels whose scores differ by no more than rounding may change places: the tokenizers of the tests, and with them
    the scores, are others in each run."""
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_ranked_alike(mine, other)
        return
    by_label = dict(sorted(zip(ours["labels"], ours["scores"], strict=True)))
    assert_alike(by_label, dict(sorted(zip(theirs["labels"], theirs["scores"], strict=True))))
    assert_alike({**ours, "labels": None}, {**theirs, "labels": None})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_labels_are_ranked_as_by_the_pipeline(family: Family, options: dict[str, Any], built: Build) -> None:
    model = built(NAME, family)
    ours, theirs = model.task(NAME), model.pipeline(NAME)
    for text in [*HARD.values(), LONG]:
        assert_ranked_alike(ours(text, **options), theirs(text, **options))
    assert_ranked_alike(ours(list(MORE), **options), theirs(list(MORE), **options))


@pytest.mark.parametrize(
    "labels", [("entailment", "neutral", "contradiction"), ("ENTAILED", "not"), ("no", "Entail")], ids=str
)
def test_the_entailment_label_is_found_by_its_name(labels: tuple[str, ...], built: Build) -> None:
    model = built(NAME, BERT, labels=labels)
    for multi in (True, False):
        options = {"candidate_labels": ["a", "b"], "multi_label": multi}
        assert_ranked_alike(model.task(NAME)(MORE[0], **options), model.pipeline(NAME)(MORE[0], **options))


@pytest.mark.parametrize(
    ("id2label", "label2id"),
    [
        (("LABEL_0", "LABEL_1", "LABEL_2"), {"contradiction": 2, "neutral": 1, "entailment": 0}),
        (("contradiction", "neutral", "entailment"), {"entailment": 0, "neutral": 1, "contradiction": 2}),
        (("no", "entail_b", "entailment"), {"entailment": 2, "entail_b": 1, "no": 0}),
    ],
    ids=str,
)
def test_the_entailment_label_is_searched_in_label2id(
    id2label: tuple[str, ...], label2id: dict[str, int], built: Build, tmp_path: Path
) -> None:
    path = relabelled(built(NAME, BERT), tmp_path, dict(enumerate(id2label)), label2id).path
    model = BertForSequenceClassification.from_pretrained(path).eval()
    altered = replace(built(NAME, BERT), path=path, model=model)
    for multi in (True, False):
        options = {"candidate_labels": ["a", "b", "c"], "multi_label": multi}
        assert_ranked_alike(altered.task(NAME)(MORE[0], **options), altered.pipeline(NAME)(MORE[0], **options))


def test_a_label2id_without_effect_is_ignored(built: Build, tmp_path: Path) -> None:
    """A label that the head does not have, and a table that transformers makes anew since its fellow is missing."""
    model, names = built(NAME, BERT), dict(enumerate(NLI))
    for label2id in ({"entailment": 3}, {"entailment": "0"}, ["entailment"], None):
        assert entailment_label(relabelled(model, tmp_path, names, label2id).folder()) == NLI.index("entailment")
    with pytest.raises(UnsupportedModel, match="has no entailment label"):
        entailment_label(relabelled(model, tmp_path, None, {"entailment": 1}).folder())


def relabelled(model: Built, path: Path, id2label: Any, label2id: Any) -> Built:
    """The same in the folder `path`, with these tables in its config.json."""
    shutil.copytree(model.path, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_bytes()) | {"id2label": id2label, "label2id": label2id}
    (path / "config.json").write_text(json.dumps(config))
    return replace(model, path=path)


@pytest.mark.parametrize("labels", [("LABEL_0", "LABEL_1"), ("entailment",), ("not entailment", "other")])
def test_a_model_that_knows_no_entailment_is_not_supported(labels: tuple[str, ...], built: Build) -> None:
    with pytest.raises(UnsupportedModel, match="has no entailment label"):
        built(NAME, BERT, labels=labels).task(NAME)


def test_the_list_form_has_the_same_contents(built: Build) -> None:
    ask = built(NAME, BERT).task(NAME)
    pipeline = ask(MORE[0], candidate_labels=["a", "b", "c"])
    elements = ask(MORE[0], candidate_labels=["a", "b", "c"], output_format="list")
    assert [element["label"] for element in elements] == pipeline["labels"]
    assert [element["score"] for element in elements] == pipeline["scores"]
    assert ask([MORE[0]], candidate_labels=["a", "b", "c"], output_format="list") == [elements]


def test_the_form_of_the_answer_is_what_the_installed_client_parses(built: Build) -> None:
    """huggingface_hub 0.x zips `labels` and `scores` of an object (its version 1 parses a list of elements)."""
    answer = built(NAME, BERT).task(NAME)(MORE[0], candidate_labels=["a", "b"])
    assert list(answer) == ["sequence", "labels", "scores"]
    assert len(answer["labels"]) == len(answer["scores"]) == 2


@pytest.mark.parametrize("multi", [True, False])
def test_scores_sum_to_one_unless_multi_label_is_set(built: Build, *, multi: bool) -> None:
    scores = built(NAME, BERT).task(NAME)(LONG, candidate_labels=list("abcdefg"), multi_label=multi)["scores"]
    assert all(0 <= score <= 1 for score in scores)
    assert sorted(scores, reverse=True) == scores
    assert (sum(scores) == pytest.approx(1)) is not multi


def test_the_text_is_truncated_and_the_hypothesis_is_not(built: Build) -> None:
    task = built(NAME, BERT).task(NAME).task
    prepared = task.prepare(task.parse(LONG, {"candidate_labels": ["sports", "a much longer label"]}))
    assert prepared.truncated == 2
    assert [row.length for row in prepared.rows] == [48, 48]


@pytest.mark.parametrize(
    ("text", "options", "field", "message"),
    [
        ("t", {"candidate_labels": [LONG]}, "parameters.candidate_labels", "leaves no room for a text"),
        ("t", {"candidate_labels": " , ,"}, "parameters.candidate_labels", "holds no label"),
        ("t", {"candidate_labels": ",".join("a" * 65)}, "parameters.candidate_labels", "has 65 entries"),
        (["t"] * 64, {"candidate_labels": list("abcde")}, "inputs", "64 texts times 5 labels are over the limit"),
        (LONG, {"candidate_labels": "a", "truncate": False}, "inputs", "more than|has [0-9]+ tokens"),
    ],
)
def test_requests_beyond_the_limits_are_refused(
    text: Any, options: dict[str, Any], field: str, message: str, built: Build
) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        built(NAME, BERT).task(NAME, limits=SMALL)(text, **options)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "template", ["no place", "{label}", "{0.__class__}", "{:>99999999}", "{!r}", "{", "}", "{0[0]}", "{{}}", "{1}"]
)
def test_a_template_without_a_plain_place_is_refused(template: str, built: Build) -> None:
    with pytest.raises(InvalidInput, match=r"no plain \{\} in place of the label"):
        built(NAME, BERT).task(NAME)("t", candidate_labels="a", hypothesis_template=template)


def test_a_template_of_pages_is_refused(built: Build) -> None:
    with pytest.raises(InvalidInput, match="has 1001 characters; at most 1000") as refused:
        built(NAME, BERT).task(NAME)("t", candidate_labels="a", hypothesis_template="x" * 999 + "{}")
    assert refused.value.field == "parameters.hypothesis_template"
