"""Texts of an exact number of tokens, for tokenizers of every kind."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock.errors import UnsupportedModel
from penstock.resources.endpoint import Workload
from penstock.tasks import TaskName
from penstock_optimizer.load.workload import (
    EVERYDAY_WORDS,
    LengthMix,
    TextMaker,
    mix_of_texts,
    predict_bodies,
    workload_bodies,
)
from penstock_runtime.tokens.pieces import Side
from tests.tasks import COMMON_TASKS


def wordpiece() -> Tokenizer:
    """BERT's kind, with [CLS] and [SEP]."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", *EVERYDAY_WORDS]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding()
    return tokenizer


def byte_level() -> Tokenizer:
    """RoBERTa's kind, trained on nothing but everyday words: other words are many tokens."""
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = BpeTrainer(
        vocab_size=900,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(EVERYDAY_WORDS)] * 5, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


def foreign() -> Tokenizer:
    """A vocabulary without one everyday word."""
    words = ["[UNK]", *(f"wort{index}" for index in range(200))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.parametrize("make", [wordpiece, byte_level, foreign])
@pytest.mark.parametrize("tokens", [8, 9, 33, 128, 512])
def test_a_text_has_exactly_the_tokens_asked_for(make: object, tokens: int) -> None:
    tokenizer = make()  # type: ignore[operator]
    maker = TextMaker(tokenizer)

    assert maker.count(maker.text(tokens)) == tokens


@pytest.mark.parametrize("make", [wordpiece, byte_level])
def test_a_pair_has_exactly_the_tokens_asked_for(make: object) -> None:
    maker = TextMaker(make())  # type: ignore[operator]
    first = maker.text(10)

    assert maker.count(first, maker.pair(first, 64)) == 64


def test_the_tokenizer_that_was_given_keeps_its_truncation_and_padding() -> None:
    tokenizer = wordpiece()
    TextMaker(tokenizer).text(100)

    assert tokenizer.truncation is not None
    assert tokenizer.padding is not None


def test_texts_vary_and_repeat_with_the_seed() -> None:
    maker, again = TextMaker(wordpiece(), seed=4), TextMaker(wordpiece(), seed=4)
    texts = [maker.text(24) for _ in range(10)]

    assert len(set(texts)) == 10
    assert texts == [again.text(24) for _ in range(10)]


def test_fewer_tokens_than_the_special_ones_give_the_shortest_text() -> None:
    maker = TextMaker(wordpiece())

    assert maker.count(maker.text(1)) == 3


def test_a_tokenizer_without_one_token_words_is_an_error_with_a_remedy() -> None:
    characters = Tokenizer(models.BPE())
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)

    with pytest.raises(UnsupportedModel, match=r"spec\.workload\.texts"):
        TextMaker(characters).text(8)


ROWS = {
    TaskName.SENTENCE_SIMILARITY: ("source_sentence", "sentences"),
    TaskName.TEXT_RANKING: ("query", "texts"),
    TaskName.QUESTION_ANSWERING: ("question", "context"),
}


@pytest.mark.parametrize("task", COMMON_TASKS)
def test_every_task_has_bodies_of_the_asked_lengths(task: TaskName) -> None:
    tokenizer = wordpiece()
    maker = TextMaker(tokenizer)
    for item in predict_bodies(task, tokenizer, [16, 40], mask_token="[MASK]"):
        inputs = json.loads(item.body)["inputs"]
        if task is TaskName.SENTENCE_SIMILARITY:
            counted = {maker.count(inputs["source_sentence"]), maker.count(inputs["sentences"][0])}
        elif task in ROWS:
            first, second = (inputs[name] for name in ROWS[task])
            counted = {maker.count(first, second if isinstance(second, str) else second[0])}
        else:
            counted = {maker.count(inputs)}

        assert counted == {item.group}


def test_stated_texts_are_sent_as_they_are() -> None:
    workload = Workload(texts=("the school", "the music school of the city"))
    bodies = workload_bodies(TaskName.FEATURE_EXTRACTION, wordpiece(), workload, LengthMix(maximum=512), count=4)

    assert [json.loads(item.body)["inputs"] for item in bodies] == [*workload.texts, *workload.texts]
    assert [item.group for item in bodies] == [4, 8, 4, 8]


@pytest.mark.parametrize("side", Side)
def test_stated_texts_without_a_mask_token_get_one_that_is_not_truncated(side: Side) -> None:
    long = "the school of the city and the music"
    workload = Workload(texts=("the school", "the [MASK] school", f"{long} [MASK]", f"[MASK] {long}"))
    bodies = workload_bodies(
        TaskName.FILL_MASK, wordpiece(), workload, LengthMix(maximum=8), count=4, mask_token="[MASK]", side=side
    )

    expected = {
        Side.RIGHT: ["[MASK] the school", "the [MASK] school", f"[MASK] {long} [MASK]", f"[MASK] {long}"],
        Side.LEFT: ["the school [MASK]", "the [MASK] school", f"{long} [MASK]", f"[MASK] {long} [MASK]"],
    }
    assert [json.loads(item.body)["inputs"] for item in bodies] == expected[side]
    assert [item.group for item in bodies] == [5, 5, 8, 8]


def test_the_mix_of_stated_texts_has_their_lengths_as_they_are_sent_whatever_lengths_are_stated() -> None:
    texts = ("the school", "the music school of the city", "the school of the city " * 9)
    workload = Workload(texts=texts, sequence_lengths=(300,))
    mix = mix_of_texts(TaskName.TEXT_CLASSIFICATION, wordpiece(), workload, maximum=16)
    bodies = workload_bodies(TaskName.TEXT_CLASSIFICATION, wordpiece(), workload, mix, count=3)
    masked = mix_of_texts(TaskName.FILL_MASK, wordpiece(), workload, maximum=16, mask_token="[MASK]")

    assert sorted(mix.sample(300, seed=0)) == [4] * 100 + [8] * 100 + [16] * 100
    assert [body.group for body in bodies] == list(mix.lengths)
    assert mix.summary == "median 8 tokens, p95 16, longest 16"
    assert masked.lengths == (5, 9, 16)
