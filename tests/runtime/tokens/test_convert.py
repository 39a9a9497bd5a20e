"""Without a tokenizer.json, ids, offsets and special tokens are those of transformers, which makes one as well."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptModel, UnsupportedModel
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tokens import Tokenizer
from penstock_runtime.tokens.sentencepiece import read_model
from tests.runtime.models.folders import model_folder
from tests.runtime.tasks.families import BERT, MPNET, ROBERTA, Family, tokenizer_of
from tests.runtime.tasks.texts import TRAINING
from tests.runtime.tokens.judged import check

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
WORD_PIECE: dict[str, Family] = {"Bert": BERT, "DistilBert": BERT, "Electra": BERT, "MPNet": MPNET}
BYTE_LEVEL = ("Roberta", "Bart", "Longformer")
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"do_lower_case": False, "strip_accents": True},
    {"tokenize_chinese_chars": False},
    {"model_max_length": 12, "additional_special_tokens": ["<extra>"]},
    {"added_tokens_decoder": {"800": {"content": "[NEW]", "lstrip": True, "normalized": False, "special": False}}},
)


def write(path: Path, name: str, settings: dict[str, Any], **files: bytes) -> Path:
    """A folder with `files`, by their names with `__` for a dot."""
    path.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (path / file.replace("__", ".")).write_bytes(content)
    (path / "config.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{name}Tokenizer", **settings}))
    return path


def in_order(family: Family) -> list[str]:
    vocabulary = tokenizer_of(family).backend_tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", WORD_PIECE)
def test_vocab_txt(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    words = "".join(f"{word}\n" for word in in_order(WORD_PIECE[name])).encode()
    # transformers joins apostrophes while it decodes with such a tokenizer, and no more once it was saved.
    check(write(tmp_path, name, settings, vocab__txt=words), "vocab.txt", decodes=False)


@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, *SETTINGS[3:]], ids=str)
@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_vocab_json_with_merges(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = json.loads(tokenizer_of(ROBERTA).backend_tokenizer.to_str())["model"]
    merges = "\n".join(["#version: 0.2", *(" ".join(merge) for merge in model["merges"]), ""]).encode()
    files = {"vocab__json": json.dumps(model["vocab"]).encode(), "merges__txt": merges}
    check(write(tmp_path, name, settings, **files), "vocab.json")


Train = Callable[..., bytes]


@pytest.fixture(scope="module")
def train() -> Train:
    """Trains a model of sentencepiece, each once."""
    made: dict[str, bytes] = {}

    def of(kind: str, **options: Any) -> bytes:
        key = f"{kind} {options}"
        if key not in made:
            target = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(TRAINING), model_writer=target, model_type=kind, vocab_size=400,
                hard_vocab_limit=False, character_coverage=0.995, minloglevel=2, **options,
            )  # fmt: skip
            made[key] = target.getvalue()
        return made[key]

    return of


FAIRSEQ: dict[str, Any] = {}
BERT_LIKE = {
    "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "pad_piece": "<pad>",
    "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
}  # fmt: skip
DEBERTA = {
    "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]",
    "eos_piece": "[SEP]", "unk_piece": "[UNK]", "user_defined_symbols": ["<new>"],
}  # fmt: skip
XLNET = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>"]}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "XLMRoberta": ("sentencepiece.bpe.model", FAIRSEQ, SETTINGS[:1] + SETTINGS[3:]),
    "Camembert": ("sentencepiece.bpe.model", {"unk_id": 0, "bos_id": 1, "eos_id": 2}, SETTINGS[:1]),
    "Albert": ("spiece.model", BERT_LIKE, (*SETTINGS[:2], {"keep_accents": True})),
    "DebertaV2": ("spm.model", DEBERTA, ({}, {"do_lower_case": True}, {"split_by_punct": True})),
    "XLNet": ("spiece.model", XLNET, SETTINGS[:1]),
    "T5": ("spiece.model", T5, ({}, {"extra_ids": 3}, {"legacy": False})),
    "Llama": ("tokenizer.model", LLAMA, ({}, {"add_eos_token": True, "add_bos_token": False}, {"legacy": False})),
}
CASES = [
    (name, kind, settings)
    for name, (_, _, variants) in MODELS.items()
    for kind in ("unigram", "bpe")
    for settings in variants
    if (name, kind) != ("Llama", "unigram")
]


@pytest.mark.parametrize(("name", "kind", "settings"), CASES, ids=str)
def test_sentencepiece(name: str, kind: str, settings: dict[str, Any], train: Train, tmp_path: Path) -> None:
    file, options, _ = MODELS[name]
    content = train(kind, **options)
    path = write(tmp_path, name, settings, **{file.replace(".", "__"): content})

    # Llama has no role for its first token.
    check(path, file, roles=name != "Llama")


def test_the_artefact_has_the_same_tokenizer(train: Train, tmp_path: Path) -> None:
    """What is made once is read like any other tokenizer.json."""
    from penstock_runtime.tokens.convert import convert

    slow = write(tmp_path / "slow", "XLMRoberta", {}, sentencepiece__bpe__model=train("unigram"))
    fast = tmp_path / "fast"
    shutil.copytree(slow, fast)
    (fast / "sentencepiece.bpe.model").unlink()
    (fast / "tokenizer.json").write_bytes(convert(slow, {}))

    one, other = (
        Tokenizer.open(path, path / name, {})
        for path, name in ((slow, "sentencepiece.bpe.model"), (fast, "tokenizer.json"))
    )

    assert one.backend.to_str() == other.backend.to_str()
    check(fast)


def test_the_files_belong_to_the_digest(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, tokenizer_class="BertTokenizer")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    first = ModelFolder.open(folder).digest()

    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nb\n")

    assert ModelFolder.open(folder).digest() != first
    assert Tokenizer.load(ModelFolder.open(folder)).split(["b a"])[0].ids == [5, 1]


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("BertJapanese", {"vocab__txt": b"[UNK]\n"}, "its tokenizer class is BertJapanese"),
        ("XLMRoberta", {"vocab__txt": b"[UNK]\n"}, "XLMRobertaTokenizer needs sentencepiece.bpe.model"),
        ("Roberta", {"vocab__json": b"{}"}, "RobertaTokenizer needs vocab.json and merges.txt|needs merges.txt"),
    ],
)
def test_what_cannot_be_made_is_named(name: str, files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, {}, **files)
    with pytest.raises(UnsupportedModel, match=words) as caught:
        Tokenizer.open(path, path / "vocab.txt", {})
    assert "AutoTokenizer" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("Bert", {"vocab__txt": b"[UNK]\n[SEP]\n"}, "has no token '\\[CLS\\]'"),
        ("Bert", {"vocab__txt": b"\xff\xfe"}, "not text in UTF-8"),
        ("Roberta", {"vocab__json": b'{"a": 0}', "merges__txt": b"#version\nb c\n"}, "no tokenizer can be made"),
        ("XLMRoberta", {"sentencepiece__bpe__model": b"version https://git-lfs"}, "not a model of sentencepiece"),
        ("XLMRoberta", {"sentencepiece__bpe__model": b""}, "has no pieces"),
        ("Bert", {"vocab__txt": b""}, "vocab.txt: the vocabulary has no token"),
    ],
)
def test_invalid_files_are_named(name: str, files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, {}, **files)
    with pytest.raises(CorruptModel, match=words):
        Tokenizer.open(path, path / next(iter(files)).replace("__", "."), {})


@given(content=st.binary(max_size=200), cut=st.integers(0, 20_000))
def test_damaged_models_are_refused_or_read(content: bytes, cut: int, train: Train, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("model") / "spiece.model"
    whole = train("unigram")
    for damaged in (content, whole[:cut] + content):
        path.write_bytes(damaged)
        try:
            model = read_model(path.parent, path)
        except (CorruptModel, UnsupportedModel):
            continue
        assert model.pieces
        assert len(model.kinds) == len(model.pieces)


def test_sentencepiece_reads_the_same_pieces(train: Train, tmp_path: Path) -> None:
    path = tmp_path / "spiece.model"
    path.write_bytes(train("unigram"))
    judge = sentencepiece.SentencePieceProcessor(model_file=str(path))

    model = read_model(tmp_path, path)

    assert [piece for piece, _ in model.pieces] == [judge.id_to_piece(index) for index in range(judge.vocab_size())]
    assert [score for _, score in model.pieces] == [judge.get_score(index) for index in range(judge.vocab_size())]
    assert model.unknown_id == judge.unk_id()
