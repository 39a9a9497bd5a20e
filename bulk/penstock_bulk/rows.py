"""Rows of input files (Parquet, Arrow, JSON lines, CSV, texts). A plan cuts them into shards, a reader reads shards.

Memory does not depend on the size of a file: Parquet and Arrow are read in batches, other files by records. A record
that cannot be read (broken JSON, a wrong number of fields, no UTF-8) is a fault of its row, not of the file.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import orjson

from penstock.errors import PenstockError
from penstock_bulk.arrow import pa
from penstock_bulk.storage import Folder, StoredFile, open_folder

MOST_RECORD_BYTES = 16 * 2**20
"""Of one JSON line, CSV field or paragraph."""
MOST_COLUMNS = 1_000
PIECE_ROWS = 256
"""Rows that are decoded together."""
JSON = {b"penstock": b"json"}
"""Metadata of a column of strings that are JSON, because the values have no common type."""


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
_TYPES = {
    "bool": pa.bool_(), "int64": pa.int64(), "float64": pa.float64(), "string": pa.string(),
    "strings": pa.list_(pa.string()), "json": pa.string(),
}  # fmt: skip
OnScan = Callable[[int, int], None]
"""Called with the bytes that were scanned, and of all."""


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


Shard = tuple[Slice, ...]


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


@dataclass(frozen=True)
class Input:
    """The files to read: all of one form, by name."""

    folder: Folder
    kind: Kind
    files: tuple[StoredFile, ...]


@dataclass
class Piece:
    """Some rows."""

    table: Any
    """pyarrow Table of the kept columns."""
    inputs: list[Any]
    """For each row the value of its input column, or a tuple of several."""
    origins: list[tuple[int, int]]
    """For each row its file and its row in the file."""
    faults: dict[int, Fault] = field(default_factory=dict)
    """By position in this piece."""
    size: int = 0
    """Bytes in the input."""

    def only(self, positions: Sequence[int]) -> Piece:
        """Some of its rows, in order."""
        return Piece(
            self.table.take(pa.array(positions, pa.int64())),
            [self.inputs[at] for at in positions],
            [self.origins[at] for at in positions],
            {new: self.faults[at] for new, at in enumerate(positions) if at in self.faults},
            self.size * len(positions) // max(1, len(self.inputs)),
        )

    @classmethod
    def merged(cls, pieces: Sequence[Piece]) -> Piece:
        """Those of several, at least one."""
        whole = cls(pa.concat_tables([one.table for one in pieces]), [], [])
        for one in pieces:
            whole.faults |= {len(whole.inputs) + at: fault for at, fault in one.faults.items()}
            whole.inputs += one.inputs
            whole.origins += one.origins
            whole.size += one.size
        return whole


def open_input(address: str) -> Input:
    """The files at a path or an address: one file, or all below a folder with a known suffix. PenstockError."""
    found, single = _listed(address)
    shown = [one for one in found.files() if single in {"", one.name} and not _is_hidden(one.name)]
    by_kind: dict[Kind, list[StoredFile]] = {}
    for one in shown:
        if kind := SUFFIXES.get(PurePosixPath(one.name).suffix.lower()):
            by_kind.setdefault(kind, []).append(one)
    if len(by_kind) > 1:  # tables often have a README.md next to them
        by_kind.pop(Kind.TEXT, None)
    if not by_kind:
        raise PenstockError(
            f"{address} has no file to read" + (f": {shown[0].name} has another suffix" if shown else ""),
            remedy=f"Give a file or a folder of files with one of these suffixes: {', '.join(SUFFIXES)}",
        )
    if len(by_kind) > 1:
        names = " and ".join(files[0].name for files in by_kind.values())
        raise PenstockError(
            f"{address} has files of several forms: {names}", remedy="Give one file, or a folder of one form"
        )
    ((kind, files),) = by_kind.items()
    return Input(found, kind, tuple(files))


def _listed(address: str) -> tuple[Folder, str]:
    """The folder of an address, and the name of its one file, or nothing for all."""
    parent, separator, name = address.rstrip("/").rpartition("/")
    if PurePosixPath(name).suffix.lower() in SUFFIXES:
        folder = open_folder(parent or ("/" if separator else "."))
        if "://" not in address or any(one.name == name for one in folder.files()):
            return folder, name
    return open_folder(address), ""


def _is_hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in PurePosixPath(name).parts)


def plan_rows(
    source: Input, columns: Columns, shard_rows: int, on_scan: OnScan = lambda _done, _all: None
) -> tuple[list[Shard], Any, tuple[str, ...]]:
    """The shards, the schema of the kept columns, and the input columns. JSON lines, CSV and texts are read once, to
    count their rows.

    PenstockError for a column that is not there or has another type.
    """
    cut, total, done = _Cutter(shard_rows), sum(one.size for one in source.files), 0
    schema: Any = None
    inputs: tuple[str, ...] = ()
    types = _Types(columns)
    for number, file in enumerate(source.files):
        with source.folder.open(file) as opened:
            if source.kind in {Kind.PARQUET, Kind.ARROW}:
                with closing(_open_arrow(source.kind, file, opened)) as arrow:
                    found, inputs = _schema_of(arrow.schema, columns, file.name)
                    if schema is not None and found != schema:
                        raise _other_schema(source.files[0].name, schema, file.name, found)
                    schema = found
                    cut.rows(number, arrow.rows())
            else:

                def see(position: int, value: Any, before: int = done) -> None:
                    types.see(value)
                    on_scan(before + position, total)

                cut.records(number, _records(source.kind, file, opened, Slice(number, 0, 0, 0, file.size)), see)
        done += file.size
        on_scan(done, total)
    if schema is None:
        schema, inputs = types.schema(source.files[0].name)
    return cut.shards(), schema, inputs


class _Cutter:
    """Cuts rows into shards of the same number of rows."""

    def __init__(self, shard_rows: int) -> None:
        self._shard_rows = shard_rows
        self._closed: list[Shard] = []
        self._open: list[Slice] = []
        self._room = shard_rows

    def rows(self, file: int, count: int) -> None:
        """Rows that are addressed by their number."""
        row = 0
        while row < count:
            taken = min(self._room, count - row)
            self._add(Slice(file, row, taken))
            row += taken

    def records(self, file: int, records: Iterable[tuple[int, Any]], see: Callable[[int, Any], None]) -> None:
        """Rows that are addressed by bytes. `see` is called with the end of each, and its value."""
        row = rows = start = position = 0
        for position, value in records:
            see(position, value)
            rows += 1
            if rows == self._room:
                self._add(Slice(file, row, rows, start, position))
                row, rows, start = row + rows, 0, position
        if rows:
            self._add(Slice(file, row, rows, start, position))

    def shards(self) -> list[Shard]:
        """All of them."""
        return [*self._closed, *([tuple(self._open)] if self._open else [])]

    def _add(self, piece: Slice) -> None:
        self._open.append(piece)
        self._room -= piece.rows
        if not self._room:
            self._closed.append(tuple(self._open))
            self._open, self._room = [], self._shard_rows


class Reader:
    """Reads shards. Those of one Parquet or Arrow file that follow each other are read in one pass."""

    def __init__(self, source: Input, inputs: tuple[str, ...], schema: Any) -> None:
        self._source, self._inputs, self._schema = source, inputs, schema
        self._arrow: _Arrow | None = None
        self._file: BinaryIO | None = None
        self._next: tuple[int, int] = (-1, 0)
        self._batches: Iterator[Any] = iter(())
        self._rest: Any = None
        """Of a batch that the last shard has read in part."""

    def pieces(self, shard: Shard) -> Iterator[Piece]:
        """The rows of a shard, PIECE_ROWS at most at a time."""
        for part in shard:
            if self._source.kind in {Kind.PARQUET, Kind.ARROW}:
                yield from self._of_arrow(part)
            else:
                yield from self._of_records(part)

    def close(self) -> None:
        """Close the open file."""
        self._batches, self._rest = iter(()), None
        if self._arrow is not None:
            self._arrow.close()
        if self._file is not None:
            self._file.close()
        self._arrow = self._file = None

    def _of_arrow(self, part: Slice) -> Iterator[Piece]:
        names = list(dict.fromkeys((*self._inputs, *self._schema.names)))
        if self._next != (part.file, part.row):
            self.close()
            file = self._source.files[part.file]
            self._file = self._source.folder.open(file)
            self._arrow = _open_arrow(self._source.kind, file, self._file)
            self._batches = self._arrow.batches(part.row, names)
        row, end = part.row, part.row + part.rows
        try:
            while row < end and (batch := self._next_batch()) is not None:
                rest = batch.slice(end - row)
                self._rest = rest if rest.num_rows else None
                yield self._piece(batch.slice(0, end - row), part.file, row)
                row += batch.num_rows - rest.num_rows
        except pa.ArrowException as error:
            raise _unreadable(self._source.files[part.file].name, error) from error
        if row != end:
            raise _changed(self._source.files[part.file].name)
        self._next = (part.file, end)

    def _next_batch(self) -> Any:
        batch, self._rest = self._rest, None
        return next(self._batches, None) if batch is None else batch

    def _piece(self, batch: Any, file: int, row: int) -> Piece:
        faults: dict[int, Fault] = {}
        columns = [_values(batch.column(name), faults) for name in self._inputs]
        table = pa.Table.from_batches([batch]).select(self._schema.names).cast(self._schema)
        origins = [(file, row + position) for position in range(batch.num_rows)]
        return Piece(table, _rows(columns), origins, faults, batch.nbytes)

    def _of_records(self, part: Slice) -> Iterator[Piece]:
        file = self._source.files[part.file]
        row, position = part.row, part.start
        with self._source.folder.open(file) as opened:
            records = _records(self._source.kind, file, opened, part)
            while found := list(islice(records, PIECE_ROWS)):
                values = [value for _, value in found]
                faults = {at: value for at, value in enumerate(values) if isinstance(value, Fault)}
                dicts = [{} if isinstance(value, Fault) else value for value in values]
                table = pa.table(
                    [_array([one.get(name) for one in dicts], self._schema.field(name)) for name in self._schema.names],
                    schema=self._schema,
                )
                inputs = _rows([[one.get(name) for one in dicts] for name in self._inputs])
                origins = [(part.file, row + at) for at in range(len(values))]
                yield Piece(table, inputs, origins, faults, found[-1][0] - position)
                row, position = row + len(found), found[-1][0]
        if row != part.row + part.rows:
            raise _changed(file.name)


def _rows(columns: Sequence[list[Any]]) -> list[Any]:
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


# Parquet and Arrow.


class _Arrow:
    """An open file with a schema and batches."""

    def __init__(self, file: Any, schema: Any, rows: Callable[[], int], batches: Callable[..., Iterator[Any]]) -> None:
        self._file, self.schema, self.rows, self._batches = file, schema, rows, batches

    def batches(self, row: int, names: list[str]) -> Iterator[Any]:
        """RecordBatches of PIECE_ROWS at most, from this row on."""
        for batch in self._batches(row, names):
            for start in range(0, batch.num_rows, PIECE_ROWS):
                yield batch.slice(start, PIECE_ROWS)

    def close(self) -> None:
        """Close it, and not the file below."""
        with suppress(AttributeError):
            self._file.close()


def _open_arrow(kind: Kind, file: StoredFile, opened: BinaryIO) -> _Arrow:
    try:
        if kind is Kind.PARQUET:
            return _open_parquet(opened)
        reader = pa.ipc.open_file(opened)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file.name, error) from error

    def sizes() -> Iterator[Any]:
        return (reader.get_batch(number) for number in range(reader.num_record_batches))

    def batches(row: int, names: list[str]) -> Iterator[Any]:
        for batch in sizes():
            if row < batch.num_rows:
                yield batch.slice(row).select(names)
            row = max(0, row - batch.num_rows)

    return _Arrow(reader, reader.schema, lambda: sum(batch.num_rows for batch in sizes()), batches)


def _open_parquet(opened: BinaryIO) -> _Arrow:
    from pyarrow import parquet

    # A row group may have the whole file: it is read through a buffer, page by page.
    file = parquet.ParquetFile(opened, buffer_size=2**20, pre_buffer=False)
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]

    def batches(row: int, names: list[str]) -> Iterator[Any]:
        first = 0
        while first < len(sizes) and row >= sizes[first]:
            row, first = row - sizes[first], first + 1
        groups = list(range(first, len(sizes)))
        for batch in file.iter_batches(PIECE_ROWS, row_groups=groups, columns=names, use_threads=False):
            if row < batch.num_rows:
                yield batch.slice(row)
            row = max(0, row - batch.num_rows)

    return _Arrow(file, file.schema_arrow, lambda: int(file.metadata.num_rows), batches)


def _schema_of(found: Any, columns: Columns, name: str) -> tuple[Any, tuple[str, ...]]:
    """The kept columns of a file, and its input columns."""
    inputs = columns.inputs(found.names, name)
    for column in inputs:
        one = found.field(column).type
        inner = one.value_type if pa.types.is_dictionary(one) or _is_list(one) else one
        if not (_is_text(inner) or pa.types.is_null(inner)):
            raise PenstockError(
                f"{name}: the column {column} has the type {one}, and texts are needed", remedy="Name another column"
            )
    kept = found.names if columns.kept is None else columns.kept
    return pa.schema([found.field(column).remove_metadata() for column in kept]), inputs


def _is_text(one: Any) -> bool:
    return bool(pa.types.is_string(one) or pa.types.is_large_string(one) or str(one) == "string_view")


def _is_list(one: Any) -> bool:
    return bool(pa.types.is_list(one) or pa.types.is_large_list(one) or pa.types.is_fixed_size_list(one))


def _values(column: Any, faults: dict[int, Fault]) -> list[Any]:
    values = []
    for position, one in enumerate(column):
        try:
            values.append(one.as_py())
        except UnicodeDecodeError:
            faults[position] = Fault("encoding", "it is no UTF-8")
            values.append(None)
    return values


def _other_schema(first: str, schema: Any, name: str, found: Any) -> PenstockError:
    column = next((one.name for one in schema if one.name not in found.names or found.field(one.name) != one), "")
    column = column or next(one for one in found.names if one not in schema.names)
    types = [str(one.field(column).type) if column in one.names else "absent" for one in (schema, found)]
    return PenstockError(
        f"the files have other columns: {column} is {types[0]} in {first}, and {types[1]} in {name}",
        remedy="Name the columns that all have with --keep, or embed the files apart",
    )


def _unreadable(name: str, error: Exception) -> PenstockError:
    return PenstockError(f"{name} cannot be read ({error})", remedy="Write it again, or take it out of the folder")


def _changed(name: str) -> PenstockError:
    return PenstockError(f"{name} has changed while it was read", remedy="Write the output to another folder")


# JSON lines, CSV, texts.


def _records(kind: Kind, file: StoredFile, opened: BinaryIO, part: Slice) -> Iterator[tuple[int, Any]]:
    """The end of each record of a slice, and its columns as a dictionary, or a Fault."""
    start, end = part.start, part.end
    if kind is Kind.CSV:
        return _csv(opened, start, end, "\t" if file.name.lower().endswith(".tsv") else ",")
    if kind is Kind.JSONL:
        return ((position, _json(line)) for position, line in _lines(opened, start, end) if line.strip())
    paragraphs = enumerate(_paragraphs(opened, start, end), part.row + 1)
    return ((position, _text(file.name, number, text)) for number, (position, text) in paragraphs)


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


class _Types:
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


def _array(values: list[Any], column: Any) -> Any:
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
