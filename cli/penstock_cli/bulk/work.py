"""What `penstock embed`, `classify`, `rerank` and `generate` share: options, progress, results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click
from rich.progress import BarColumn, Progress, TextColumn

from penstock.errors import PenstockError
from penstock.process import sigterm_interrupts
from penstock_cli.main import INTERRUPTED
from penstock_cli.terminal import (
    NAME_WIDTH,
    FiniteRange,
    Names,
    bytes_text,
    console,
    fact,
    facts,
    models_option,
    paced,
    refuse_options,
    store_option,
)

if TYPE_CHECKING:
    from penstock_bulk.corpus import Estimate, Totals
    from penstock_bulk.corpus import Progress as Done

WITH_DEAD_LETTERS = 3
"""Exit status of work that is complete but for dead letters."""


def text_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option for the column that the model reads."""
    return click.option("--text-column", default="", help=f"Column of texts. Default: {default}.")


def too_long_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """What becomes of texts that the model cannot read as a whole."""
    return click.option(
        "--too-long",
        type=click.Choice(["cut", "refuse"]),
        default="cut",
        show_default=True,
        help="Texts with more tokens than the model reads are cut, or become dead letters.",
    )(function)


def work_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments and options of all four commands."""
    for option in reversed(
        (
            click.argument("source", metavar="IN"),
            click.argument("output", metavar="OUT"),
            click.option(
                "--model",
                "reference",
                required=True,
                help="Folder of an artefact, ModelEndpoint file, or model: hf://..., file:///..., pkg://..., s3://...",
            ),
            click.option(
                "--keep", type=Names("column", "id,title"), help="Columns of IN that OUT has as well. Default: all."
            ),
            click.option(
                "--id-column", default="", help="Column that dead letters state. Default: id, if there is one."
            ),
            click.option("--column", default="", help="Name of the column with the result."),
            click.option(
                "--to",
                "form",
                type=click.Choice(["parquet", "arrow", "jsonl"]),
                default="parquet",
                show_default=True,
                help="Form of the files in OUT.",
            ),
            click.option("--shard-rows", type=click.IntRange(min=1), help="Rows of a file in OUT."),
            click.option(
                "--plan",
                type=click.Choice(["optimized", "fp32"]),
                default="optimized",
                show_default=True,
                help="fp32 needs no optimisation, which takes minutes the first time.",
            ),
            click.option("--cores", type=click.IntRange(min=1), help="Physical cores. Default: all."),
            store_option,
            models_option,
            click.option("--dry-run", is_flag=True, help="Show rows, tokens, time and cost, and write nothing."),
            click.option("--price-per-hour", type=FiniteRange(0), help="Of this machine, for --dry-run."),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead."),
        )
    ):
        function = option(function)
    return function


def work(task: str, inputs: Sequence[str], parameters: dict[str, Any], options: dict[str, Any]) -> None:
    """Do the work of a command. `inputs`: names of columns, empty for the default."""
    if not options["dry_run"]:
        refuse_options(["price_per_hour"], "--dry-run")
    import penstock
    from penstock_bulk.calculation import TASKS
    from penstock_bulk.corpus import BulkWork
    from penstock_bulk.plans import Options, make_plan, require_apart, require_same, stored_plan
    from penstock_bulk.storage import open_folder

    if options.pop("too_long", "cut") == "refuse":
        parameters["truncate"] = False
    output = open_folder(options["output"])
    require_apart(options["source"], output)
    asked = Options(
        task=task, inputs=tuple(inputs), keep=options["keep"], id_column=options["id_column"],
        column=options["column"], form=options["form"], dtype=options.get("dtype", "float32"),
        shard_rows=options["shard_rows"] or 0, top=options.get("top"), parameters=parameters,
    )  # fmt: skip
    quiet = options["as_json"]
    say = partial(click.echo, err=True) if quiet else partial(fact, "model")
    with interruptible(quiet=quiet):
        before = stored_plan(output)
        model = penstock.load(
            options["reference"], task=TASKS[task].model.value, plan=options["plan"], threads=options["cores"],
            store=options["store"], models=options["models"], on_progress=say,
        )  # fmt: skip
        with model:
            plan = make_plan(options["source"], model, asked, on_scan=_scanning(quiet=quiet), before=before)
            if before is not None:
                require_same(before, plan, output)
            job = BulkWork(before or plan, output, model)
            if not quiet:
                show_plan(before or plan, output.uri, model.findings)
            if options["dry_run"]:
                show_estimate(job.estimate(), options["price_per_hour"], as_json=quiet)
                return
            with WorkView(quiet=quiet) as view:
                totals = job.run(view)
    show_totals(totals, output.uri, as_json=quiet)


def _scanning(*, quiet: bool) -> Callable[[int, int], None]:
    say: Callable[[str], None] | None = None

    def show(done: int, of: int) -> None:
        nonlocal say
        say = say or paced((lambda _: None) if quiet else partial(fact, "input"))
        say(f"{bytes_text(done)} of {bytes_text(of)} are counted")

    return show


@contextmanager
def interruptible(*, quiet: bool) -> Iterator[None]:
    """On Ctrl-C or SIGTERM: a line that it can go on, and the exit status for that."""
    try:
        with sigterm_interrupts():
            yield
    except KeyboardInterrupt:
        if not quiet:
            fact("ended", "interrupted: the same command goes on from there")
        raise click.exceptions.Exit(INTERRUPTED) from None


class WorkView:
    """Shows how far the work is: a bar in a terminal, else a line from time to time."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._say = paced(partial(fact, "rows"))
        self._bar = Progress(
            TextColumn(f"[dim]{'rows':<{NAME_WIDTH - 1}}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        if console.is_terminal and not self._quiet:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Otherwise it was not started, and stopping it would print an empty line.
        if console.is_terminal and not self._quiet:
            self._bar.stop()

    def __call__(self, done: Done) -> None:
        """Show one state."""
        if self._quiet:
            return
        text = progress_text(done)
        if console.is_terminal:
            self._bar.update(self._task, completed=done.rows, total=done.of, description=text)
        else:
            self._say(text)


def progress_text(done: Done) -> str:
    """Rows, rates, the time that is left, dead letters. Pure."""
    parts = [f"{done.rows:,}/{done.of:,}"]
    if done.computed and done.seconds > 0 and done.left_seconds is not None:
        parts += [
            f"{done.computed / done.seconds:,.3g} rows/s",
            f"{done.tokens / done.seconds:,.0f} tokens/s",
            f"{duration(done.left_seconds)} left",
        ]
    return "  ".join([*parts, *([f"{done.dead:,} dead letters"] if done.dead else [])])


def counted(count: int, noun: str) -> str:
    """Such as `1 row` and `2,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Such as `2:05:10`."""
    return str(timedelta(seconds=round(seconds)))


def show_plan(plan: Any, output: str, findings: Sequence[str]) -> None:
    """What will be done."""
    facts(
        [
            (
                "input",
                f"{counted(plan.rows, 'row')} in {counted(len(plan.files), 'file')}, column {', '.join(plan.columns)}",
            ),
            ("output", f"{output}  {counted(len(plan.shards), 'part')}, {plan.options['form']}"),
            *([("space", plan.identity["space"])] if plan.identity["space"] else []),
            *(("note", one) for one in findings),
        ]
    )


def show_estimate(found: Estimate, price: float | None, *, as_json: bool) -> None:
    """The lines of --dry-run."""
    cost = None if price is None else price * found.seconds / 3600
    if as_json:
        click.echo(json.dumps({**asdict(found), "cost": cost}, indent=2))
        return
    facts(
        [
            ("rows", f"{found.rows:,} in {counted(found.shards, 'part')}, about {bytes_text(found.output_bytes)}"),
            ("tokens", f"about {found.tokens:,}"),
            ("time", f"about {duration(found.seconds)}, at {found.rows_per_second:,.3g} rows/s on this machine"),
            (
                "cost",
                f"about {cost:,.2f} at {price:g} an hour"
                if cost is not None
                else "give --price-per-hour, or compare hardware with penstock plan --rows",
            ),
            *([("dead", f"{found.dead:.1%} of the rows that were tried have no result")] if found.dead else []),
            ("note", f"measured on {found.sampled:,} rows; nothing was written"),
        ]
    )


def show_totals(totals: Totals, output: str, *, as_json: bool) -> None:
    """The lines at the end. The exit status tells dead letters from a complete output."""
    if as_json:
        click.echo(json.dumps(asdict(totals), indent=2))
    else:
        facts(totals_rows(totals, output))
    if totals.dead:
        raise click.exceptions.Exit(WITH_DEAD_LETTERS)


def totals_rows(totals: Totals, output: str) -> list[tuple[str, str]]:
    """Name and value of each line."""
    lines = [
        ("output", output),
        ("parts", f"{totals.shards:,} of {totals.of:,}"),
        ("rows", f"{totals.rows:,} of {totals.planned:,}, {totals.tokens:,} tokens"),
    ]
    if totals.dead:
        lines.append(("dead", f"{totals.dead:,} rows have no result: {output}/_dead states why. penstock bulk retry"))
    return [*lines, ("state", "complete" if totals.complete else "not complete: the same command goes on from there")]


def require_model(plan: Any, say: Callable[[str], None]) -> Any:
    """The model of a plan. PenstockError if it has another identity than the one that has written the output."""
    import penstock

    model = penstock.load(**plan.model, on_progress=say)
    now = asdict(model.identity)
    different = [name for name in ("artefact", "space", "which", "isa") if now[name] != plan.identity[name]]
    if different:
        name = different[0]
        raise PenstockError(
            f"the model at {plan.model['reference']} is another one now: {name} is {plan.identity[name]} in the "
            f"output, and {now[name]} here",
            remedy="Run it where the output was made, with the same --store",
        )
    return model
