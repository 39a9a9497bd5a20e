"""Writes and reads the parts of an output: Parquet, Arrow, JSON lines."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from penstock_bulk.arrow import pa
from penstock_bulk.records import JSON
from penstock_bulk.storage import Folder, StoredFile, write_errors


@contextmanager
def writing(path: Path, form: str, schema: Any) -> Iterator[Callable[[Any], None]]:
    """A function that appends a table to a new file, which is whole when the block has ended."""
    with write_errors(path.parent):
        file = path.open("wb")
    try:
        with write_errors(path.parent):
            writer = _Lines(file) if form == "jsonl" else _arrow_writer(file, form, schema)

        def write(table: Any) -> None:
            with write_errors(path.parent):
                writer.write_table(table.cast(schema))

        try:
            yield write
            with write_errors(path.parent):
                writer.close()
                file.close()
        except BaseException:
            # pyarrow would finish the file when its memory is freed.
            writer.is_open = False
            raise
    finally:
        with suppress(OSError):  # of the rest of a file that an error has ended
            file.close()


def _arrow_writer(file: BinaryIO, form: str, schema: Any) -> Any:
    if form == "arrow":
        return pa.ipc.new_file(file, schema)
    from pyarrow import parquet

    # Vectors are random numbers: dictionaries, statistics and compression cost time and save nothing.
    return parquet.ParquetWriter(file, schema, use_dictionary=False, compression="none", write_statistics=False)


def read_results(output: Folder, part: StoredFile, name: str, kind: Any) -> Any:
    """The results of a part as one Arrow array of type `kind`."""
    with output.open(part) as file:
        if part.name.endswith(".parquet"):
            from pyarrow import parquet

            column = parquet.read_table(file, columns=[name]).column(name)
        elif part.name.endswith(".arrow"):
            column = pa.ipc.open_file(file).read_all().column(name)
        else:
            return pa.array([orjson.loads(line)[name] for line in file], kind)
    return pa.chunked_array(column.chunks, kind).combine_chunks()


class _Lines:
    """Writes tables as JSON lines."""

    is_open = True

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write_table(self, table: Any) -> None:
        """Append rows."""
        self._file.writelines(_lines(table))

    def close(self) -> None:
        """Nothing is left to write."""


def _lines(table: Any) -> Iterator[bytes]:
    """Vectors as numbers that give the same float32 or float16 again."""
    columns: dict[str, list[Any]] = {}
    for field in table.schema:
        column = table.column(field.name).combine_chunks()
        if field == table.schema[-1] and pa.types.is_fixed_size_list(field.type):
            values = column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), field.type.list_size)
            # JSON has no numbers of 16 bits.
            columns[field.name] = list(values.astype("float32"))
        elif field.metadata == JSON:
            columns[field.name] = [None if one is None else orjson.Fragment(one) for one in column.to_pylist()]
        else:
            columns[field.name] = column.to_pylist()
    for row in zip(*columns.values(), strict=True):
        yield orjson.dumps(
            dict(zip(columns, row, strict=True)),
            default=_plain,
            option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS,
        )


def _plain(value: Any) -> str:
    """What JSON has no form for: bytes, decimals, durations."""
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)
