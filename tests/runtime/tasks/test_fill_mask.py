from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.tokens.tokenizer import Tokenizer
from tests.runtime.tasks.answers import assert_alike
from tests.runtime.tasks.conftest import Build
from tests.runtime.tasks.families import (
    BERT,
    FAMILIES,
    POSITIONS,
    ROBERTA,
    XLM_ROBERTA,
    Built,
    Family,
    giving_up_the_left,
)
from tests.runtime.tasks.texts import HARD, LONG, MORE

NAME = TaskName.FILL_MASK
pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("judge")]

CUT = {"tokenizer_kwargs": {"truncation": True}}


@pytest.mark.parametrize(
    "options", [{}, {"targets": "the"}, {"targets": ["the", "is", "Unbeliev"], "top_k": 2}], ids=str
)
@pytest.mark.parametrize("family", [*FAMILIES, XLM_ROBERTA], ids=lambda family: family.name)
def test_masks_are_filled_as_by_the_pipeline(family: Family, options: dict[str, Any], built: Build) -> None:
    model = built(NAME, family)
    theirs, of_masks = model.pipeline(NAME), model.task(NAME)
    of_all_tokens = replace(of_masks, all_tokens=True)
    mask = model.tokenizer.mask_token
    for text in HARD.values():
        for masked in (f"{mask}{text}", f"{text} {mask}.", f"{mask} {text}{mask}"):
            if len(model.tokenizer(masked)["input_ids"]) > POSITIONS and not masked.startswith(mask):
                continue  # the mask is cut off
            expected = theirs(masked, **options, **CUT)
            assert_alike(of_masks(masked, **options), expected)
            assert_alike(of_all_tokens(masked, **options), expected)


def test_a_text_that_is_nothing_but_a_mask_is_filled(built: Build) -> None:
    model = built(NAME, ROBERTA)
    assert_alike(model.task(NAME)("<mask>"), model.pipeline(NAME)("<mask>"))


@pytest.mark.parametrize("target", ["<brand>", "<brand> the", "<brand>s"])
def test_a_target_without_a_vector_in_the_model_is_refused(target: str, built: Build, tmp_path: Path) -> None:
    model = built(NAME, BERT)
    size, tokenizer = len(model.tokenizer), copy.deepcopy(model.tokenizer)
    tokenizer.add_tokens(["<brand>"])
    model.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    branded = Built(BERT, tmp_path, model.model, tokenizer)
    ask = branded.task(NAME)

    with pytest.raises(InvalidInput, match=f"'<brand>', which is token {size} .* 0 to {size - 1}") as refused:
        ask("a [MASK] day", targets=["the", target])
    assert refused.value.field == "parameters.targets[1]"
    assert "resize_token_embeddings" in refused.value.remedy
    # Only its meaning matters.
    targets = {"targets": ["the <brand>", "is"]}
    assert_alike(ask("a [MASK] day", **targets), branded.pipeline(NAME)("a [MASK] day", **targets))


@pytest.mark.parametrize("family", [BERT, ROBERTA], ids=lambda family: family.name)
def test_with_truncation_on_the_left_a_target_of_several_tokens_is_its_last_token(
    family: Family, built: Build, tmp_path: Path
) -> None:
    model = giving_up_the_left(built(NAME, family), tmp_path)
    text = f"{LONG} {model.tokenizer.mask_token} day"
    options = {"targets": ["unbelievablyx", "zzz", "New York", "the"]}
    assert len(model.tokenizer("unbelievablyx", add_special_tokens=False)["input_ids"]) > 1
    assert_alike(model.task(NAME)(text, **options), model.pipeline(NAME)(text, **options, **CUT))


def test_a_list_has_the_same_answers_as_its_entries_alone(built: Build) -> None:
    ask = built(NAME, BERT).task(NAME)
    entries = [f"{MORE[0]} [MASK]", "[MASK] a [MASK]", f"[MASK] {LONG}"]
    assert ask(entries, top_k=3) == [ask(entry, top_k=3) for entry in entries]
    assert ask(entries[:1]) == [ask(entries[0])]


def test_texts_are_decoded_after_reduce_outside_of_the_event_loop(
    built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of `reduce` contains no texts: to decode ten thousand words for each mask takes seconds."""
    model = built(NAME, BERT).task(NAME)
    task = model.task
    prepared = task.prepare(task.parse("a [MASK] day for [MASK]", {"top_k": 300}))
    (row,) = prepared.rows
    decoded: list[int] = []
    decode = Tokenizer.decode

    def watched(self: Tokenizer, sequences: Any, **options: Any) -> Any:
        decoded.append(len(sequences))
        return decode(self, sequences, **options)

    monkeypatch.setattr(Tokenizer, "decode", watched)
    reduced = [task.reduce(row, model.built.forward(row))]
    before = list(decoded)
    answer = task.assemble(prepared, reduced)

    assert before == []
    assert decoded == [300] * 4
    # Some 80 bytes and the text each: with this size the predictor assembles the answer in another thread.
    assert 0.5 < prepared.answer_bytes / len(orjson.dumps(answer)) < 2


def test_scores_are_descending_and_below_one(built: Build) -> None:
    model = built(NAME, BERT)
    scores = [one["score"] for one in model.task(NAME)("a [MASK] day", top_k=10_000)]
    assert len(scores) == len(model.tokenizer)
    assert sorted(scores, reverse=True) == scores
    assert sum(scores) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "options", "field", "message"),
    [
        ("no mask here", {}, "inputs", r"inputs has no mask \[MASK\]"),
        (["[MASK]", "none"], {}, "inputs[1]", r"inputs\[1\] has no mask"),
        (f"{LONG} [MASK]", {}, "inputs", "is beyond the 48 tokens"),
        ("a <mask>", {}, "inputs", "has no mask"),
        ("[MASK]", {"targets": ["the", " "]}, "parameters.targets[1]", "no token in this model's vocabulary"),
    ],
)
def test_invalid_requests_are_refused(
    text: Any, options: dict[str, Any], field: str, message: str, built: Build
) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        built(NAME, BERT).task(NAME)(text, **options)
    assert (refused.value.field, bool(refused.value.remedy)) == (field, True)
