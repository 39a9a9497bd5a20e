"""`classify` and `rerank` of small models against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import penstock
from penstock.errors import PenstockError
from tests.optimizer.end_to_end.small_model import write_small_bert

pytestmark = pytest.mark.slow

PAIRS = [("a man plays", "music"), ("a man plays", "the house is old"), ("a man plays", "guitar")]


def saved(path: Path, labels: int) -> Any:
    """A BertForSequenceClassification with random weights, in `path` with a tokenizer."""
    import torch
    import transformers

    write_small_bert(path)
    config = json.loads((path / "config.json").read_text())
    tokenizer = (path / "tokenizer.json").read_bytes()
    for name in ("modules.json", "sentence_bert_config.json"):
        (path / name).unlink(missing_ok=True)
    torch.manual_seed(1)
    sizes = {name: value for name, value in config.items() if name not in {"architectures", "model_type"}}
    configuration = transformers.BertConfig(**sizes, num_labels=labels, initializer_range=0.2)
    model = transformers.BertForSequenceClassification(configuration).eval()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_bytes(tokenizer)
    return model


def logits(path: Path, model: Any, *texts: str) -> Any:
    """float32 [labels]"""
    import torch

    row = Tokenizer.from_file(str(path / "tokenizer.json")).encode(*texts)
    with torch.no_grad():
        return model(torch.tensor([row.ids]), token_type_ids=torch.tensor([row.type_ids])).logits[0].numpy()


def load(path: Path, task: str) -> penstock.Model:
    return penstock.load(
        path.as_uri(), task=task, plan="fp32", store=path.parent / "store", models=path.parent / "models"
    )


def test_texts_and_pairs_are_classified_and_a_bad_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model = saved(path, 3)

    with load(path, "text-classification") as loaded:
        answers = loaded.classify(["a man plays", PAIRS[1], ""], on_error="null")
        best = loaded.classify(["a man plays"], top_k=1)
        with pytest.raises(PenstockError, match='Load it with task="text-ranking"'):
            loaded.rerank("a", ["b"])

    assert answers[2] is None
    for texts, answer in zip((("a man plays",), PAIRS[1]), answers, strict=False):
        assert answer is not None
        scores = np.exp(logits(path, model, *texts))
        expected = {f"LABEL_{label}": score for label, score in enumerate(scores / scores.sum())}
        assert {one["label"]: one["score"] for one in answer} == pytest.approx(expected, abs=1e-4)
        assert [one["score"] for one in answer] == sorted((one["score"] for one in answer), reverse=True)
    assert answers[0] is not None
    assert best == [answers[0][:1]]


def test_texts_are_ranked(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model = saved(path, 1)

    with load(path, "text-ranking") as loaded:
        scores = loaded.rerank("a man plays", [text for _, text in PAIRS])
        raw = loaded.rerank("a man plays", [text for _, text in PAIRS], raw_scores=True)

    expected = np.array([logits(path, model, *pair)[0] for pair in PAIRS])
    assert raw == pytest.approx(expected, abs=1e-3)
    assert scores == pytest.approx(1 / (1 + np.exp(-expected)), abs=1e-4)
