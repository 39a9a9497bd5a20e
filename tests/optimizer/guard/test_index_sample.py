"""Samples of indexes: what is read, what is refused with column and row, and what a server must give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import array, float32, float64, list_, parquet, table

from penstock.errors import IndexSampleUnusable, PenstockError
from penstock.resources.endpoint_parts.vector_space import IndexCriteria
from penstock.tasks import TaskName
from penstock_optimizer.guard import index_sample
from penstock_optimizer.guard.index_sample import Embedder, IndexSample, index_vectors, read_sample
from tests.runtime.http.serving import make_model, serving

Write = Callable[[Path, list[dict[str, Any]]], Path]


def lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "sample.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_parquet(folder: Path, rows: list[dict[str, Any]], kind: Any = None) -> Path:
    path = folder / "sample.parquet"
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    parquet.write_table(
        table({name: array(each, kind if name == "vector" else None) for name, each in columns.items()}), path
    )
    return path


def some(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "text": f"text {number}", "vector": [1.0, float(number)]} for number in range(count)]


@pytest.mark.parametrize("write", [lines, as_parquet])
def test_both_forms_give_the_same_sample(write: Write, tmp_path: Path) -> None:
    found = read_sample(write(tmp_path, some(5)))

    assert found.texts == tuple(f"text {number}" for number in range(5))
    np.testing.assert_array_equal(found.vectors, [[1, number] for number in range(5)])
    assert found.digest == read_sample(lines(tmp_path, some(5))).digest
    assert found.digest != read_sample(lines(tmp_path, some(4))).digest


@pytest.mark.parametrize("kind", [list_(float32()), list_(float64()), list_(float32(), 2)])
def test_all_list_types_of_parquet_are_read(kind: Any, tmp_path: Path) -> None:
    np.testing.assert_array_equal(read_sample(as_parquet(tmp_path, some(3), kind)).vectors, [[1, 0], [1, 1], [1, 2]])


@pytest.mark.parametrize("write", [lines, as_parquet])
def test_a_long_file_is_sampled_evenly(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_sample, "ROWS_AT_ONCE", 7)
    found = read_sample(write(tmp_path, some(100)), most=30)

    assert found.texts == tuple(f"text {number}" for number in range(0, 100, 4))
    assert found.rows == 100


@pytest.mark.parametrize("write", [lines, as_parquet])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": None}, "column text, row 3: there is no text"),
        ({"text": "  "}, "column text, row 3: there is no text"),
        ({"text": "a" * 40_000}, "column text, row 3: the text has 40,000 characters"),
        ({"vector": None}, "column vector, row 3: this is not a list"),
        ({"vector": []}, "column vector, row 3: this is not a list of 1 to"),
        ({"vector": [1.0]}, "column vector, row 3: the vector has 1 values, and the first one 2"),
        ({"vector": [0.0, 0.0]}, "column vector, row 3: the vector has a value that is not finite, or only zeros"),
        ({"vector": [1.0, float("nan")]}, "column vector, row 3: the vector has a value that is not finite"),
        ({"vector": [1e300, 1.0]}, "column vector, row 3: the vector has a value that is not finite"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_wrong_row_is_named_with_its_column(write: Write, change: Any, message: str, tmp_path: Path) -> None:
    rows = some(4)
    rows[2] |= change
    with pytest.raises(IndexSampleUnusable) as refused:
        read_sample(write(tmp_path, rows))
    assert message in refused.value.message
    assert str(tmp_path) in refused.value.message


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "a.jsonl", "has no rows"),
        (b"[1]\n", "a.jsonl", "row 1: this is not a JSON object"),
        (b"[" * 100_000 + b"\n", "a.jsonl", "row 1: this is not a JSON object"),
        (b'{"text": "' + b"a" * 2**21 + b'"}\n', "a.jsonl", "row 1: this is not a JSON object in one line of up to"),
        (b'{"body": "a", "v": [1]}\n', "a.jsonl", "has no column text or content or document or chunk: it has body, v"),
        (b"PAR1", "a.parquet", "is no Parquet file"),
        (None, "a.jsonl", "cannot be read"),
        (None, "a.parquet", "cannot be read"),
    ],
)
def test_another_file_is_refused(content: bytes | None, name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(IndexSampleUnusable, match=message):
        read_sample(path)


def test_columns_have_names_of_the_user(tmp_path: Path) -> None:
    path = lines(tmp_path, [{"body": "a", "values": [1, 2], "text": 7}])

    assert read_sample(path, text="body", vector="values").texts == ("a",)
    with pytest.raises(IndexSampleUnusable, match="has no column title"):
        read_sample(path, text="title")


@pytest.mark.parametrize("name", ["MOST_BYTES", "MOST_FILE_BYTES"])
def test_what_is_read_is_bounded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_sample, name, 40)
    with pytest.raises(IndexSampleUnusable, match=r"MiB|GiB"):
        read_sample(lines(tmp_path, some(9)))


def test_queries_are_no_documents_and_have_enough_of_them() -> None:
    class Same(Embedder):
        def vectors(self, texts: Any, **_: Any) -> Any:
            return np.array([[len(text), 1.0] for text in texts], np.float32)

    texts = tuple(f"text {number % 150}" for number in range(300))
    sample = IndexSample(texts, np.arange(600, dtype=np.float32).reshape(300, 2), 300, "digest")
    found = index_vectors(sample, IndexCriteria(), Same("http://a"))

    asked = {tuple(row) for row in found.old}
    assert len(found.old) == 100
    assert asked.isdisjoint(tuple(row) for row in found.documents)
    of = {tuple(vector): text for vector, text in zip(sample.vectors, texts, strict=True)}
    assert {of[row] for row in asked}.isdisjoint(of[tuple(row)] for row in found.documents)
    with pytest.raises(IndexSampleUnusable, match="documents to search, and 50 results need 500"):
        index_vectors(sample, IndexCriteria(k=50), Same("http://a"))


def test_a_server_gives_vectors_and_others_are_errors(tmp_path: Path) -> None:
    folder = make_model(tmp_path, TaskName.FEATURE_EXTRACTION)
    with serving(folder, TaskName.FEATURE_EXTRACTION) as endpoint:
        seen: list[tuple[int, int]] = []
        texts = [f"text {number}" for number in range(20)]
        found = Embedder(endpoint.url).vectors(texts, on_progress=lambda done, of: seen.append((done, of)))
        alone = Embedder(endpoint.url).vectors(texts[-1:])
        with pytest.raises(PenstockError, match=r"status 4.*prompt"):
            Embedder(endpoint.url).vectors(texts, prompt="query")
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(found[-1], alone[0], atol=1e-6)
    assert seen == [(16, 20), (20, 20)]
    with pytest.raises(PenstockError, match="/embed is not answered"):
        Embedder(endpoint.url).vectors(texts)
