"""The plan of bulk work: what decides the result (model, options, input files), and the rows of each shard.

It is the first file of an output. Other work has another plan, and is refused there.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import PenstockError
from penstock.vector_space import digest_of_json
from penstock_bulk.arrow import pa
from penstock_bulk.calculation import TASKS, TEXT_COLUMNS
from penstock_bulk.model import Model
from penstock_bulk.records import Columns, Slice
from penstock_bulk.rows import Input, OnScan, Shard, open_input, plan_rows
from penstock_bulk.storage import Folder

PLAN = "_plan.json"
VERSION = 1
FORMS = ("parquet", "arrow", "jsonl")
DTYPES = ("float32", "float16")


class PlanMismatch(PenstockError):
    """The output belongs to other work."""


@dataclass(frozen=True)
class Options:
    """What the result depends on, besides model and input."""

    task: str
    inputs: tuple[str, ...] = ()
    """Columns that the model reads; empty: the first of TEXT_COLUMNS."""
    keep: tuple[str, ...] | None = None
    """Columns of the input in the output; None: all."""
    id_column: str = ""
    """Named in dead letters."""
    column: str = ""
    """Name of the result; empty: the task's."""
    form: str = FORMS[0]
    dtype: str = DTYPES[0]
    shard_rows: int = 0
    """0: the task's."""
    top: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


class BulkPlan(BaseModel):
    """`_plan.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    input: str
    """Its address, and `model` what `penstock.load` is called with: for `verify` and `retry`."""
    model: dict[str, Any]
    identity: dict[str, Any]
    options: dict[str, Any]
    columns: list[str]
    """That the model reads."""
    files: list[tuple[str, int, str]]
    """Name, bytes, version."""
    arrow_schema: str
    """Of the kept columns, as Arrow writes it, in base64."""
    shards: list[list[tuple[int, int, int, int, int]]]
    """For each its slices: file, first row, rows, bytes from, bytes to."""

    @cached_property
    def digest(self) -> str:
        """sha256 of what decides the result, hexadecimal."""
        return digest_of_json(self.model_dump(mode="json", exclude={"input", "model"}))

    @property
    def rows(self) -> int:
        """Of the input."""
        return sum(piece[2] for shard in self.shards for piece in shard)

    @property
    def schema(self) -> Any:
        """Pyarrow schema of the kept columns."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.arrow_schema)))

    def shard(self, number: int) -> Shard:
        """The slices of a shard."""
        return tuple(Slice(*one) for one in self.shards[number])

    def rows_of(self, number: int) -> int:
        """Rows of a shard."""
        return sum(one[2] for one in self.shards[number])

    def part(self, number: int, attempt: int = 0) -> str:
        """The file of a shard, or of an attempt to compute its dead letters again."""
        again = f"-retry{attempt:03}" if attempt else ""
        return f"part-{number:08}-{self.digest[:8]}{again}.{self.options['form']}"


def make_plan(
    address: str,
    model: Model,
    options: Options,
    on_scan: OnScan = lambda _done, _all: None,
    before: BulkPlan | None = None,
) -> BulkPlan:
    """The plan of the work. `before`: one of which the shards are taken if its files are the same. PenstockError."""
    task, source = TASKS[options.task], open_input(address)
    files = listing(source)
    options = replace(options, column=options.column or task.column, shard_rows=options.shard_rows or task.shard_rows)
    identity = asdict(model.identity)
    if model.identity.fields is not None:
        identity["fields"] = model.identity.fields.model_dump(mode="json")
    if before is not None and before.files == files:
        cut = {"columns": before.columns, "arrow_schema": before.arrow_schema, "shards": before.shards}
    else:
        candidates = (options.inputs,) if options.inputs else tuple((name,) for name in TEXT_COLUMNS)
        shards, schema, inputs = plan_rows(source, Columns(candidates, options.keep), options.shard_rows, on_scan)
        if options.column in schema.names:
            raise PenstockError(
                f"the input has a column {options.column}, which is the name of the result",
                remedy="Give the result another name with --column, or name the columns to keep with --keep",
            )
        if options.id_column and options.id_column not in schema.names:
            raise PenstockError(
                f"the column of ids, {options.id_column}, is not kept", remedy="Name it in --keep as well"
            )
        cut = {
            "columns": list(inputs), "shards": [[tuple(one) for one in shard] for shard in shards],
            "arrow_schema": base64.b64encode(schema.serialize().to_pybytes()).decode(),
        }  # fmt: skip
    return BulkPlan(
        version=VERSION, input=_absolute(address), model=_reference(model.arguments), identity=identity, files=files,
        options=orjson.loads(orjson.dumps(asdict(options))), **cut,
    )  # fmt: skip


def listing(source: Input) -> list[tuple[str, int, str]]:
    """Name, bytes and version of each file."""
    return [(one.name, one.size, one.version) for one in source.files]


def _absolute(address: str) -> str:
    return address if "://" in address else str(Path(address).expanduser().absolute())


def _reference(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `penstock.load` is called with, from any folder."""
    paths = {name: _absolute(arguments[name]) for name in ("reference", "store", "models") if arguments[name]}
    return {**{name: arguments[name] for name in ("task", "plan", "threads")}, **paths}


def stored_plan(output: Folder) -> BulkPlan | None:
    """The plan of an output; None if it has none. PenstockError for one that this version does not read."""
    content = output.read(PLAN)
    if content is None:
        return None
    try:
        return BulkPlan.model_validate_json(content)
    except ValidationError as error:
        raise PenstockError(
            f"{output.uri}/{PLAN} is not a plan that this version reads ({error.error_count()} errors)",
            remedy="Use the version of penstock that has written it, or another output",
        ) from error


def require_plan(output: Folder) -> BulkPlan:
    """The plan of an output. PenstockError if it has none."""
    plan = stored_plan(output)
    if plan is None:
        raise PenstockError(f"{output.uri} has no {PLAN}: it is no output", remedy="Give the OUT of penstock embed")
    return plan


def require_apart(address: str, output: Folder) -> None:
    """PenstockError if the output is in the input, where it would become a part of it."""
    if output.uri == _absolute(address).rstrip("/") or output.uri.startswith(f"{_absolute(address).rstrip('/')}/"):
        raise PenstockError(f"{output.uri} is in the input {address}", remedy="Give another folder for the output")


def require_same(before: BulkPlan, now: BulkPlan, output: Folder) -> None:
    """PlanMismatch if the work of an output is not this one: names what differs, with both values."""
    found = [
        (name, left.get(name), right.get(name))
        for left, right in ((before.identity, now.identity), (before.options, now.options))
        for name in dict.fromkeys((*left, *right))
        if left.get(name) != right.get(name)
    ]
    files = [{name: f"{size} bytes, version {version}" for name, size, version in one.files} for one in (before, now)]
    found += [
        (name, files[0].get(name, "absent"), files[1].get(name, "absent"))
        for name in sorted({*files[0], *files[1]})
        if files[0].get(name) != files[1].get(name)
    ]
    if found:
        what = "; ".join(f"{name} is {_shown(left)} there, and {_shown(right)} now" for name, left, right in found[:3])
        more = f" (and {len(found) - 3} more)" if found[3:] else ""
        raise PlanMismatch(
            f"{output.uri} has the results of other work: {what}{more}",
            remedy="Give the same model, --cores, options and input, or another output",
        )


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
