"""Added and special tokens that other files than tokenizer.json state, judged by transformers on the same folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptModel
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tokens import Tokenizer
from penstock_runtime.tokens.classes import CLASSES
from tests.examples import examples
from tests.runtime.tasks.families import BERT, DISTILBERT, MPNET, ROBERTA, XLM_ROBERTA, Family, tokenizer_of
from tests.runtime.tokens.judged import TEXTS, check, write

FAMILIES = (BERT, ROBERTA, MPNET, XLM_ROBERTA)


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content} | flags


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": content} | flags


def no_added(backend: dict[str, Any]) -> None:
    backend["added_tokens"] = []


def normalised(backend: dict[str, Any]) -> None:
    """BERT's classes take no tokenizer without a normaliser."""
    backend["normalizer"] = backend["normalizer"] or {"type": "NFC"}


def flagged(backend: dict[str, Any]) -> None:
    for added in backend["added_tokens"]:
        added["lstrip"] = not added["lstrip"]


def padded(backend: dict[str, Any]) -> None:
    backend["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 1, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize("family", [BERT, ROBERTA], ids=lambda family: family.name)
def test_a_tokenizer_class_has_its_default_special_tokens(family: Family, name: str, tmp_path: Path) -> None:
    """Also those that the vocabulary does not have, with flags of its own."""
    settings = {"tokenizer_class": f"{name}Tokenizer"}
    check(write(family, tmp_path, settings, normalised))
    check(write(family, tmp_path, settings, normalised, flagged))
    check(write(family, tmp_path, settings, normalised, no_added))


@pytest.mark.parametrize(
    "ends", [{}, {"add_eos_token": True}, {"add_bos_token": False}, {"add_bos_token": False, "add_eos_token": True}]
)
@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_classes_of_decoders_add_the_first_and_last_token_that_they_state(
    name: str, ends: dict[str, bool], tmp_path: Path
) -> None:
    """For e5-mistral and EmbeddingGemma, whose pooling reads the last token, or the mean with both."""
    path = write(ROBERTA, tmp_path, {"tokenizer_class": f"{name}Tokenizer", **ends})
    check(path)
    judge = transformers.AutoTokenizer.from_pretrained(path)
    ours = Tokenizer.open(path, path / "tokenizer.json", json.loads((path / "config.json").read_bytes()))
    first, second = (pieces.ids for pieces in ours.split(["a day", "new york"]))
    assert ours.pair.fill(first, second) == judge("a day", "new york")["input_ids"]


def test_the_last_token_of_gte_qwen2_is_added_without_its_code(tmp_path: Path) -> None:
    """Its pooling reads that token, and its tokenizer.json lacks it."""
    own = {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "auto_map": own, "eos_token": "</s>", "add_eos_token": True}
    path = write(ROBERTA, tmp_path, settings)

    ours = Tokenizer.open(path, path / "tokenizer.json", {"model_type": "qwen2"})

    (pieces,) = ours.split(["a day"])
    assert ours.single.fill(pieces.ids) == [*pieces.ids, 2]


def test_a_first_token_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    path = write(BERT, tmp_path, {"tokenizer_class": "LlamaTokenizer", "bos_token": None})

    with pytest.raises(CorruptModel, match="has no bos_token"):
        Tokenizer.open(path, path / "tokenizer.json", {})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"additional_special_tokens": ["<extra>", "[NEW]"]}, {}),
        ({"additional_special_tokens": [typed("<extra>", lstrip=True, normalized=True), "new york"]}, {}),
        ({"additional_special_tokens": None}, {}),
        ({"eos_token": "<extra>", "bos_token": typed("[NEW]", rstrip=True)}, {}),
        ({"mask_token": None, "cls_token": None}, {}),
        ({"mask_token": "<extra>", "unk_token": "[NEW]"}, {}),
        ({"mask_token": "<mask>"}, {}),
        ({"extra_special_tokens": {"image_token": "<extra>"}}, {}),
        ({"added_tokens_decoder": {}, "eos_token": "<extra>"}, {"special_tokens_map": {"eos_token": "[NEW]"}}),
        ({"eos_token": "<extra>"}, {"special_tokens_map": {"eos_token": "[NEW]"}}),
        ({"eos_token": "<extra>"}, {"special_tokens_map": {"eos_token": token("[NEW]", lstrip=True)}}),
        (
            {"additional_special_tokens": ["<extra>", "new york"]},
            {"special_tokens_map": {"additional_special_tokens": ["<extra>", token("[NEW]", lstrip=True)]}},
        ),
        ({}, {"special_tokens_map": {"mask_token": "<extra>"}}),
        ({}, {"added_tokens": {"<extra>": 9001, "[NEW]": 9000, "new york": 9002}}),
        (
            {"eos_token": "<extra>"},
            {"added_tokens": {"<extra>": 9001, "[NEW]": 9000}, "special_tokens_map": {"unk_token": "[NEW]"}},
        ),
        (
            {"added_tokens_decoder": {"9001": token("<extra>", special=True), "9000": token("[NEW]", lstrip=True)}},
            {"added_tokens": {"new york": 9002}},
        ),
        ({"added_tokens_decoder": {"4": token("<mask>", lstrip=True, special=True)}, "mask_token": "<mask>"}, {}),
        ({"added_tokens_decoder": {"4": token("[MASK]", rstrip=True, normalized=True, special=True)}}, {}),
        ({"added_tokens_decoder": {"9": token("new york", normalized=True, single_word=True)}}, {}),
    ],
    ids=str,
)
def test_tokens_are_added_as_the_files_state_them(
    family: Family, config: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    for change in ([], [flagged], [no_added]):
        check(write(family, tmp_path, config, *change, **files))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_generic_tokenizer_has_the_special_tokens_that_it_states(family: Family, tmp_path: Path) -> None:
    generic = {"tokenizer_class": "PreTrainedTokenizerFast"}
    check(write(family, tmp_path, generic))
    check(write(family, tmp_path, generic, padded))
    check(write(family, tmp_path, generic | {"cls_token": "<s>", "pad_token": "[PAD]"}, padded, no_added))
    ours = Tokenizer.open(tmp_path, tmp_path / "tokenizer.json", {})
    assert (ours.unk_id, ours.mask_id) == (None, None)


def test_the_mask_that_a_generic_tokenizer_does_not_state_is_the_one_that_texts_may_have(tmp_path: Path) -> None:
    write(BERT, tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"})
    ours = Tokenizer.open(tmp_path, tmp_path / "tokenizer.json", {})
    assert ours.mask_id == tokenizer_of(BERT).mask_token_id


def test_a_mask_token_without_an_embedding_is_not_used(tmp_path: Path) -> None:
    size = len(tokenizer_of(BERT))
    write(BERT, tmp_path, {"mask_token": "<extra>"})
    ours = [
        Tokenizer.open(tmp_path, tmp_path / "tokenizer.json", {"model_type": "bert", "vocab_size": size + more})
        for more in (0, 1)
    ]
    assert [one.mask_id for one in ours] == [None, size]


def test_an_artefact_of_unknown_kind_finds_the_usual_names(tmp_path: Path) -> None:
    for family in FAMILIES:
        write(family, tmp_path, {}, no_added)
        ours, judge = Tokenizer.open(tmp_path, tmp_path / "tokenizer.json", {}), tokenizer_of(family)
        assert (ours.cls_id, ours.pad_id, ours.unk_id, ours.mask_token) == (
            judge.cls_token_id,
            judge.pad_token_id,
            judge.unk_token_id,
            judge.mask_token,
        )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_in_texts_are_split_where_that_is_stated(family: Family, split: bool, tmp_path: Path) -> None:
    more = {"additional_special_tokens": ["<extra>"]}
    check(write(family, tmp_path, {"split_special_tokens": split} | more, added_tokens={"new york": 9000}))


def content(value: Any) -> Any:
    """Of a token as the files write it; of anything else its text."""
    return value if isinstance(value, str) else value.get("content") if isinstance(value, dict) else str(value)


def test_the_files_of_an_artefact_make_the_same_tokenizer(tmp_path: Path) -> None:
    """Each of the files changes something here."""
    path = write(
        DISTILBERT,
        tmp_path / "model",
        {"eos_token": "<extra>"},
        flagged,
        special_tokens_map={"eos_token": token("[NEW]", rstrip=True)},
        added_tokens={"new york": 9000},
    )
    (tmp_path / "artefact").mkdir()
    for file in ModelFolder.open(path, weights=False).settings:
        shutil.copyfile(file, tmp_path / "artefact" / file.name)
    check(tmp_path / "artefact")
    ours = [Tokenizer.load(ModelFolder.open(one, weights=False)) for one in (path, tmp_path / "artefact")]
    assert [one.ids for one in ours[0].split(TEXTS)] == [one.ids for one in ours[1].split(TEXTS)]


CONTENTS = st.sampled_from(["<extra>", "[NEW]", "new york", "<mask>", "[MASK]", "</s>", "[SEP]", "[UNK]", "day", "é"])
FLAGS = st.dictionaries(st.sampled_from(["lstrip", "rstrip", "normalized", "single_word", "special"]), st.booleans())
TYPED = st.builds(lambda content, flags: typed(content, **flags), CONTENTS, FLAGS)
OBJECTS = st.builds(lambda content, flags: token(content, **flags), CONTENTS, FLAGS)
ROLES = st.sampled_from(["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"])
NAMES = st.dictionaries(ROLES, st.none() | CONTENTS | TYPED, max_size=4)
MORE = st.fixed_dictionaries({}, optional={"additional_special_tokens": st.none() | st.lists(CONTENTS | TYPED)})
DECODERS = st.fixed_dictionaries(
    {}, optional={"added_tokens_decoder": st.dictionaries(st.integers(0, 700).map(str), OBJECTS, max_size=5)}
)
MAPS = st.dictionaries(ROLES, CONTENTS | OBJECTS, max_size=3) | st.fixed_dictionaries(
    {"additional_special_tokens": st.lists(CONTENTS | OBJECTS)}
)
ADDED = st.dictionaries(CONTENTS, st.integers(0, 700), max_size=3)


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES),
    # Splinter's takes no additional tokens.
    name=st.sampled_from(sorted({*CLASSES} - {"Splinter"})),
    config=st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()}, NAMES, MORE, DECODERS),
    files=st.fixed_dictionaries({"special_tokens_map": MAPS, "added_tokens": ADDED}),
    change=st.sampled_from([[], [flagged], [no_added], [padded]]),
)
def test_tokens_are_those_of_transformers_for_any_settings_in_the_files(  # noqa: PLR0917
    family: Family, name: str, config: dict[str, Any], files: dict[str, Any], change: Any, tmp_path: Path
) -> None:
    last = (files["special_tokens_map"].get("additional_special_tokens") or [None])[-1]
    # There a defect of transformers takes the last of these for one of added_tokens.json.
    assume(not files["added_tokens"] or content(last) not in {*map(content, config.values()), "[SEP]"})
    settings = {"tokenizer_class": f"{name}Tokenizer"} | config
    check(write(family, tmp_path, settings, normalised, *change, **files))


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"mask_token": 5}, {}),
        ({"additional_special_tokens": "<extra>"}, {}),
        ({"additional_special_tokens": [None]}, {}),
        ({"added_tokens_decoder": {"4": "<mask>"}}, {}),
        ({"added_tokens_decoder": {"four": token("<mask>")}}, {}),
        ({"added_tokens_decoder": {"4": {"lstrip": True}}}, {}),
        ({}, {"special_tokens_map": {"mask_token": ["<mask>"]}}),
        ({}, {"added_tokens": {"<extra>": None}}),
    ],
    ids=str,
)
def test_an_invalid_special_token_is_named(config: dict[str, Any], files: dict[str, Any], tmp_path: Path) -> None:
    path = write(BERT, tmp_path, config, **files)
    with pytest.raises(CorruptModel, match=r"the tokens stated in .*"):
        Tokenizer.open(path, path / "tokenizer.json", json.loads((path / "config.json").read_bytes()))
