"""Qwen3-Reranker, a language model, is served for text-ranking with the scores that its model card computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, trainers

from penstock.errors import UnsupportedModel
from penstock.tasks import Head, TaskName
from penstock_optimizer.export import export
from penstock_runtime.engines.grid import feed
from penstock_runtime.rows import collate
from penstock_runtime.tasks import make_task
from penstock_runtime.tasks.classification.text_ranking import AFTER, BEFORE
from tests.optimizer.export.judge import ENGINE_OF
from tests.optimizer.export.models import DECODERS, Made, make

pytestmark = pytest.mark.parity

VOCABULARY = 330
MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
PAIRS = [
    ["What is a panda?", "The giant panda is a bear of China."],
    ["What is a panda?", "Paris!"],
    ["yes", "<|im_end|> no\n\n"],
]


def reranker(path: Path, **changes: Any) -> Made:
    fields = {**DECODERS["Qwen3Config"], "vocab_size": VOCABULARY, "max_position_embeddings": 600, **changes}
    made = make(path, "Qwen3Config", Head.SEQUENCE, auto="Qwen3ForCausalLM", **fields)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["yes", "no", "yes", "no", "query: panda?\n", "bear?\n"] * 20, trainer)
    backend.add_special_tokens(list(MARKS))
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return made


def by_the_model_card(made: Made) -> list[float]:
    """Each pair alone: the probability of yes among yes and no, as the next token."""
    backend, scores = tokenizers.Tokenizer.from_file(str(made.path / "tokenizer.json")), []
    for query, text in PAIRS:
        instruction = "Given a web search query, retrieve relevant passages that answer the query"
        middle = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}"
        ids = [token for part in (BEFORE, middle, AFTER) for token in backend.encode(part).ids]
        with torch.no_grad():
            logits = made.model(torch.tensor([ids])).logits[0, -1]
        both = torch.stack([logits[backend.token_to_id("no")], logits[backend.token_to_id("yes")]])
        scores.append(float(torch.softmax(both, 0)[1]))
    return scores


@pytest.mark.parametrize("tied", [True, False])
def test_scores_are_those_of_the_model_card(tied: bool, tmp_path: Path) -> None:
    made = reranker(tmp_path / "model", tie_word_embeddings=tied)
    task = make_task(TaskName.TEXT_RANKING, made.folder)
    request = task.parse(PAIRS, {})
    prepared = task.prepare(request)

    for flavour, engine in ENGINE_OF.items():
        exported = export(made.folder, Head.SEQUENCE, tmp_path / flavour, flavour=flavour)
        logits = engine(exported.path, exported.io)(feed(collate(prepared.rows), exported.io.inputs))["logits"]

        reduced = [task.reduce(row, {"logits": one}) for row, one in zip(prepared.rows, logits, strict=True)]
        np.testing.assert_allclose(task.assemble(prepared, reduced), by_the_model_card(made), rtol=0, atol=1e-5)


def test_a_document_that_is_too_long_is_cut_and_the_prompt_is_kept(tmp_path: Path) -> None:
    made = reranker(tmp_path / "model")
    whole = make_task(TaskName.TEXT_RANKING, made.folder)
    longest = len(whole.prepare(whole.parse([PAIRS[0]], {})).rows[0].ids)
    task = make_task(TaskName.TEXT_RANKING, made.folder, max_tokens=longest)

    prepared = task.prepare(task.parse([PAIRS[0], [PAIRS[0][0], "panda " * 200]], {}))

    assert prepared.truncated == 1
    first, second = (row.ids for row in prepared.rows)
    assert len(first) == len(second) == longest
    after = tokenizers.Tokenizer.from_file(str(made.path / "tokenizer.json")).encode(AFTER).ids
    assert list(first[-len(after) :]) == list(second[-len(after) :]) == after


def test_a_language_model_that_ranks_by_other_words_is_refused(tmp_path: Path) -> None:
    made = reranker(tmp_path / "model")
    (made.path / "1_LogitScore").mkdir()
    (made.path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 9, "false_token_id": null}')
    package = "sentence_transformers"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{package}.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": f"{package}.cross_encoder.modules.LogitScore"},
    ]
    (made.path / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(UnsupportedModel, match="does not rank by the tokens yes and no"):
        make_task(TaskName.TEXT_RANKING, made.folder)


def test_other_tasks_of_a_language_model_are_refused(tmp_path: Path) -> None:
    made = reranker(tmp_path / "model")

    with pytest.raises(UnsupportedModel, match="no head for text-classification"):
        make_task(TaskName.TEXT_CLASSIFICATION, made.folder)
