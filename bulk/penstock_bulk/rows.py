"""Rows of input files (Parquet, Arrow, JSON lines, CSV, texts). A plan cuts them into shards, a reader reads shards.

Memory does not depend on the size of a file: Parquet and Arrow are read in batches, other files by records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from penstock.errors import PenstockError
from penstock_bulk.arrow import pa
from penstock_bulk.records import SUFFIXES, Columns, Fault, Kind, Slice, Types, array, records
from penstock_bulk.storage import Folder, StoredFile, open_folder

PIECE_ROWS = 256
"""Rows that are decoded together."""
Shard = tuple[Slice, ...]
OnScan = Callable[[int, int], None]
"""Called with the bytes that were scanned, and of all."""


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
    types = Types(columns)
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

                cut.records(number, records(source.kind, file.name, opened, Slice(number, 0, 0, 0, file.size)), see)
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


class ShardReader:
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
            found_records = records(self._source.kind, file.name, opened, part)
            while found := list(islice(found_records, PIECE_ROWS)):
                values = [value for _, value in found]
                faults = {at: value for at, value in enumerate(values) if isinstance(value, Fault)}
                dicts = [{} if isinstance(value, Fault) else value for value in values]
                table = pa.table(
                    [array([one.get(name) for one in dicts], self._schema.field(name)) for name in self._schema.names],
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
