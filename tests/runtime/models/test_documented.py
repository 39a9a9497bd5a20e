"""The commands of docs/how-to/convert-a-model.md work, and every section that a remedy names exists."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import UnsafeModel
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sentence import SparsePooling
from penstock_runtime.rows import Pooling
from tests.runtime.models.folders import bare_folder, write_json, write_onnx_with_weights

ROOT = Path(__file__).parents[3]
VOCABULARY = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n"
PAGES = {
    name: (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("reference/models.md", "how-to/convert-a-model.md")
}
PAGE = PAGES["how-to/convert-a-model.md"]


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def programs(title: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", section(title), flags=re.DOTALL)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a program of the page in this process, which has torch loaded already."""

    def run(program: str, *arguments: Path) -> None:
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
        exec(compile(program, "convert.py", "exec"), {"__name__": "__main__"})

    return run


def test_every_section_that_a_remedy_names_exists() -> None:
    sources = [
        *(ROOT / "runtime").rglob("*.py"),
        *(ROOT / "optimizer").rglob("*.py"),
        *(ROOT / "penstock").rglob("*.py"),
    ]
    link = re.compile(r"docs/(reference/models\.md|how-to/convert-a-model\.md)#([\w-]+)")
    named = {(page, anchor) for path in sources for page, anchor in link.findall(path.read_text())}
    titles = {
        (name, title.lower().replace(" ", "-"))
        for name, text in PAGES.items()
        for title in re.findall(r"^##+ (.+)$", text, flags=re.MULTILINE)
    }
    assert {"safetensors", "remote-code", "tokenizer", "object-stores", "onnx-weights"} <= {one for _, one in named}
    assert named <= titles


def test_the_weights_of_a_graph_are_put_into_one_file(tmp_path: Path, run: Callable[..., None]) -> None:
    path = write_onnx_with_weights(bare_folder(tmp_path / "old") / "model.onnx", "onnx__MatMul_7", "weights.bin")
    bare_folder(tmp_path / "new")
    run(programs("onnx weights")[0], path, tmp_path / "new" / "model.onnx")
    names = [path.name for path in ModelFolder.open(tmp_path / "new").files]
    assert names == ["config.json", "model.onnx", "model.onnx_data", "tokenizer.json"]


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A random BERT as old versions of transformers saved it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=16, id2label={0: "sad", 1: "glad", 2: "mad"},
    )  # fmt: skip
    folder = tmp_path / "old"
    transformers.BertForSequenceClassification(config).save_pretrained(folder, safe_serialization=False)
    (folder / "vocab.txt").write_text(VOCABULARY)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})
    with pytest.raises(UnsafeModel):
        ModelFolder.open(folder)
    return folder


@pytest.mark.parity
def test_the_conversion_of_a_transformers_model_works(pickled: Path, tmp_path: Path, run: Callable[..., None]) -> None:
    run(programs("safetensors")[0], pickled, tmp_path / "new")
    folder = ModelFolder.open(tmp_path / "new")
    assert (folder.architecture, folder.labels) == ("BertForSequenceClassification", ("sad", "glad", "mad"))
    assert folder.tokenizer.is_file()


@pytest.mark.parity
def test_the_conversion_of_a_sentence_transformers_model_works(tmp_path: Path, run: Callable[..., None]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sentence_transformers")
    old = tmp_path / "old"
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(old / "0_Transformer", safe_serialization=False)
    (old / "0_Transformer" / "vocab.txt").write_text(VOCABULARY)
    write_json(old / "0_Transformer" / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})
    write_json(old / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 16})
    write_json(old / "1_Pooling" / "config.json", {"word_embedding_dimension": 8, "pooling_mode_cls_token": True})
    kinds = ["Transformer", "Pooling", "Normalize"]
    write_json(
        old / "modules.json",
        [
            {"idx": n, "name": str(n), "path": f"{n}_{kind}", "type": f"sentence_transformers.models.{kind}"}
            for n, kind in enumerate(kinds)
        ],
    )
    run(programs("safetensors")[1], old, tmp_path / "new")
    folder = ModelFolder.open(tmp_path / "new")
    assert (folder.pooling, folder.normalize, folder.max_tokens) == (Pooling.CLS, True, 16)
    assert folder.tokenizer.is_file()


def test_a_plain_masked_language_model_gets_sparse_vectors(tmp_path: Path, run: Callable[..., None]) -> None:
    folder = bare_folder(tmp_path, architectures=["BertForMaskedLM"])
    run(programs("splade")[0], folder)
    assert ModelFolder.open(folder, weights=False).sparse == SparsePooling(sums=False, twice=False)


@pytest.mark.parity
def test_the_fast_tokenizer_is_written_to_the_folder_of_the_slow_one(pickled: Path, run: Callable[..., None]) -> None:
    run(programs("tokenizer")[0], pickled)
    assert (pickled / "tokenizer.json").is_file()
