"""Rows of input files: each form gives the same rows, cut into any shards; what cannot be read is a row's fault."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from penstock.errors import PenstockError
from penstock_bulk import records
from penstock_bulk.records import Columns
from penstock_bulk.rows import Piece, ShardReader, open_input, plan_rows
from tests.examples import examples

TEXT = Columns((("text",),), None)
TABLE = pa.table(
    {
        "id": list(range(1000)),
        "text": [f'text {number}, with "quotes" and\ntwo lines' * (number % 5) for number in range(1000)],
        "score": [None if number % 7 == 0 else number / 4 for number in range(1000)],
    }
)


def write_parquet(path: Path, table: Any) -> None:
    parquet.write_table(table, path / "a.parquet", row_group_size=300)


def write_arrow(path: Path, table: Any) -> None:
    with pa.ipc.new_file(path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=300)


def write_lines(path: Path, table: Any) -> None:
    (path / "a.jsonl").write_text("\n\n".join(map(json.dumps, table.to_pylist())), encoding="utf-8")


def write_csv(path: Path, table: Any, *, name: str = "a.csv", delimiter: str = ",") -> None:
    with (path / name).open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(table.column_names)
        writer.writerows(row.values() for row in table.to_pylist())


def write_tsv(path: Path, table: Any) -> None:
    write_csv(path, table, name="a.tsv", delimiter="\t")


FORMS: list[Callable[[Path, Any], None]] = [write_parquet, write_arrow, write_lines, write_csv, write_tsv]


def read_all(path: Path, shard_rows: int, columns: Columns = TEXT) -> list[Piece]:
    """Shard by shard, in order."""
    source = open_input(str(path))
    shards, schema, inputs = plan_rows(source, columns, shard_rows)
    assert all(sum(one.rows for one in shard) == shard_rows for shard in shards[:-1])
    with closing(ShardReader(source, inputs, schema)) as reader:
        pieces = [piece for shard in shards for piece in reader.pieces(shard)]
    # A shard alone, as after a kill, has the rows that it has in order.
    with closing(ShardReader(source, inputs, schema)) as reader:
        alone = [piece for shard in shards[-1:] for piece in reader.pieces(shard)]
    last = [origin for piece in pieces for origin in piece.origins][-sum(one.rows for one in shards[-1]) :]
    assert [origin for piece in alone for origin in piece.origins] == last
    return pieces


@pytest.mark.parametrize("write", FORMS)
@pytest.mark.parametrize("shard_rows", [1000, 301, 64])
def test_each_form_gives_the_same_rows(write: Any, shard_rows: int, tmp_path: Path) -> None:
    write(tmp_path, TABLE)

    piece = Piece.merged(read_all(tmp_path, shard_rows))

    text = TABLE.column("text").to_pylist()
    assert piece.inputs == text
    assert piece.origins == [(0, row) for row in range(1000)]
    assert piece.faults == {}
    assert piece.table.column("text").to_pylist() == text
    as_text = write in {write_csv, write_tsv}
    expected = ["" if one is None else str(one) for one in TABLE.column("score").to_pylist()]
    assert piece.table.column("score").to_pylist() == (expected if as_text else TABLE.column("score").to_pylist())
    if not as_text:
        assert piece.table.schema == TABLE.schema


FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"), max_size=20)


@settings(max_examples=examples(200), deadline=None)
@given(texts=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=20), shard_rows=st.integers(1, 7))
def test_any_text_comes_back_from_csv_and_json_lines(
    texts: list[tuple[str, str]], shard_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    table = pa.table({"text": [one for one, _ in texts], "b": [one for _, one in texts]})
    for write in (write_csv, write_lines):
        folder = tmp_path_factory.mktemp("any")
        write(folder, table)
        assert Piece.merged(read_all(folder, shard_rows)).table.to_pylist() == table.to_pylist()


def test_paragraphs_of_texts_are_rows_and_small_files_share_a_shard(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below/b.md").write_text("# Title\n\nfirst\nline\n \n\nlast\n")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden.md").write_text("no")

    pieces = read_all(tmp_path, 10)

    assert [row for piece in pieces for row in piece.table.to_pylist()] == [
        {"file": "a.txt", "paragraph": 1, "text": "one"},
        {"file": "below/b.md", "paragraph": 1, "text": "# Title"},
        {"file": "below/b.md", "paragraph": 2, "text": "first\nline"},
        {"file": "below/b.md", "paragraph": 3, "text": "last"},
    ]
    assert read_all(tmp_path, 3)[-1].table.to_pylist()[0]["paragraph"] == 3


def test_types_of_json_columns_are_those_that_fit_all_rows(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"text": "a", "i": 1, "f": 1, "s": "x", "l": ["a"], "j": {"k": 1}, "big": 1, "b": True},
        {"text": 3, "i": None, "f": 0.5, "s": None, "l": [], "j": [1], "big": 2**63, "late": "y"},
    ]
    (tmp_path / "a.ndjson").write_text("\n".join(map(json.dumps, lines)))

    piece = Piece.merged(read_all(tmp_path, 9))

    assert {one.name: str(one.type) for one in piece.table.schema} == {
        "text": "string", "i": "int64", "f": "double", "s": "string", "l": "list<item: string>", "j": "string",
        "big": "string", "b": "bool", "late": "string",
    }  # fmt: skip
    assert piece.table.to_pylist()[0]["j"] == '{"k":1}'
    assert piece.inputs == ["a", 3]


BAD: list[tuple[str, bytes, dict[int, str]]] = [
    ("a.jsonl", b'{"text": "a"}\nnot json\n["list"]\n{"text": "b"}', {1: "json", 2: "json"}),
    ("a.jsonl", b'{"text": "\\ud800"}\n{"text": "a"}', {0: "json"}),
    ("a.jsonl", b'{"text": "' + b"x" * 2000 + b'"}\n{"text": "b"}\n', {0: "too_large"}),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', {1: "json"}),
    ("a.csv", b"text,b\nx,1\ny\nz,2,3\nw,4\n", {1: "csv", 2: "csv"}),
    ("a.csv", b"text,b\nx,\xff\ny,2\n", {0: "encoding"}),
    ("a.csv", b"text,b\nx,1\nc\rd,2\ny,3\n", {1: "csv"}),
    ("a.csv", b'text,b\nx,1\n"' + b"y\n" * 1000 + b",1\n", {}),
    ("a.md", b"a\n\n\xff\n\nb", {1: "encoding"}),
    ("a.md", b"a\n\n" + b"x\n" * 1000 + b"\nb", {1: "too_large"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "faults"), BAD)
def test_what_cannot_be_read_is_a_fault_of_its_row(
    name: str, content: bytes, faults: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST_RECORD_BYTES", 1000)
    (tmp_path / name).write_bytes(content)

    piece = Piece.merged(read_all(tmp_path, 2))

    found = {at: fault.code for at, fault in piece.faults.items()}
    if faults:
        assert found == faults
    else:  # a quote that is not closed: what it takes in is bounded
        assert set(found.values()) == {"csv"}
    assert piece.table.num_rows == len(piece.inputs) == len(piece.origins)
    csv.field_size_limit(131072)


def test_strings_of_parquet_that_are_no_utf_8_are_faults(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff", b"c"])
    text = pa.StringArray.from_buffers(3, *raw.buffers()[1:])
    parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet")

    piece = Piece.merged(read_all(tmp_path, 9))

    assert {at: one.code for at, one in piece.faults.items()} == {1: "encoding"}
    assert piece.inputs == ["a", None, "c"]


def buffer(write: Callable[[Any], None]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def parquet_bytes(**columns: Sequence[Any]) -> bytes:
    return buffer(lambda file: parquet.write_table(pa.table(columns), file))


REFUSED: list[tuple[dict[str, bytes], Columns, str]] = [
    ({}, TEXT, "has no file to read"),
    ({"a.bin": b""}, TEXT, "has no file to read: a.bin has another suffix"),
    ({"a.jsonl": b"{}", "b.csv": b"text"}, TEXT, "files of several forms: a.jsonl and b.csv"),
    ({"a.jsonl": b'{"x": 1}'}, TEXT, "a.jsonl has no column text: it has x"),
    ({"a.csv": b"x,y\n1,2\n"}, TEXT, "a.csv has no column text: it has x, y"),
    ({"a.parquet": parquet_bytes(text=["a"])}, Columns((("text",),), ("id",)), "has no column id: it has text"),
    ({"a.parquet": parquet_bytes(text=[1])}, TEXT, "the column text has the type int64, and texts are needed"),
    ({"a.parquet": b"PAR1 nothing"}, TEXT, "a.parquet cannot be read"),
    ({"a.arrow": b"nothing at all"}, TEXT, "a.arrow cannot be read"),
    (
        {"a.parquet": parquet_bytes(text=["a"], n=[1]), "b.parquet": parquet_bytes(text=["a"], n=["x"])},
        TEXT,
        "n is int64 in a.parquet, and string in b.parquet",
    ),
]


@pytest.mark.parametrize(("files", "columns", "message"), REFUSED)
def test_input_that_cannot_be_planned_is_refused(
    files: dict[str, bytes], columns: Columns, message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    with pytest.raises(PenstockError, match=message):
        plan_rows(open_input(str(tmp_path)), columns, 10)


def test_a_readme_next_to_tables_is_not_read_and_one_file_can_be_named(tmp_path: Path) -> None:
    write_lines(tmp_path, TABLE)
    (tmp_path / "README.md").write_text("text")

    assert [one.name for one in open_input(str(tmp_path)).files] == ["a.jsonl"]
    assert [one.name for one in open_input(str(tmp_path / "README.md")).files] == ["README.md"]
