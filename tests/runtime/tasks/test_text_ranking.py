from __future__ import annotations

import numpy as np
import pytest
import sentence_transformers
import torch

from penstock.errors import UnsupportedModel
from penstock.tasks import TaskName
from penstock_runtime.tokens import Pieces
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import BERT, FAMILIES, Family
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


def test_texts_come_by_falling_score_with_their_place_in_the_request(built: Build) -> None:
    ask = built(NAME, BERT).task(NAME)
    ranking = ask({"query": MORE[0], "texts": TEXTS}, return_text=True)
    scores = ask([[MORE[0], text] for text in TEXTS])
    assert [entry["index"] for entry in ranking] == sorted(range(len(TEXTS)), key=lambda index: -scores[index])
    assert all(
        entry == {"index": entry["index"], "score": scores[entry["index"]], "text": TEXTS[entry["index"]]}
        for entry in ranking
    )
    assert all(0 <= score <= 1 for score in scores)


def test_only_the_best_are_given_where_asked_for(built: Build) -> None:
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
def test_a_classifier_is_no_ranking_model(labels: tuple[str, ...], built: Build) -> None:
    with pytest.raises(UnsupportedModel, match="a ranking model has one"):
        built(NAME, BERT, labels=labels).task(NAME)
