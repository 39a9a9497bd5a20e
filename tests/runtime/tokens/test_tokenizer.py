"""Ids, types, offsets and words, judged by transformers' fast tokenizers on the same files."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.errors import InvalidInput
from penstock_runtime.tokens import Side, Tokenizer
from tests.examples import examples
from tests.runtime.tasks.families import (
    BERT,
    DISTILBERT,
    FAMILIES,
    MPNET,
    POSITIONS,
    ROBERTA,
    XLM_ROBERTA,
    Family,
    tokenizer_of,
)
from tests.runtime.tasks.texts import HARD, LONG, MORE

EVERY = (*FAMILIES, XLM_ROBERTA)
TEXTS = {**HARD, "long": LONG}
ANY_TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`folder(family)`: the tokenizer's files."""
    made: dict[str, Path] = {}

    def of(family: Family) -> Path:
        if family.name not in made:
            made[family.name] = tmp_path_factory.mktemp(family.name)
            tokenizer_of(family).save_pretrained(made[family.name])
        return made[family.name]

    return of


def opened(path: Path, family: Family, **options: Any) -> Tokenizer:
    return Tokenizer.open(path, path / "tokenizer.json", {"model_type": family.name} | family.sizes, **options)


def typed(judge: Any, encoded: Any) -> list[int] | None:
    """Token types as our rows have them: none where all are zero or the model has none."""
    types = encoded["token_type_ids"] if "token_type_ids" in judge.model_input_names else [0]
    return types if any(types) else None


@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
def test_rows_of_one_text_have_the_ids_and_types_of_transformers(family: Family, folder: Any) -> None:
    ours, judge = opened(folder(family), family), tokenizer_of(family)
    for name, text in TEXTS.items():
        for room in (5, POSITIONS):
            expected = judge(text, truncation=True, max_length=room)
            pieces = ours.split([text], limit=room)[0].keep(room - ours.single.specials, ours.side)
            row = ours.single.row(pieces.ids)
            assert row.ids == expected["input_ids"], (name, room)
            assert row.type_ids == typed(judge, expected), (name, room)


@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
def test_rows_of_two_texts_have_the_ids_and_types_of_transformers(family: Family, folder: Any) -> None:
    ours, judge = opened(folder(family), family), tokenizer_of(family)
    for name, text in TEXTS.items():
        first, second = ours.split([text, MORE[0]])
        expected = judge(text, MORE[0])
        row = ours.pair.row(first.ids, second.ids)
        assert row.ids == expected["input_ids"], name
        assert row.type_ids == typed(judge, expected), name
        assert row.ids[ours.pair.second_start(len(first)) :][: len(second)] == second.ids, name


@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ANY_TEXT)
def test_offsets_and_words_are_those_of_transformers(family: Family, folder: Any, text: str) -> None:
    ours, judge = opened_once(folder(family), family), tokenizer_of(family)
    expected = judge(text, return_offsets_mapping=True)
    pieces = ours.split([text], offsets=True)[0]
    inside = slice(len(ours.single.before), -len(ours.single.after))
    assert pieces.ids == expected["input_ids"][inside]
    assert pieces.offsets == expected["offset_mapping"][inside]
    assert pieces.words == expected.word_ids()[inside]
    assert ours.split([text])[0].ids == pieces.ids


_opened: dict[Path, Tokenizer] = {}


def opened_once(path: Path, family: Family) -> Tokenizer:
    if path not in _opened:
        _opened[path] = opened(path, family)
    return _opened[path]


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.sampled_from([*HARD.values(), *MORE, " " * 400, "y" * 300, "a\u0301" * 50]), min_size=1, max_size=6
    ),
    limit=st.integers(1, 12),
    repeats=st.integers(1, 30),
    offsets=st.booleans(),
)
def test_tokenising_only_an_end_of_a_long_text_gives_the_same_tokens(
    family: Family, side: Side, folder: Any, *, parts: list[str], limit: int, repeats: int, offsets: bool
) -> None:
    tokenizer = opened_once(folder(family), family)
    text = "".join(parts) * repeats
    whole = tokenizer.split([text], offsets=True)[0]
    pieces = tokenizer.split([text], limit=limit, side=side, offsets=offsets)[0]
    expected = whole.keep(limit, side)
    kept = pieces.keep(limit, side)
    assert kept.ids == expected.ids
    assert not offsets or kept.offsets == expected.offsets
    if pieces.complete:
        assert pieces.ids == whole.ids
    else:
        assert limit < len(pieces) < len(whole)


@pytest.mark.parametrize("side", Side)
def test_only_the_needed_end_of_a_very_long_text_is_tokenised(folder: Any, side: Side) -> None:
    tokenizer = opened_once(folder(BERT), BERT)
    pieces = tokenizer.split([LONG * 500, "short"], limit=POSITIONS, side=side)
    assert (pieces[0].complete, pieces[1].complete) == (False, True)
    assert POSITIONS < len(pieces[0]) < 12 * POSITIONS


def test_a_text_without_spaces_is_tokenised_completely(folder: Any) -> None:
    pieces = opened_once(folder(BERT), BERT).split(["x" * 5000], limit=4)[0]
    assert pieces.complete
    assert len(pieces) == 1  # one unknown token: BERT gives up words of over a hundred letters


@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
@pytest.mark.parametrize("clean_up", [True, False])
def test_decoding_is_that_of_transformers(family: Family, folder: Any, *, clean_up: bool, tmp_path: Path) -> None:
    judge = tokenizer_of(family)
    shutil.copytree(folder(family), tmp_path, dirs_exist_ok=True)
    _edit(tmp_path, clean_up_tokenization_spaces=clean_up)
    ours = opened(tmp_path, family)
    for text in TEXTS.values():
        ids = judge(text)["input_ids"]
        for skip in (True, False):
            expected = judge.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=clean_up)
            assert ours.decode([ids, ids[:2]], skip_special=skip)[0] == expected


def test_threads_with_different_limits_do_not_disturb_each_other(folder: Any) -> None:
    tokenizer = opened_once(folder(ROBERTA), ROBERTA)
    whole = tokenizer.split([LONG])[0].ids
    wrong: list[int] = []
    start = threading.Barrier(6)

    def work(limit: int) -> None:
        start.wait()
        for _ in range(30):
            for side, expected in ((Side.RIGHT, whole[:limit]), (Side.LEFT, whole[-limit:])):
                if tokenizer.split([LONG], limit=limit, side=side)[0].keep(limit, side).ids != expected:
                    wrong.append(limit)

    threads = [threading.Thread(target=work, args=(limit,)) for limit in (1, 3, 7, 20, 60, 150)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_library_starts_no_threads_of_its_own(folder: Any) -> None:
    before = set(Path("/proc/self/task").iterdir())
    opened(folder(BERT), BERT).split(list(MORE) * 100)
    assert set(Path("/proc/self/task").iterdir()) <= before


@pytest.mark.parametrize(
    ("family", "config", "uses"),
    [
        (BERT, {}, True),
        (BERT, {"model_input_names": ["input_ids", "attention_mask"]}, False),
        (BERT, {"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        (DISTILBERT, {}, False),
        (DISTILBERT, {"tokenizer_class": None}, False),
        (MPNET, {}, False),
        (ROBERTA, {}, False),
        (XLM_ROBERTA, {}, False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_token_types_go_to_models_that_have_them(
    family: Family, config: dict[str, Any], uses: bool, folder: Any, tmp_path: Path
) -> None:
    shutil.copytree(folder(family), tmp_path, dirs_exist_ok=True)
    _edit(tmp_path, **config)
    pair = opened(tmp_path, family).pair
    assert (pair.fill_types(2, 2) is not None) is uses


def test_a_model_with_one_token_type_is_given_none(folder: Any) -> None:
    path = folder(BERT)
    tokenizer = Tokenizer.open(path, path / "tokenizer.json", {"model_type": "bert", "type_vocab_size": 1})
    assert tokenizer.pair.fill_types(1, 1) is None


def test_case_is_as_tokenizer_config_has_it(folder: Any, tmp_path: Path) -> None:
    shutil.copytree(folder(BERT), tmp_path, dirs_exist_ok=True)
    text = "New YORK and Ada"
    lower = opened(tmp_path, BERT).split([text.lower()])[0].ids
    assert opened(tmp_path, BERT).split([text])[0].ids == lower
    _edit(tmp_path, do_lower_case=False)
    assert opened(tmp_path, BERT).split([text])[0].ids != lower
    assert opened(tmp_path, BERT, lower_case=True).split([text])[0].ids == lower


def test_a_space_before_the_first_word_is_as_tokenizer_config_has_it(folder: Any, tmp_path: Path) -> None:
    shutil.copytree(folder(ROBERTA), tmp_path, dirs_exist_ok=True)
    spaced = opened(tmp_path, ROBERTA).split([" New York"])[0].ids
    assert opened(tmp_path, ROBERTA).split(["New York"])[0].ids != spaced
    _edit(tmp_path, add_prefix_space=True)
    assert opened(tmp_path, ROBERTA).split(["New York"], offsets=True)[0].ids == spaced


@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
def test_special_tokens_are_found_without_the_files_that_name_them(family: Family, folder: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder(family) / "tokenizer.json").read_bytes())
    judge, ours = tokenizer_of(family), opened(tmp_path, family)
    assert (ours.cls_id, ours.pad_id, ours.unk_id, ours.mask_id, ours.mask_token) == (
        judge.cls_token_id,
        judge.pad_token_id,
        judge.unk_token_id,
        judge.mask_token_id,
        judge.mask_token,
    )


def test_a_mask_that_is_in_the_vocabulary_only_is_still_one_token(folder: Any, tmp_path: Path) -> None:
    tokenizer = json.loads((folder(BERT) / "tokenizer.json").read_bytes())
    tokenizer["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    ours = opened(tmp_path, BERT)
    assert ours.mask_id in ours.split(["a [MASK] day"])[0].ids


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_tokenizer_file_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CorruptModel, match=r"tokenizer\.json is not a tokenizer that tokenizers reads"):
        opened(tmp_path, BERT)


def test_a_tokenizer_of_another_model_is_refused(folder: Any) -> None:
    path = folder(BERT)
    size = len(tokenizer_of(BERT))
    with pytest.raises(CorruptModel, match=rf"tokens up to {size - 1}, and vocab_size .* is {size - 1}"):
        Tokenizer.open(path, path / "tokenizer.json", {"model_type": "bert", "vocab_size": size - 1})


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("family", EVERY, ids=lambda family: family.name)
def test_ids_are_counted_to_the_highest_across_gaps(
    family: Family, gap: int, added: bool, folder: Any, tmp_path: Path
) -> None:
    shutil.copytree(folder(family), tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_bytes())
    if isinstance(tokenizer["model"]["vocab"], dict):  # the ids of Unigram are places in a list
        _leave_a_gap(tokenizer, gap)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    judge = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    highest = max(judge.get_vocab().values())
    if added:
        judge.add_tokens(["<brand>"])
        judge.save_pretrained(tmp_path)
    assert opened(tmp_path, family).vocabulary_size == max(judge.get_vocab().values()) + 1

    def of_a_model_with(vectors: int) -> Tokenizer:
        return Tokenizer.open(tmp_path, tmp_path / "tokenizer.json", {"vocab_size": vectors})

    assert of_a_model_with(highest + 1).split(["a day"])[0].ids == judge("a day", add_special_tokens=False)["input_ids"]
    with pytest.raises(CorruptModel, match=f"tokens up to {highest}, and vocab_size .* is {highest}"):
        of_a_model_with(highest)


def test_an_added_token_without_an_embedding_is_refused(folder: Any, tmp_path: Path) -> None:
    shutil.copytree(folder(BERT), tmp_path, dirs_exist_ok=True)
    tokenizer, size = copy.deepcopy(tokenizer_of(BERT)), len(tokenizer_of(BERT))
    tokenizer.add_tokens(["<brand>"])
    tokenizer.save_pretrained(tmp_path)
    config = {"model_type": "bert", "vocab_size": size}
    ours = Tokenizer.open(tmp_path, tmp_path / "tokenizer.json", config)

    without, having = ours.split(["a day", "a <brand> day"])
    ours.require_embedded(without.ids, "inputs[0]")
    with pytest.raises(InvalidInput, match=f"^a text has '<brand>', which is token {size} .* 0 to {size - 1}") as found:
        ours.require_embedded(having.ids, "inputs[1]", label="a text")
    assert found.value.field == "inputs[1]"


def test_a_template_that_swaps_the_texts_of_a_pair_is_not_supported(folder: Any, tmp_path: Path) -> None:
    shutil.copytree(folder(BERT), tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_bytes())
    pair = tokenizer["post_processor"]["pair"]
    pair[1], pair[3] = pair[3], pair[1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedModel, match="the first before the second"):
        opened(tmp_path, BERT)


def _leave_a_gap(tokenizer: dict[str, Any], size: int) -> None:
    """The last token gets an id that is higher by `size`, as of a vocab.txt with lines that are there twice."""
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] += size


def _edit(path: Path, **changes: Any) -> None:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in (json.loads(file.read_bytes()) | changes).items() if v is not None}))
