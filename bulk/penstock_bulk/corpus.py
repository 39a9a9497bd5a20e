"""Bulk work on one machine: a corpus from files to files, which goes on where a killed process stopped.

The state is the files of the output. `_plan.json` is written first and never changes; a shard is done when its part is
there. Before it come its dead letters and its state. At the end come `_manifest.json` and `_SUCCESS`.
docs/reference/bulk-output.md has the layout.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import PenstockError
from penstock_bulk.arrow import pa
from penstock_bulk.calculation import TASKS, Calculation, bytes_of, parameters_of
from penstock_bulk.model import Model
from penstock_bulk.parts import read_results, writing
from penstock_bulk.plans import PLAN, VERSION, BulkPlan, listing, require_plan
from penstock_bulk.records import Columns, Fault
from penstock_bulk.rows import Piece, ShardReader, open_input, plan_rows
from penstock_bulk.session import OnAnswer
from penstock_bulk.storage import READ_BYTES, Folder, StoredFile

MANIFEST, SUCCESS = "_manifest.json", "_SUCCESS"
STATE, DEAD = "_state", "_dead"
WINDOW_BYTES = 8 * 2**20
"""Rows that are computed and written together, by their bytes in the input: this bounds the memory."""
SAMPLED_SHARDS = 8
SAMPLED_ROWS = 512
"""For an estimate, from all of these shards together."""
READS_AT_ONCE = 16


@dataclass(frozen=True)
class Progress:
    """How far the work is."""

    rows: int
    """Done, those of an earlier process included."""
    of: int
    dead: int
    tokens: int
    """Since this process began, as `computed` and `seconds`."""
    computed: int
    seconds: float

    @property
    def left_seconds(self) -> float | None:
        """To the end, at the rate so far."""
        return (self.of - self.rows) * self.seconds / self.computed if self.computed else None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Totals:
    """The state of an output."""

    shards: int
    of: int
    rows: int
    """With a result."""
    dead: int
    tokens: int
    planned: int
    """Rows of the input."""
    complete: bool
    last_written: float
    """Seconds since 1970, of the newest part; 0: none."""


@dataclass(frozen=True)
class Estimate:
    """What `--dry-run` shows."""

    rows: int
    files: int
    shards: int
    tokens: int
    seconds: float
    rows_per_second: float
    sampled: int
    dead: float
    """Share of the sampled rows."""
    output_bytes: int


@dataclass(frozen=True)
class Verified:
    """What `bulk verify` found."""

    parts: int
    rows: int
    different: tuple[str, ...]
    """Files and rows, or parts, that differ."""


class BulkWork:
    """The work of a plan. The model is loaded when there is something to compute."""

    def __init__(self, plan: BulkPlan, output: Folder, model: Model) -> None:
        self._plan, self._output, self._model = plan, output, model
        self._calculation: Calculation | None = None
        self._source = open_input(plan.input)
        self._shards = [plan.shard(number) for number in range(len(plan.shards))]

    @property
    def calculation(self) -> Calculation:
        """The model with the plan's options."""
        if self._calculation is None:
            options = self._plan.options
            task = options["task"]
            session = self._model._open(TASKS[task].model)  # noqa: SLF001 - a class of this package
            self._calculation = Calculation(
                session, task, parameters_of(task, options["parameters"]), dtype=options["dtype"], top=options["top"]
            )
        return self._calculation

    def run(self, on_progress: OnProgress = lambda _: None) -> Totals:
        """Compute all shards that are not done, and write the manifest."""
        plan, output = self._plan, self._output
        with output.working() as folder:
            output.create(PLAN, plan.model_dump_json(indent=1).encode())
            there = {one.name for one in output.files()}
            todo = [number for number in range(len(plan.shards)) if plan.part(number) not in there]
            report = _Reporter(on_progress, plan.rows - sum(map(plan.rows_of, todo)), plan.rows)
            with closing(self._reader()) as reader:
                for number in todo:
                    self._write(folder, number, 0, _windows(reader.pieces(self._shards[number])), report)
            if todo or MANIFEST not in there or SUCCESS not in there:
                _finish(plan, output)
        return totals(output)

    def retry(self, on_progress: OnProgress = lambda _: None) -> tuple[int, Totals]:
        """Compute the dead letters again, from the input as it is now. The number of rows that have a result now."""
        plan, output, recovered = self._plan, self._output, 0
        self._follow_changes()
        with output.working() as folder:
            last = {one["shard"]: one for one in _states(plan, output)}
            dead = {number: one for number, one in last.items() if one["dead"]}
            report = _Reporter(on_progress, 0, sum(one["dead"] for one in dead.values()))
            with closing(self._reader()) as reader:
                for number, before in dead.items():
                    wanted = _dead_rows(output, number, before["attempt"], plan)
                    pieces = _selected(reader.pieces(self._shards[number]), wanted.__contains__)
                    recovered += self._write(folder, number, before["attempt"] + 1, _windows(pieces), report)
            _finish(plan, output)
        return recovered, totals(output)

    def estimate(self) -> Estimate:
        """Rows and time of all of the work, from rows of some shards. Writes nothing."""
        plan = self._plan
        rows = dead = tokens = size = 0
        seconds = 0.0
        _ = self.calculation  # its time does not count
        chosen = _evenly(len(plan.shards), SAMPLED_SHARDS)
        with closing(self._reader()) as reader:
            for number in chosen:
                some = list(_first(reader.pieces(self._shards[number]), SAMPLED_ROWS // len(chosen)))
                if not some:
                    continue
                piece = Piece.merged(some)
                begun = time.monotonic()
                table, faults, counted = self._compute(piece)
                seconds += time.monotonic() - begun
                rows, tokens = rows + len(piece.inputs), tokens + counted
                dead, size = dead + len(faults), size + table.nbytes
        rate, share = (rows / seconds, plan.rows / rows) if rows else (0.0, 0.0)
        return Estimate(
            rows=plan.rows, files=len(plan.files), shards=len(plan.shards), tokens=round(tokens * share),
            seconds=plan.rows / rate if rate else 0.0, rows_per_second=rate, sampled=rows,
            dead=dead / rows if rows else 0.0, output_bytes=round(size * share),
        )  # fmt: skip

    def verify(self, sample: int, on_progress: Callable[[int, int], None] = lambda _done, _of: None) -> Verified:
        """Compare the digests of all parts, and compute `sample` rows of some parts again."""
        plan, output = self._plan, self._output
        self._follow_changes()
        there = {one.name: one for one in output.files()}
        states = [one for one in _states(plan, output) if one["rows"]]
        different = [
            f"{one['part']}: its bytes have changed since it was written"
            for one in states
            if _sha256(output, there[one["part"]]) != one["sha256"]
        ]
        chosen = [states[at] for at in _evenly(len(states), SAMPLED_SHARDS)]
        compared = 0
        with closing(self._reader()) as reader:
            for state in chosen:
                positions = _evenly(state["rows"], -(-sample // len(chosen)))
                compared += len(positions)
                different += self._compare(reader, state, positions, there[state["part"]])
                on_progress(compared, min(sample, sum(one["rows"] for one in states)))
        return Verified(len(states), compared, tuple(different))

    def _compare(
        self, reader: ShardReader, state: Mapping[str, Any], positions: list[int], part: StoredFile
    ) -> list[str]:
        """The rows at these positions of a part whose results are not the stored ones."""
        number, attempt, plan = state["shard"], state["attempt"], self._plan
        dead = _dead_rows(self._output, number, attempt, plan)
        tried = _dead_rows(self._output, number, attempt - 1, plan) if attempt else set()
        live = _selected(
            reader.pieces(self._shards[number]), lambda one: one not in dead and (not attempt or one in tried)
        )
        wanted, picked, first = set(positions), [], 0
        for piece in live:
            inside = [at for at in range(len(piece.inputs)) if first + at in wanted]
            picked += [piece.only(inside)] if inside else []
            first += len(piece.inputs)
        name = f"{state['part']}: "
        if first != state["rows"]:
            return [f"{name}it has {state['rows']} rows, and the input {first} for it"]
        piece = Piece.merged(picked)
        column = plan.options["column"]
        try:
            stored = read_results(self._output, part, column, self.calculation.type).take(pa.array(positions))
        except (pa.ArrowException, LookupError, ValueError, OSError) as error:
            return [f"{name}it cannot be read ({error})"]
        results, faults, _ = self.calculation.results(piece.inputs)
        different = []
        for at, position in enumerate(positions):
            file, row = piece.origins[at]
            where = f"{name}row {position} (of {plan.files[file][0]}, row {row})"
            if at in faults or at in piece.faults:
                different.append(f"{where} is refused now: {faults.get(at, piece.faults.get(at))}")
            elif bytes_of(stored.slice(at, 1)) != bytes_of(self.calculation.column([results[at]])):
                different.append(f"{where} has other bits")
        return different

    def _follow_changes(self) -> None:
        """Find the rows of files that were corrected after the work. PenstockError if they have others in number."""
        plan, source = self._plan, self._source
        if listing(source) == plan.files:
            return
        columns = Columns((tuple(plan.columns),), tuple(plan.schema.names))
        shards = plan_rows(source, columns, plan.options["shard_rows"])[0]
        numbers = [[one[:3] for one in shard] for shard in shards]
        if numbers != [[one[:3] for one in shard] for shard in self._shards]:
            raise PenstockError(
                f"{plan.input} has other rows in number than when {self._output.uri} was made",
                remedy="Correct rows where they are, or write the input to another output",
            )
        self._shards = shards

    def _reader(self) -> ShardReader:
        return ShardReader(self._source, tuple(self._plan.columns), self._plan.schema)

    def _compute(
        self, piece: Piece, on_answer: OnAnswer = lambda _rows, _tokens: None
    ) -> tuple[Any, dict[int, Fault], int]:
        """The table of the rows with a result, the faults of the others, the tokens."""
        good = [at for at in range(len(piece.inputs)) if at not in piece.faults]
        results, wrong, tokens = self.calculation.results([piece.inputs[at] for at in good], on_answer)
        faults = {**piece.faults, **{good[at]: one for at, one in wrong.items()}}
        live = [at for at in range(len(good)) if at not in wrong]
        column = self.calculation.column([results[at] for at in live])
        table = piece.only([good[at] for at in live]).table
        name = self._plan.options["column"]
        return table.append_column(pa.field(name, column.type), column), faults, tokens

    def _write(self, folder: Path, number: int, attempt: int, windows: Iterator[Piece], report: _Reporter) -> int:
        """Compute rows of a shard, and write dead letters, state and part in this order. The number of rows with a
        result: if a further attempt has none, nothing is written."""
        plan, output = self._plan, self._output
        part = plan.part(number, attempt)
        fields = [*plan.schema, pa.field(plan.options["column"], self.calculation.type)]
        schema = pa.schema(fields, metadata={"penstock": orjson.dumps(plan.identity)})
        rows = tokens = 0
        letters: list[bytes] = []
        values = hashlib.sha256()
        path = folder / part
        with writing(path, plan.options["form"], schema) as write:
            for piece in windows:
                table, faults, counted = self._compute(piece, report.answered)
                write(table)
                for chunk in table.column(plan.options["column"]).chunks:
                    values.update(bytes_of(chunk))
                letters += [self._letter(piece, at, faults[at]) for at in sorted(faults)]
                rows, tokens = rows + table.num_rows, tokens + counted
                report.written(len(piece.inputs), len(faults))
        if attempt and not rows:
            path.unlink()
            return 0
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if letters:
            output.replace(_name(DEAD, number, attempt, "jsonl"), b"".join(letters))
        state = {
            "part": part, "shard": number, "attempt": attempt, "rows": rows, "dead": len(letters), "tokens": tokens,
            "sha256": digest, "values": values.hexdigest(),
        }  # fmt: skip
        output.replace(_name(STATE, number, attempt, "json"), orjson.dumps(state) + b"\n")
        output.create(part, path)
        return rows

    def _letter(self, piece: Piece, at: int, fault: Fault) -> bytes:
        file, row = piece.origins[at]
        column = self._plan.options["id_column"] or ("id" if "id" in piece.table.column_names else "")
        identifier = piece.table.column(column)[at].as_py() if column else None
        letter = {"file": self._plan.files[file][0], "row": row, "id": identifier, **fault._asdict()}
        return orjson.dumps(letter, default=str) + b"\n"


class _Reporter:
    """Sums up what was computed."""

    def __init__(self, show: OnProgress, done: int, of: int) -> None:
        self._show, self._begun = show, time.monotonic()
        self._progress = Progress(done, of, 0, 0, 0, 0.0)
        self._answered = 0
        """Rows of the window that is being computed."""

    def answered(self, rows: int, tokens: int) -> None:
        """Some rows of a window have their answers."""
        self._answered += rows
        self._add(rows, 0, tokens)

    def written(self, rows: int, dead: int) -> None:
        """All rows of a window are computed: those without a result as well."""
        rest, self._answered = rows - self._answered, 0
        self._add(rest, dead, 0)

    def _add(self, rows: int, dead: int, tokens: int) -> None:
        last = self._progress
        self._progress = Progress(
            last.rows + rows, last.of, last.dead + dead, last.tokens + tokens, last.computed + rows,
            time.monotonic() - self._begun,
        )  # fmt: skip
        self._show(self._progress)


def totals(output: Folder) -> Totals:
    """The state of an output, from its files alone."""
    plan = require_plan(output)
    files = output.files()
    states = _states(plan, output)
    last = {one["shard"]: one["dead"] for one in states}
    parts = {one["part"] for one in states}
    return Totals(
        shards=len(last), of=len(plan.shards), rows=sum(one["rows"] for one in states), dead=sum(last.values()),
        tokens=sum(one["tokens"] for one in states), planned=plan.rows,
        complete=any(one.name == SUCCESS for one in files),
        last_written=max((one.modified for one in files if one.name in parts), default=0.0),
    )  # fmt: skip


def _finish(plan: BulkPlan, output: Folder) -> None:
    """Write the manifest, then the marker. PenstockError if rows are missing."""
    states = _states(plan, output)
    rows, dead = sum(one["rows"] for one in states), sum({one["shard"]: one["dead"] for one in states}.values())
    if rows + dead != plan.rows:
        raise PenstockError(
            f"{output.uri}: {plan.rows} rows were read, and {rows} have a result and {dead} a dead letter",
            remedy="Files of the output were deleted or changed: write to another output",
        )
    manifest = {
        "version": VERSION, "plan": plan.digest, "input": plan.input, "identity": plan.identity,
        "options": plan.options, "rows": rows, "dead": dead, "tokens": sum(one["tokens"] for one in states),
        "parts": states,
    }  # fmt: skip
    output.replace(MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2) + b"\n")
    output.create(SUCCESS, b"")


def _name(folder: str, number: int, attempt: int, suffix: str) -> str:
    return f"{folder}/{number:08}{f'-retry{attempt:03}' if attempt else ''}.{suffix}"


def _states(plan: BulkPlan, output: Folder) -> list[dict[str, Any]]:
    """The states of the parts that are there, by shard and attempt."""
    there = {one.name for one in output.files()}
    names = sorted(name for name in there if name.startswith(f"{STATE}/"))
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        contents = list(pool.map(output.read, names))
    states = []
    for name, content in zip(names, contents, strict=True):
        try:
            one = orjson.loads(content or b"")
            known = plan.part(one["shard"], one["attempt"]) == one["part"]
        except (ValueError, KeyError, TypeError) as error:
            raise PenstockError(
                f"{output.uri}/{name} is damaged ({error})", remedy="Delete it and the part of the same number"
            ) from error
        if known and one["part"] in there:
            states.append(one)
    return sorted(states, key=lambda one: (one["shard"], one["attempt"]))


def _dead_rows(output: Folder, number: int, attempt: int, plan: BulkPlan) -> set[tuple[int, int]]:
    """File and row of each dead letter of an attempt."""
    content = output.read(_name(DEAD, number, attempt, "jsonl")) or b""
    numbers = {name: at for at, (name, _, _) in enumerate(plan.files)}
    letters = map(orjson.loads, content.splitlines())
    return {(numbers[one["file"]], one["row"]) for one in letters}


def _selected(pieces: Iterable[Piece], wanted: Callable[[tuple[int, int]], bool]) -> Iterator[Piece]:
    """The rows with these origins."""
    for piece in pieces:
        positions = [at for at, origin in enumerate(piece.origins) if wanted(origin)]
        if positions:
            yield piece.only(positions)


def _first(pieces: Iterable[Piece], rows: int) -> Iterator[Piece]:
    """The first rows."""
    for piece in pieces:
        yield piece.only(range(min(rows, len(piece.inputs))))
        rows -= len(piece.inputs)
        if rows <= 0:
            return


def _windows(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Consecutive rows, in sizes of WINDOW_BYTES."""
    held: list[Piece] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += piece.size
        if size >= WINDOW_BYTES:
            yield Piece.merged(held)
            held, size = [], 0
    if held:
        yield Piece.merged(held)


def _evenly(count: int, most: int) -> list[int]:
    """At most this number of positions, from the first to the last."""
    most = min(count, most)
    return [number * count // most for number in range(most)]


def _sha256(output: Folder, file: StoredFile) -> str:
    digest = hashlib.sha256()
    with output.open(file) as opened:
        while chunk := opened.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
