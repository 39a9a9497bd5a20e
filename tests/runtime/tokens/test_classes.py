"""Defaults of transformers' tokenizer classes where a folder's files state nothing, compared with transformers.

Each folder is opened by `AutoTokenizer`, and by us.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from penstock_runtime.tokens import Tokenizer
from penstock_runtime.tokens.classes import CLASSES, UNKNOWN, class_of
from tests.runtime.tasks.families import BERT, DISTILBERT, MPNET, ROBERTA, Family, tokenizer_of
from tests.runtime.tokens.judged import Change, check, write

WORD_PIECE = ("Bert", "DistilBert", "Electra", "MobileBert", "SqueezeBert", "ConvBert", "Lxmert", "MPNet", "Splinter")
BYTE_LEVEL = ("Roberta", "Longformer", "Bart", "LED", "Mvp", "Blenderbot", "GPT2", "Deberta")


def normalizer(**fields: Any) -> Change:
    return lambda backend: backend["normalizer"].update(fields)


def byte_level(*, prefix: bool, trim: bool) -> Change:
    def change(backend: dict[str, Any]) -> None:
        backend["pre_tokenizer"]["add_prefix_space"] = prefix
        backend["post_processor"] |= {"add_prefix_space": prefix, "trim_offsets": trim}

    return change


NORMALIZERS = (
    {"lowercase": False, "strip_accents": None, "handle_chinese_chars": True},
    {"lowercase": True, "strip_accents": False, "handle_chinese_chars": True},
    {"lowercase": True, "strip_accents": None, "handle_chinese_chars": False},
    {"lowercase": False, "strip_accents": True, "handle_chinese_chars": False},
)
FOLDING: tuple[dict[str, Any], ...] = (
    {},
    {"do_lower_case": True},
    {"do_lower_case": False},
    {"do_lower_case": False, "strip_accents": True},
    {"strip_accents": None, "tokenize_chinese_chars": False},
    {"strip_accents": False},
)


@pytest.mark.parametrize("name", [*WORD_PIECE, "PreTrained", "DebertaV2"])
def test_word_piece_normalisation_is_that_of_the_class(name: str, tmp_path: Path) -> None:
    for state in NORMALIZERS:
        for config in FOLDING:
            settings = {"tokenizer_class": f"{name}Tokenizer"} | config
            check(write(DISTILBERT, tmp_path, settings, normalizer(**state)))


@pytest.mark.parametrize("name", [*BYTE_LEVEL, "PreTrained"])
def test_byte_level_settings_of_spaces_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    for prefix in (True, False):
        for trim in (True, False):
            for config in ({}, {"add_prefix_space": not prefix}, {"trim_offsets": False}, {"trim_offsets": not trim}):
                settings = {"tokenizer_class": f"{name}TokenizerFast"} | config
                check(write(ROBERTA, tmp_path, settings, byte_level(prefix=prefix, trim=trim)))


def test_the_librarys_own_post_processor_is_set_as_well(tmp_path: Path) -> None:
    def change(backend: dict[str, Any]) -> None:
        backend["post_processor"] = {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True
        }  # fmt: skip

    for name in ("Roberta", "GPT2", "PreTrained"):
        check(write(ROBERTA, tmp_path, {"tokenizer_class": f"{name}Tokenizer"}, change))


def test_inside_a_sequence_nothing_is_set(tmp_path: Path) -> None:
    def change(backend: dict[str, Any]) -> None:
        backend["pre_tokenizer"]["add_prefix_space"] = True
        for part, inner in (("pre_tokenizer", "pretokenizers"), ("post_processor", "processors")):
            backend[part] = {"type": "Sequence", inner: [backend[part]]}

    check(write(ROBERTA, tmp_path, {"tokenizer_class": "RobertaTokenizer"}, change))


@pytest.mark.parametrize("family", [BERT, DISTILBERT, ROBERTA, MPNET], ids=lambda family: family.name)
def test_without_settings_the_model_type_decides_the_class(family: Family, tmp_path: Path) -> None:
    """A cased tokenizer.json and nothing else: transformers lower-cases, by the default of BERT's class."""
    change = byte_level(prefix=True, trim=False) if family is ROBERTA else normalizer(lowercase=False)
    check(write(family, tmp_path, {}, change))
    check(write(family, tmp_path, {"model_max_length": 48}, change))


def test_config_json_may_name_the_class(tmp_path: Path) -> None:
    path = write(BERT, tmp_path, {}, normalizer(lowercase=False))
    for name in ("PreTrainedTokenizerFast", "ElectraTokenizer", "BertTokenizer", None):
        (path / "config.json").write_text(json.dumps({"model_type": "bert", "tokenizer_class": name} | BERT.sizes))
        check(path)


def test_the_class_decides_whether_the_model_gets_token_types(tmp_path: Path) -> None:
    """A template with types and a model with two: transformers decides by the class, wherever it is named."""
    for model in ("roberta", "nystromformer", "bert"):
        for name in ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "BertTokenizer", "RobertaTokenizerFast", None):
            path = write(BERT, tmp_path, {})
            for file in ("tokenizer_config.json", "config.json"):
                config = {"model_type": model, "type_vocab_size": 2}
                stated = {} if name is None else {"tokenizer_class": name}
                (path / "tokenizer_config.json").write_text("{}")
                (path / "config.json").write_text(json.dumps(config))
                (path / file).write_text(json.dumps(json.loads((path / file).read_bytes()) | stated))
                judge = AutoTokenizer.from_pretrained(path)("a", "b").get("token_type_ids")
                settings = json.loads((path / "config.json").read_bytes())
                ours = Tokenizer.open(path, path / "tokenizer.json", settings).pair
                assert ours.has_types is (judge is not None and any(judge)), (model, name, file)


def test_an_unknown_class_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = write(DISTILBERT, tmp_path, {"tokenizer_class": "FancyTokenizer"}, normalizer(lowercase=False))
    ours = Tokenizer.open(path, path / "tokenizer.json", {})
    text = "New York"
    assert ours.split([text])[0].ids == tokenizer_of(DISTILBERT)(text, add_special_tokens=False)["input_ids"]
    assert class_of({}, {}) is class_of({"tokenizer_class": "EsmTokenizer"}, {"model_type": "bert"}) is UNKNOWN


def fast_classes() -> Iterator[tuple[str, str]]:
    for model, (_, fast) in TOKENIZER_MAPPING_NAMES.items():
        if fast is not None:
            yield model, fast


def test_each_model_type_has_the_class_of_transformers() -> None:
    for model, fast in fast_classes():
        name = fast.removesuffix("TokenizerFast")
        by_model, by_name = class_of({}, {"model_type": model}), class_of({"tokenizer_class": fast}, {})
        assert by_model is by_name is CLASSES.get(name, UNKNOWN), model
    strangers = {model for model in CONFIG_MAPPING_NAMES if model not in dict(fast_classes())}
    assert {class_of({}, {"model_type": model}) for model in strangers} == {UNKNOWN}


def test_every_class_in_the_table_is_one_of_transformers_with_the_same_defaults() -> None:
    for name, kind in CLASSES.items():
        made = tokenizer_class_from_name(f"{name}TokenizerFast")
        assert made is not None, name
        assert ("token_type_ids" in made.model_input_names) is kind.types, name
        source = inspect.getsource(made.__init__)
        parameters = inspect.signature(made.__init__).parameters
        assert ('state.get("trim_offsets"' in source) is kind.trims, name
        assert [
            f'_state.get("{field}"' in source for field in ("lowercase", "strip_accents", "handle_chinese_chars")
        ] == [field in kind.folds for field in ("lowercase", "strip_accents", "handle_chinese_chars")], name
        if "add_prefix_space" in parameters:
            assert parameters["add_prefix_space"].default == kind.prefix_space, name


def test_the_library_has_no_other_parts_with_these_fields() -> None:
    """What is set by its type here is set by its fields in transformers."""
    parts = [pre_tokenizers.Metaspace(), pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Whitespace()]
    parts += [processors.BertProcessing(("b", 1), ("a", 0)), processors.TemplateProcessing("$0", "$A $B", [])]
    for part in parts:
        assert not {"add_prefix_space", "trim_offsets"} & set(json.loads(part.__getstate__())), part
