"""Tokenizers whose vocabulary has no unknown token: texts that it cannot hold are refused one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tasks.factory import make_task
from penstock_runtime.tokens import Tokenizer
from tests.runtime.http.serving import write_folder

WORDS = {word: index for index, word in enumerate(["hello", "world", *"helowrd"])}
WITHOUT = {
    "word piece": models.WordPiece(WORDS, unk_token="[UNK]"),
    "word level": models.WordLevel(WORDS, unk_token="[UNK]"),
    "unigram": models.Unigram([(word, -1.0) for word in WORDS]),
    "byte pairs": models.BPE(WORDS, [], unk_token="[UNK]"),
}
WITH: dict[str, Any] = {
    "word piece": models.WordPiece({**WORDS, "[UNK]": len(WORDS)}, unk_token="[UNK]"),
    "unigram": models.Unigram([*((word, -1.0) for word in WORDS), ("<unk>", -9.0)], unk_id=len(WORDS)),
    "byte pairs that drop characters": models.BPE(WORDS, []),
}


def tokenizer_of(model: Any) -> Tokenizer:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend, {}, type_ids=False)


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("offsets", [False, True])
def test_a_text_that_cannot_be_split_is_refused_and_others_are_not(name: str, offsets: bool) -> None:
    tokenizer = tokenizer_of(WITHOUT[name])
    first, second = tokenizer.split(["hello", "hello \U0001f600"], offsets=offsets)

    tokenizer.require_embedded(first.ids, "inputs[0]")
    with pytest.raises(InvalidInput, match=r"inputs\[1\] has a character or word that this model's vocabulary lacks"):
        tokenizer.require_embedded(iter(second.ids), "inputs[1]")


@pytest.mark.parametrize("name", WITHOUT)
def test_the_files_are_reported(name: str) -> None:
    (finding,) = tokenizer_of(WITHOUT[name]).findings
    assert "no unknown token" in finding


@pytest.mark.parametrize("name", WITH)
def test_other_vocabularies_are_not_reported(name: str) -> None:
    tokenizer = tokenizer_of(WITH[name])
    assert tokenizer.findings == ()
    tokenizer.require_embedded(tokenizer.split(["hello \U0001f600"])[0].ids, "inputs")


GOOD, BAD = "hello", "hello \U0001f600 [MASK]"


@pytest.mark.parametrize(
    ("task", "inputs", "parameters", "field"),
    [
        (TaskName.FEATURE_EXTRACTION, [GOOD, BAD], {}, "inputs[1]"),
        (TaskName.FEATURE_EXTRACTION, [GOOD, BAD * 5000], {}, "inputs[1]"),
        (TaskName.SENTENCE_SIMILARITY, {"source_sentence": GOOD, "sentences": [BAD]}, {}, "inputs.sentences[0]"),
        (TaskName.TEXT_RANKING, {"query": GOOD, "texts": [GOOD, BAD]}, {}, "inputs.texts[1]"),
        (TaskName.TEXT_CLASSIFICATION, [GOOD, {"text": GOOD, "text_pair": BAD}], {}, "inputs[1]"),
        (TaskName.TOKEN_CLASSIFICATION, [GOOD, BAD], {}, "inputs[1]"),
        (TaskName.QUESTION_ANSWERING, {"question": GOOD, "context": BAD}, {}, "inputs.context"),
        (TaskName.FILL_MASK, ["hello [MASK]", BAD], {}, "inputs[1]"),
        (TaskName.FILL_MASK, "hello [MASK]", {"targets": ["world", "\U0001f600"]}, "parameters.targets[1]"),
        (TaskName.ZERO_SHOT_CLASSIFICATION, [GOOD, BAD], {"candidate_labels": ["world"]}, "inputs[1]"),
        (TaskName.ZERO_SHOT_CLASSIFICATION, GOOD, {"candidate_labels": ["world", BAD]}, "parameters.candidate_labels"),
    ],
)  # fmt: skip
def test_every_task_names_the_input(
    task: TaskName, inputs: Any, parameters: dict[str, Any], field: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, task)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = content["model"]["vocab"]
    vocabulary["hello"] = vocabulary.pop("[UNK]")
    vocabulary["world"] = vocabulary.pop("clara")
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[UNK]"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "unk_token": None}))
    made = make_task(task, ModelFolder.open(folder, weights=False))
    more = {"hypothesis_template": "hello {}"} if task is TaskName.ZERO_SHOT_CLASSIFICATION else {}

    with pytest.raises(InvalidInput) as caught:
        made.prepare(made.parse(inputs, {**parameters, **more}))

    assert caught.value.field.startswith(field)
