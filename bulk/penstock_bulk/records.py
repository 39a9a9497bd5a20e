"""Records of JSON lines, CSV and texts: where each ends, its columns, and the Arrow types that fit the columns of all.

A record that cannot be read (broken JSON, a wrong number of fields, no UTF-8) is a fault of its row, not of the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO, NamedTuple

import orjson

from penstock.errors import PenstockError
from penstock_bulk.arrow import pa

MOST_RECORD_BYTES = 16 * 2**20
"""Of one JSON line, CSV field or paragraph."""
MOST_COLUMNS = 1_000
JSON = {b"penstock": b"json"}
"""Metadata of a column of strings that are JSON, because the values have no common type."""
_TYPES = {
    "bool": pa.bool_(), "int64": pa.int64(), "float64": pa.float64(), "string": pa.string(),
    "strings": pa.list_(pa.string()), "json": pa.string(),
}  # fmt: skip


class Kind(StrEnum):
    """Forms of input files."""

    PARQUET = "parquet"
    ARROW = "arrow"
    JSONL = "jsonl"
    CSV = "csv"
    TEXT = "text"


SUFFIXES = {
    ".parquet": Kind.PARQUET, ".arrow": Kind.ARROW, ".feather": Kind.ARROW, ".jsonl": Kind.JSONL, ".ndjson": Kind.JSONL,
    ".csv": Kind.CSV, ".tsv": Kind.CSV, ".md": Kind.TEXT, ".txt": Kind.TEXT,
}  # fmt: skip


class Fault(NamedTuple):
    """Why a row has no answer."""

    code: str
    message: str


class Slice(NamedTuple):
    """Consecutive rows of a file."""

    file: int
    row: int
    """The first, from 0."""
    rows: int
    start: int = 0
    end: int = 0
    """Bytes of JSON lines, CSV and texts."""


@dataclass(frozen=True)
class Columns:
    """What is to be read of each row."""

    candidates: tuple[tuple[str, ...], ...]
    """Columns for the model, in its order: the first of these that a file has."""
    kept: tuple[str, ...] | None
    """Columns of the output; None: all."""

    def inputs(self, names: Sequence[str], file: str) -> tuple[str, ...]:
        """Those of a file with these columns. PenstockError if it lacks them, or one to keep."""
        missing = [one for one in self.kept or () if one not in names]
        found = next((inputs for inputs in self.candidates if not set(inputs) - set(names)), None)
        if found is not None and not missing:
            return found
        wanted = missing[0] if missing else " or ".join(", ".join(inputs) for inputs in self.candidates)
        raise PenstockError(
            f"{file} has no column {wanted}: it has {', '.join(list(names)[:20]) or 'none'}",
            remedy="Name the columns (--help lists the options)",
        )


def records(kind: Kind, name: str, opened: BinaryIO, part: Slice) -> Iterator[tuple[int, Any]]:
    """The end of each record of a slice, and its columns as a dictionary, or a Fault."""
    start, end = part.start, part.end
    if kind is Kind.CSV:
        return _csv(opened, start, end, "\t" if name.lower().endswith(".tsv") else ",")
    if kind is Kind.JSONL:
        return ((position, _json(line)) for position, line in _lines(opened, start, end) if line.strip())
    paragraphs = enumerate(_paragraphs(opened, start, end), part.row + 1)
    return ((position, _text(name, number, text)) for number, (position, text) in paragraphs)


def _lines(opened: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The end of each line and its bytes, of which there may be one more than MOST_RECORD_BYTES."""
    opened.seek(start)
    while start < end and (line := opened.readline(MOST_RECORD_BYTES + 1)):
        start += len(line)
        more = line
        while more and not more.endswith(b"\n") and len(line) > MOST_RECORD_BYTES:
            more = opened.readline(MOST_RECORD_BYTES + 1)
            start += len(more)
        yield start, line


def _json(line: bytes) -> Any:
    if len(line) > MOST_RECORD_BYTES:
        return Fault("too_large", f"the line has more than {MOST_RECORD_BYTES:,} bytes")
    try:
        value = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        return Fault("json", f"the line is no JSON: {error}")
    return value if isinstance(value, dict) else Fault("json", "the line is no JSON object")


def _paragraphs(opened: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines between blank ones."""
    held = b""
    for position, line in _lines(opened, start, end):
        if line.strip():
            held = (held + line)[: MOST_RECORD_BYTES + 1]
            start = position
        elif held:
            yield start, held
            held = b""
    if held:
        yield start, held


def _text(name: str, number: int, text: bytes) -> Any:
    if len(text) > MOST_RECORD_BYTES:
        return Fault("too_large", f"the paragraph has more than {MOST_RECORD_BYTES:,} bytes")
    try:
        return {"file": name, "paragraph": number, "text": text.decode().strip().removeprefix("\ufeff")}
    except UnicodeDecodeError:
        return Fault("encoding", "it is no UTF-8")


def _csv(opened: BinaryIO, start: int, end: int, delimiter: str) -> Iterator[tuple[int, Any]]:
    """The first line of the file names the columns. It is no record."""
    position, damaged = 0, False

    def lines(begin: int, until: int) -> Iterator[str]:
        nonlocal position, damaged
        opened.seek(begin)
        position = begin
        while position < until and (line := opened.readline(MOST_RECORD_BYTES + 1)):
            text = line.removeprefix(b"" if position else b"\xef\xbb\xbf")
            position += len(line)
            try:
                yield text.decode()
            except UnicodeDecodeError:
                damaged = True
                yield text.decode(errors="replace")

    # The library's limit is one for the process. Without it a quote that is not closed would take in the whole file.
    csv.field_size_limit(MOST_RECORD_BYTES)
    names = next(csv.reader(lines(0, end), delimiter=delimiter), [])
    rows = csv.reader(lines(max(start, position), end), delimiter=delimiter)
    while True:
        damaged = False
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield position, Fault("csv", f"the line is no CSV: {error}")
            continue
        if damaged:
            yield position, Fault("encoding", "it is no UTF-8")
        elif len(fields) != len(names) and fields:
            yield position, Fault("csv", f"the line has {len(fields)} fields, and the first one {len(names)}")
        elif fields:
            yield position, dict(zip(names, fields, strict=True))


class Types:
    """The types of the columns of records, from all of them."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        inputs = {one for candidate in columns.candidates for one in candidate}
        self._wanted = None if columns.kept is None else inputs.union(columns.kept)
        self._found: dict[str, str] = {}

    def see(self, value: Any) -> None:
        """A record or a Fault."""
        if isinstance(value, Fault):
            return
        for name, one in value.items():
            if self._wanted is None or name in self._wanted:
                self._found[name] = _union(self._found.get(name, ""), _type(one))
        if len(self._found) > MOST_COLUMNS:
            raise PenstockError(
                f"the rows have more than {MOST_COLUMNS} columns", remedy="Name those to keep with --keep"
            )

    def schema(self, file: str) -> tuple[Any, tuple[str, ...]]:
        """Of the kept columns, and the input columns. The first of these is a text: other values of it are faults."""
        names = list(self._found)
        inputs = self._columns.inputs(names, file)
        fields = []
        for name in names if self._columns.kept is None else self._columns.kept:
            kind = self._found[name] or "string"
            if name == inputs[0] and kind != "string":
                kind = "string"
            fields.append(pa.field(name, _TYPES[kind], metadata=JSON if kind == "json" else None))
        return pa.schema(fields), inputs


def _type(value: Any) -> str:
    """Of a JSON value; empty for null."""
    match value:
        case None:
            return ""
        case bool():
            return "bool"
        case int():
            return "int64" if -(2**63) <= value < 2**63 else "json"
        case float():
            return "float64"
        case str():
            return "string"
        case list() if all(isinstance(one, str) for one in value):
            return "strings"
    return "json"


def _union(left: str, right: str) -> str:
    if not left or not right or left == right:
        return left or right
    return "float64" if {left, right} == {"int64", "float64"} else "json"


def array(values: list[Any], column: Any) -> Any:
    """Of a schema that all records were seen for, except for values of input columns that are faults."""
    if column.metadata == JSON:
        return pa.array([None if one is None else orjson.dumps(one).decode() for one in values], column.type)
    if pa.types.is_string(column.type):
        values = [one if isinstance(one, str) else None for one in values]
    try:
        return pa.array(values, column.type)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise PenstockError(
            f"the column {column.name} has another type than when the work was planned ({error})",
            remedy="Write the output to another folder",
        ) from error
