"""Static embeddings: Model2Vec, and sentence-transformers' StaticEmbedding."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from penstock.errors import CorruptModel, UnsupportedModel
from penstock.resources.core import ModelSource
from penstock.tasks import Head, TaskName
from penstock_optimizer.export import export
from penstock_optimizer.export.reader import open_session
from penstock_runtime.engines.grid import feed
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sources import static_folder
from penstock_runtime.models.sources.fetch import fetch_model
from penstock_runtime.models.sources.static_folder import is_static
from penstock_runtime.rows import Batch, Outputs, run_rows
from penstock_runtime.tasks.factory import make_task

WORDS = ["[UNK]", "[CLS]", "[SEP]", "the", "licence", "covers", "work", "of", "a", "dog", "and", "cat"]
TEXTS = ["the licence covers the work", "a dog", "a strange dog and a strange cat", "strange"]
WIDTH = 16
CONFIG = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True}
STATIC = {"type": "sentence_transformers.models.StaticEmbedding"}


def tokenizer() -> Tokenizer:
    """Of words; it adds special tokens, which such models do not use."""
    made = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    made.enable_padding()
    return made


def table() -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(len(WORDS), WIDTH)).astype(np.float32)


def write_model2vec(
    path: Path, tensors: dict[str, NDArray[Any]] | None = None, *, modules: bool = True, **config: Any
) -> Path:
    """A folder as the package model2vec 0.10 writes it."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors or {"embeddings": table()}, path / "model.safetensors")
    tokenizer().save(str(path / "tokenizer.json"))
    settings = {**CONFIG, **config}
    (path / "config.json").write_text(json.dumps(settings))
    if modules:
        entries = [{"idx": 0, "name": "0", "path": ".", **STATIC}]
        if settings["normalize"]:
            normalize = {"path": "1_Normalize", "type": "sentence_transformers.models.Normalize"}
            entries.append({"idx": 1, "name": "1", **normalize})
        (path / "modules.json").write_text(json.dumps(entries))
    return path


def fetched(path: Path, cache: Path) -> ModelFolder:
    return fetch_model(ModelSource.parse(f"file://{path}"), cache=cache)


def answers(folder: ModelFolder, texts: Sequence[str], out: Path) -> NDArray[np.float32]:
    """The vectors by our graph and task, of all texts in one batch."""
    exported = export(folder, Head.ENCODER, out)
    task = make_task(TaskName.FEATURE_EXTRACTION, folder, io=exported.io)
    prepared = task.prepare(task.parse(list(texts), {}))
    session = open_session(exported.path)
    names = [one.name for one in session.get_outputs()]

    def run(batch: Batch) -> Outputs:
        values = session.run(names, feed(batch, exported.io.inputs))
        return dict(zip(names, values, strict=True))

    outputs = run_rows(run, exported.io, prepared.rows)
    reduced = [task.reduce(row, one) for row, one in zip(prepared.rows, outputs, strict=True)]
    return np.asarray(task.assemble(prepared, reduced))


def by_model2vec(
    texts: Sequence[str], vectors: NDArray[Any], *, mapping: Any = None, weights: Any = None, normalize: bool = True
) -> NDArray[np.float32]:
    """As model2vec 0.10 computes them: without special tokens and unknown ones."""
    found = []
    for text in texts:
        ids = [one for one in tokenizer().encode(text, add_special_tokens=False).ids if one != 0]
        rows = vectors[ids if mapping is None else mapping[ids]].astype(np.float32)
        rows = rows if weights is None else rows * weights[ids][:, None]
        mean = rows.mean(axis=0) if ids else np.zeros(vectors.shape[1], np.float32)
        found.append(mean / (np.linalg.norm(mean) + 1e-32) if normalize else mean)
    return np.array(found, np.float32)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("modules", [True, False])
def test_vectors_are_those_of_model2vec(normalize: bool, modules: bool, tmp_path: Path) -> None:
    path = write_model2vec(tmp_path / "model", normalize=normalize, modules=modules)
    folder = fetched(path, tmp_path / "cache")

    found = answers(folder, TEXTS, tmp_path / "out")

    np.testing.assert_allclose(found, by_model2vec(TEXTS, table(), normalize=normalize), atol=1e-6)
    assert folder.max_tokens == 512
    assert fetched(path, tmp_path / "cache").path == folder.path


@pytest.mark.parametrize("kind", ["weights", "mapping", "float16", "int8"])
def test_quantised_tables_are_those_of_model2vec(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_folder, "PIECE_BYTES", 4 * WIDTH * 5)  # written in three pieces
    generator = np.random.default_rng(2)
    weights = generator.random(len(WORDS), dtype=np.float32) if kind == "weights" else None
    mapping = generator.integers(0, 5, len(WORDS)) if kind == "mapping" else None
    vectors = (table() * 40).astype({"float16": np.float16, "int8": np.int8}.get(kind, np.float32))
    vectors = vectors[:5] if kind == "mapping" else vectors
    tensors = {"embeddings": vectors, "weights": weights, "mapping": mapping}
    present = {name: one for name, one in tensors.items() if one is not None}
    folder = fetched(write_model2vec(tmp_path / "model", present, max_length=64), tmp_path / "cache")

    found = answers(folder, TEXTS, tmp_path / "out")

    np.testing.assert_allclose(found, by_model2vec(TEXTS, vectors, mapping=mapping, weights=weights), atol=1e-6)
    assert folder.max_tokens == 64


@pytest.mark.parity
@pytest.mark.parametrize("later", [(), ("Normalize",), ("Dense", "Normalize")])
def test_vectors_are_those_of_sentence_transformers(later: tuple[str, ...], tmp_path: Path) -> None:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, StaticEmbedding

    torch.manual_seed(0)
    made = {"Normalize": Normalize(), "Dense": Dense(WIDTH, 8)}
    static = StaticEmbedding(tokenizer(), embedding_weights=table())
    model = SentenceTransformer(modules=[static, *(made[name] for name in later)], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    folder = fetched(tmp_path / "model", tmp_path / "cache")

    found = answers(folder, TEXTS, tmp_path / "out")

    np.testing.assert_allclose(found, model.encode(TEXTS), atol=1e-6)
    assert folder.max_tokens == 8192


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"other": table()}, "has no tensor embeddings"),
        ({"embeddings": table()[0]}, "has no tensor embeddings"),
        ({"embeddings": table()[:0]}, "has no tensor embeddings"),
        ({"embeddings": table(), "mapping": np.array([99])}, "mapping names rows that are not there"),
        ({"embeddings": table(), "mapping": np.array([], np.int64)}, "mapping names rows that are not there"),
        ({"embeddings": table(), "weights": np.ones(3, np.float32)}, r"3\] weights for 12 tokens"),
    ],
)
def test_tables_that_do_not_fit_are_named(tensors: dict[str, NDArray[Any]], words: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match=words):
        fetched(write_model2vec(tmp_path / "model", tensors), tmp_path / "cache")


def test_a_table_over_the_limit_is_refused_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a megabyte has the vectors of a million tokens, 16 GB."""
    monkeypatch.setenv("PENSTOCK_MODEL_MAX_BYTES", str(10**9))
    tensors: dict[str, NDArray[Any]] = {
        "embeddings": np.ones((2, 4096), np.float32),
        "mapping": np.zeros(1_000_000, np.uint8),
    }
    path = write_model2vec(tmp_path / "model", tensors)
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedModel, match="tensors as float32 have 16,384,000,000 bytes; the limit is"):
            fetched(path, tmp_path / "cache")
        assert tracemalloc.get_traced_memory()[1] < 10**8
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_a_table_is_named(tmp_path: Path) -> None:
    path = write_model2vec(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    with pytest.raises(CorruptModel, match="no folder with both"):
        fetched(path, tmp_path / "cache")
    assert not is_static(tmp_path / "nothing")


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    folder = fetched(write_model2vec(tmp_path / "model"), tmp_path / "cache")
    with pytest.raises(UnsupportedModel, match="without a"):
        export(folder, Head.SEQUENCE, tmp_path / "out")
