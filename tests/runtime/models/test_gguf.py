"""GGUF files: every format of tensors against the gguf package, whole models, and damaged files."""

from __future__ import annotations

import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.errors import CorruptModel, PenstockError, UnsupportedModel
from penstock.resources.core import ModelSource
from penstock_runtime.models import gguf as gguf_module
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.gguf import GgufFile
from penstock_runtime.models.gguf_folder import unpack
from penstock_runtime.models.safetensors import read_float32
from penstock_runtime.models.sources.fetch import fetch_model
from tests.runtime.models.gguf_files import HEADS, HIDDEN, KEY_HEADS, TEMPLATE, Pieces, write_gguf, written
from tests.runtime.tasks.texts import TRAINING

KINDS = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS"


@pytest.mark.parametrize("kind", KINDS.split())
def test_tensors_are_expanded_to_the_numbers_that_the_gguf_package_gives(kind: str, tmp_path: Path) -> None:
    form = GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[form]
    raw = np.random.default_rng(3).integers(0, 256, (24, 256 // numbers * size), np.uint8)
    # Random scales would be infinite or no numbers now and then.
    raw[:, 1::2] &= 0x3F
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("one", raw, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GgufFile.open(tmp_path / "one.gguf").read("one")
    assert read.shape == (24, 256)
    np.testing.assert_array_equal(read, written(tmp_path / "one.gguf", "one"))


def test_a_file_becomes_a_model_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    source = ModelSource.parse(f"file://{tmp_path}/model.gguf")
    folder = fetch_model(source, cache=tmp_path / "cache")
    assert folder.model_type == "llama"
    assert folder.config["num_key_value_heads"] == KEY_HEADS
    assert folder.max_tokens == 128
    values = folder.tensors["model.layers.0.mlp.down_proj.weight"]
    read = read_float32(folder.path, values, "down")
    np.testing.assert_array_equal(read, written(tmp_path / "model.gguf", "blk.0.ffn_down.weight"))
    assert fetch_model(source, cache=tmp_path / "cache").path == folder.path


def test_queries_and_keys_of_llama_get_the_order_of_transformers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    folder = ModelFolder.open(unpack(tmp_path / "model.gguf", tmp_path / "cache"))
    half = HIDDEN // HEADS // 2
    for ours, theirs, heads in (("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", KEY_HEADS)):
        name = f"model.layers.0.self_attn.{ours}.weight"
        read = read_float32(folder.path, folder.tensors[name], name).reshape(heads, 2, half, HIDDEN)
        stored = written(tmp_path / "model.gguf", f"blk.0.{theirs}.weight").reshape(heads, half, 2, HIDDEN)
        np.testing.assert_array_equal(read, stored.swapaxes(1, 2))


def test_the_tokenizer_splits_digits_and_keeps_control_tokens_whole(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    folder = unpack(tmp_path / "model.gguf", tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<s>abc12</s>").tokens == ["<s>", "abc", "1", "2", "</s>"]
    assert tokenizer.decode(tokenizer.encode("Größe: 12 €").ids) == "Größe: 12 €"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["eos_token"]) == (TEMPLATE, "</s>")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1]


def test_a_first_token_is_added_where_the_file_wants_one(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.pre": "llama-bpe"}
    write_gguf(tmp_path / "model.gguf", **changed)
    folder = unpack(tmp_path / "model.gguf", tmp_path / "cache")
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("abc").tokens == ["<s>", "abc"]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-4o", ["HELLOWorld", " don't", " ", "123", "45", " a", "/b", "\n\n"]),
        ("llama-bpe", ["HELLOWorld", " don", "'t", " ", "123", "45", " a", "/b", "\n\n"]),
    ],
)
def test_texts_are_split_as_the_file_names(name: str, pieces: list[str], tmp_path: Path) -> None:
    changed: dict[str, Any] = {"tokenizer.ggml.pre": name}
    write_gguf(tmp_path / "model.gguf", **changed)
    folder = unpack(tmp_path / "model.gguf", tmp_path / "cache")
    splitting = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    text = "".join(pieces)
    assert [text[begin:end] for _, (begin, end) in splitting.pre_tokenize_str(text)] == pieces


TEXTS = (
    *TRAINING[:40],
    "",
    " ",
    "Hello  world\n\n\tand   more ",
    "Zürich, São Paulo, Ελλάδα, Москва, القاهرة, 東京, 서울, नई दिल्ली",
    "x = 12345.678e-9; // aaaa aaaaa aaaaaa",
    "emoji 🤗👩‍👩‍👧 and \u200b \ufeff",
)


@pytest.fixture(scope="module")
def trained() -> tuple[sentencepiece.SentencePieceProcessor, Pieces]:
    return Pieces.trained()


@pytest.mark.parametrize("prefix", [True, False])
def test_tokens_of_sentencepiece_are_those_of_its_own_package(
    prefix: bool, trained: tuple[sentencepiece.SentencePieceProcessor, Pieces], tmp_path: Path
) -> None:
    model, pieces = trained if prefix else Pieces.trained(add_dummy_prefix=False)
    changed: dict[str, Any] = {"tokenizer.ggml.add_space_prefix": prefix}
    write_gguf(tmp_path / "model.gguf", pieces=pieces, **changed)
    folder = unpack(tmp_path / "model.gguf", tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        expected = model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text
        assert tokenizer.decode(expected) == model.decode(expected)
    assert tokenizer.encode("a").tokens[0] == "<s>"
    assert tokenizer.encode("<s>a</s>", add_special_tokens=False).ids == [1, *model.encode("a"), 2]


@given(st.text())
def test_any_text_has_the_tokens_of_sentencepiece(text: str) -> None:
    model, tokenizer = _by_sentencepiece()
    assert tokenizer.encode(text, add_special_tokens=False).ids == model.encode(text)


@cache
def _by_sentencepiece() -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    model, pieces = Pieces.trained()
    with tempfile.TemporaryDirectory() as name:
        write_gguf(Path(name) / "model.gguf", pieces=pieces)
        return model, Tokenizer.from_file(str(unpack(Path(name) / "model.gguf", Path(name)) / "tokenizer.json"))


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModel, "tokenizer of the kind t5"),
        ({"tokenizer.ggml.model": "llama"}, CorruptModel, "tokenizer.ggml.scores is not a list"),
        ({"split.count": 3}, UnsupportedModel, "is one of 3 files"),
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedModel, "splits texts as tekken"),
        ({"llama.block_count": None}, CorruptModel, "llama.block_count is None"),
        ({"tokenizer.ggml.eos_token_id": 100_000}, CorruptModel, "eos_token_id is 100000"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, CorruptModel, "epsilon is 'small'"),
    ],
)
def test_what_cannot_be_read_is_named(
    overrides: dict[str, Any], error: type[PenstockError], words: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", **overrides)
    with pytest.raises(error, match=words):
        unpack(tmp_path / "model.gguf", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_another_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "mamba")
    with pytest.raises(UnsupportedModel, match="architecture mamba"):
        unpack(tmp_path / "model.gguf", tmp_path / "cache")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path)
    return path.read_bytes()


@given(cut=st.integers(0, 2000), at=st.integers(4, 1500), byte=st.integers(0, 255))
def test_damaged_files_are_errors_of_ours(
    cut: int, at: int, byte: int, content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(content[: len(content) - cut])
    damaged[at] = byte
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "model.gguf").write_bytes(damaged)
    # Damage within the numbers of the weights goes unnoticed.
    remedy = "none is needed"
    try:
        unpack(folder / "model.gguf", folder / "cache")
    except PenstockError as error:
        remedy = error.remedy
    assert remedy


def _key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def test_a_list_of_millions_of_texts_is_refused_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, read = 3_000_000, []

    def text(taken: memoryview, encoding: str) -> str:
        read.append(str(taken, encoding))
        return read[-1]

    monkeypatch.setattr(gguf_module, "str", text, raising=False)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _key("tokens") + struct.pack("<IIQ", 9, 8, count)
    with (tmp_path / "model.gguf").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 8 * count)  # texts of no length
    with pytest.raises(CorruptModel, match="promises 3,000,000 entries"):
        GgufFile.open(tmp_path / "model.gguf")
    assert read == ["tokens"]


def test_all_lists_of_a_header_have_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = struct.pack("<IIQ", 9, 8, 10) + bytes(80)
    numbers = struct.pack("<IIQ", 9, 0, 60) + bytes(60)
    for lists, limit in (([texts, texts], 110), ([numbers, numbers], 130), ([texts, numbers], 120)):
        parts = [_key(str(number)) + one for number, one in enumerate(lists)]
        (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + b"".join(parts))
        monkeypatch.setattr(gguf_module, "MOST_NUMBERS", limit)
        assert len(GgufFile.open(tmp_path / "model.gguf").metadata) == 2
        monkeypatch.setattr(gguf_module, "MOST_NUMBERS", limit - 1)
        with pytest.raises(CorruptModel, match="more than the file can hold or a model has"):
            GgufFile.open(tmp_path / "model.gguf")


def test_a_folder_with_a_gguf_file_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModel, match=r"holds model\.gguf and no safetensors") as caught:
        fetch_model(ModelSource.parse(f"file://{tmp_path}"), cache=tmp_path / "cache")
    assert caught.value.remedy.endswith("end spec.model with /model.gguf")
