from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch

from penstock.errors import UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.tokens import Pieces
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT, FAMILIES, Built, Family
from tests.runtime.tasks.texts import HARD, LONG, MORE

NAME = TaskName.TEXT_RANKING
TEXTS = [*HARD.values(), *MORE, LONG]
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_scores_are_those_of_a_cross_encoder(family: Family, built: Build) -> None:
    model = built(NAME, family)
    judge = sentence_transformers.CrossEncoder(str(model.path), device="cpu")
    ask = model.task(NAME)
    pairs = [[MORE[0], text] for text in TEXTS] + [[LONG, MORE[0]]]
    raw = judge.predict(pairs, activation_fn=torch.nn.Identity(), batch_size=1)
    np.testing.assert_allclose(ask(pairs), judge.predict(pairs, batch_size=1), atol=1e-5)
    np.testing.assert_allclose(ask(pairs, raw_scores=True), raw, atol=1e-5)


def test_texts_are_sorted_by_descending_score_with_their_index_in_the_request(built: Build) -> None:
    ask = built(NAME, BERT).task(NAME)
    ranking = ask({"query": MORE[0], "texts": TEXTS}, return_text=True)
    scores = ask([[MORE[0], text] for text in TEXTS])
    assert [entry["index"] for entry in ranking] == sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    assert all(
        entry == {"index": entry["index"], "score": scores[entry["index"]], "text": TEXTS[entry["index"]]}
        for entry in ranking
    )
    assert all(0 <= score <= 1 for score in scores)


NEW, FN, OLD = "sentence_transformers", "activation_fn", "sbert_ce_default_activation_function"
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("config", "saved", "raw"),
    [
        ({NEW: {FN: IDENTITY, "version": "4.0.0"}}, None, True),
        ({NEW: {FN: SIGMOID}}, None, False),
        ({NEW: {"version": "4.0.0"}}, None, False),
        ({OLD: IDENTITY}, None, True),
        ({OLD: SIGMOID}, None, False),
        ({OLD: None}, None, False),
        ({NEW: {FN: "torch.nn.Identity"}}, None, True),
        ({NEW: {FN: "own.module.Identity"}}, None, False),
        ({NEW: {FN: SIGMOID}, OLD: IDENTITY}, None, False),
        ({NEW: {FN: None}, OLD: IDENTITY}, None, False),
        ({}, {}, False),
        ({}, {FN: IDENTITY}, True),
        ({}, {FN: IDENTITY, "model_type": "SentenceTransformer"}, False),
        ({NEW: {FN: IDENTITY}}, {FN: SIGMOID}, False),
        ({NEW: {FN: IDENTITY}}, {FN: None}, True),
        ({NEW: {FN: IDENTITY}}, {FN: "own.module.Sigmoid"}, True),
    ],
)  # fmt: skip
def test_the_models_files_decide_the_function_of_scores(
    config: dict[str, Any], saved: dict[str, Any] | None, *, raw: bool, built: Build, tmp_path: Path
) -> None:
    model = with_activation(built(NAME, BERT), tmp_path, config, saved)
    judge = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    ask, pairs = model.task(NAME), [[MORE[0], text] for text in MORE]
    np.testing.assert_allclose(ask(pairs), judge.predict(pairs, batch_size=1), atol=1e-5)
    for asked in (True, False):
        np.testing.assert_array_equal(ask(pairs, raw_scores=asked) == ask(pairs), asked is raw)
    # A ranking is of the shape of text-embeddings-inference, which reads no such files.
    ranking = ask({"query": MORE[0], "texts": [*MORE]})
    assert ranking == ask({"query": MORE[0], "texts": [*MORE]}, raw_scores=False)


def test_another_function_leaves_scores_from_0_to_1(built: Build, tmp_path: Path) -> None:
    tanh = {NEW: {FN: "torch.nn.modules.activation.Tanh"}}
    ask = with_activation(built(NAME, BERT), tmp_path, tanh, None).task(NAME)
    pairs = [[MORE[0], text] for text in MORE]
    assert ask(pairs) == ask(pairs, raw_scores=False)


def with_activation(model: Built, path: Path, config: dict[str, Any], saved: dict[str, Any] | None) -> Built:
    """The same in the folder `path`, `config` added to its config.json; unless None, `saved` to the settings that
    sentence-transformers saves."""
    shutil.copytree(model.path, path, dirs_exist_ok=True)
    own = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps(own | config))
    if saved is not None:
        sentence_transformers.CrossEncoder(str(path), device="cpu").save_pretrained(str(path))
        settings = path / "config_sentence_transformers.json"
        settings.write_text(json.dumps(json.loads(settings.read_bytes()) | saved))
        (path / "config.json").write_text(json.dumps(own | config))
    return Built(model.family, path, model.model, model.tokenizer)


def test_the_default_prompt_is_put_before_the_query(built: Build, tmp_path: Path) -> None:
    saved = {"prompts": {"q": "query is here: ", "other": "x"}, "default_prompt_name": "q"}
    ask = with_activation(built(NAME, BERT), tmp_path, {}, saved).task(NAME)
    judge = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    pairs = [[MORE[0], text] for text in TEXTS] + [[LONG, MORE[0]]]
    np.testing.assert_allclose(ask(pairs), judge.predict(pairs, batch_size=1), atol=1e-5)
    ranking = ask({"query": MORE[0], "texts": TEXTS}, return_text=True)
    expected = judge.rank(MORE[0], TEXTS, batch_size=1, return_documents=True)
    assert [entry["index"] for entry in ranking] == [entry["corpus_id"] for entry in expected]
    assert [entry["text"] for entry in ranking] == [entry["text"] for entry in expected]


def test_top_k_limits_the_answer_to_the_best_texts(built: Build) -> None:
    ask = built(NAME, BERT).task(NAME)
    request = {"query": MORE[0], "texts": TEXTS}
    assert ask(request, top_k=3) == ask(request)[:3]
    assert all(list(entry) == ["index", "score"] for entry in ask(request))


def test_each_distinct_text_is_tokenised_once(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    task = built(NAME, BERT).task(NAME).task
    request = task.parse({"query": "q", "texts": ["a", "b", "a"]}, {})
    seen: list[str] = []
    tokenizer = task._fitter.tokenizer  # type: ignore[attr-defined]
    encode = tokenizer._encode

    def spy(texts: list[str], *, offsets: bool) -> list[Pieces]:
        seen.extend(texts)
        return list(encode(texts, offsets=offsets))

    monkeypatch.setattr(tokenizer, "_encode", spy)
    assert len(task.prepare(request).rows) == 3
    assert seen == ["q", "a", "b"]


@pytest.mark.parametrize("labels", [("no", "yes"), ("a", "b", "c")])
def test_a_classifier_with_several_labels_is_refused_for_ranking(labels: tuple[str, ...], built: Build) -> None:
    with pytest.raises(UnsupportedModel, match="a ranking model has one"):
        built(NAME, BERT, labels=labels).task(NAME)
