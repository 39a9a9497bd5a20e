"""`penstock optimize`: makes the optimised artefact of an endpoint, or finds the one made before.

`OptimizationView` shows the progress of an optimisation, and `show_result` its result, for `penstock serve` as well.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from penstock.artefact_store import DEFAULT_MODELS, DEFAULT_STORE
from penstock.errors import printable
from penstock.hardware import INF1_UNSUPPORTED, NOT_RUN, NeuronGeneration
from penstock.manifest import CandidateFacts, Manifest, Outcome
from penstock.process import sigterm_interrupts
from penstock.resources.endpoint import LONGEST_BUDGET_SECONDS, ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock.settings import hugging_face_token
from penstock_cli.entry import require_optimizer
from penstock_cli.main import INTERRUPTED
from penstock_cli.terminal import (
    NAME_WIDTH,
    PLAIN_SECONDS,
    TRANSFER_SECONDS,
    FiniteRange,
    bytes_text,
    console,
    describe_cpu,
    fact,
    models_option,
    refuse_options,
    store_option,
    verbose_option,
)
from penstock_optimizer.job.progress import ProgressEvent, Stage
from penstock_optimizer.job.progress import ProgressEvent as Event
from penstock_runtime.host import read_host

TABLE_TOKENS = (8, 32, 128, 512)
_STYLE = {Outcome.CHOSEN: "bold green", Outcome.REJECTED: "red", Outcome.FAILED: "red", Outcome.SKIPPED: "dim"}
MB = 1e6
WIDE = 100
"""From this terminal width on, the bar also shows the time limit of the search."""


class OptimizationView:
    """Shows events. A context manager, because the bar uses the bottom lines of the terminal."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn(f"[dim]{{task.description:<{NAME_WIDTH - 1}}}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[limit]}", style="dim"),
            # Takes the rest of the line; otherwise a long message would narrow the bar.
            TextColumn(
                "{task.fields[message]}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=console,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=None, message="", limit="")
        self._printed = 0.0

    def __enter__(self) -> Self:
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if console.is_terminal:  # otherwise it was not started, and stopping it would print an empty line
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event.stage is Stage.DOWNLOAD:
            self._show_download(event)
            return
        if event.stage is Stage.EXPORT and event.done == event.total:
            fact("export", event.message)
        if "budget_seconds" in event.facts:
            self._show_limit(timedelta(seconds=round(event.facts["budget_seconds"])))
        settled = event.stage is Stage.CANDIDATES and "candidate" in event.facts
        if settled and console.is_terminal:
            fact(f"{event.done}/{event.total}", event.message)
        self._bar.update(
            self._task,
            description=event.stage.value,
            completed=event.step,
            total=event.steps or None,
            message="" if settled else event.message,
        )
        now = time.monotonic()
        due = settled or event.stage is Stage.DONE or now - self._printed > PLAIN_SECONDS
        if due and not console.is_terminal:
            self._printed = now
            fact(event.stage.value, f"{event.step}/{event.steps}  {event.message}")

    def _show_download(self, event: Event) -> None:
        """Every event: `penstock_optimizer.job.progress` limits how often one comes."""
        if "note" in event.facts:
            fact("note", event.message, style="yellow")
        elif not console.is_terminal:
            fact(event.stage.value, event.message)
        done, total = round(event.done / MB), round(event.total / MB)
        self._bar.update(
            self._task, description=event.stage.value, completed=done, total=total or None, message=event.message
        )

    def refresh(self) -> None:
        """Draw the bar now; it is drawn ten times a second anyway."""
        self._bar.refresh()

    def _show_limit(self, budget: timedelta) -> None:
        fact(
            "search",
            f"takes {budget} at most (spec.optimization.budgetSeconds); interrupted, it goes on from there next time",
        )
        self._bar.update(self._task, limit=f"of at most {budget}" if console.width >= WIDE else "")


def event_from_json(value: Mapping[str, Any]) -> Event:
    """An event from its JSON line; fields that only a newer optimiser writes are ignored."""
    return Event(
        stage=Stage(value["stage"]),
        done=value["done"],
        total=value["total"],
        message=value["message"],
        facts=value.get("facts", {}),
        step=value.get("step", 0),
        steps=value.get("steps", 0),
    )


def candidates_table(candidates: Sequence[CandidateFacts], *, verbose: bool = False) -> Table:
    """One row a candidate: agreement, time by length, verdict; `verbose`: the options of its recipe too."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    measured = {point.tokens for candidate in candidates for point in candidate.latency}
    lengths = [tokens for tokens in TABLE_TOKENS if tokens in measured] or sorted(measured)[:4]
    table.add_column("recipe", overflow="fold")
    table.add_column("agrees", justify="right", no_wrap=True)
    for tokens in lengths:
        table.add_column(f"ms at {tokens}", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    if verbose:
        table.add_column("precision and options", overflow="fold")
    for candidate in sorted(candidates, key=_rank):
        times = candidate.milliseconds
        table.add_row(
            candidate.recipe.name,
            _agreement(candidate),
            *(f"{times[tokens]:.3g}" if tokens in times else "-" for tokens in lengths),
            # Not a plain string, in which rich would read markup.
            Text(printable(f"{candidate.outcome.value}: {candidate.reason}")),
            *((" ".join((candidate.recipe.precision.value, *candidate.recipe.options)),) if verbose else ()),
            style=_STYLE.get(candidate.outcome, ""),
        )
    return table


def _rank(candidate: CandidateFacts) -> tuple[int, float]:
    order = [Outcome.CHOSEN, Outcome.SLOWER, Outcome.REFERENCE, Outcome.REJECTED, Outcome.FAILED, Outcome.SKIPPED]
    middle = candidate.latency[len(candidate.latency) // 2].p50_milliseconds if candidate.latency else 0.0
    return order.index(candidate.outcome), middle


def _agreement(candidate: CandidateFacts) -> str:
    """The first metric of agreement with the fp32 reference, such as the lowest cosine."""
    metrics = candidate.verdict.metrics if candidate.verdict is not None else ()
    return next((f"{metric.value:.3f}" for metric in metrics if metric.higher_is_better), "")


def show_result(
    manifest: Manifest, *, p95_objective_milliseconds: float | None, table: bool = True, verbose: bool = False
) -> None:
    """Print the chosen plan with its evidence, in a few lines, after the `table` of all candidates.

    `verbose`: the options of the recipes too, which their short names leave out.
    """
    if table:
        console.print(candidates_table(manifest.candidates, verbose=verbose), soft_wrap=False)
    chosen = next((c for c in manifest.candidates if c.outcome is Outcome.CHOSEN), None)
    fact("plan", manifest.chosen.plan.summary, style="bold green")
    if verbose:
        for recipe in manifest.chosen.plan.recipes:
            fact("recipe", f"{recipe.name}: {recipe.full_name}")
    is_fp32 = manifest.serves_fp32
    if manifest.speed_up and not is_fp32:
        gains = ", ".join(f"{gain:.1f}x at {tokens}" for tokens, gain in sorted(manifest.speed_up.items()))
        of_answers = manifest.typical_speed_up if chosen is not None and chosen.generation is not None else None
        gains = f"{gains} tokens" if of_answers is None else f"{of_answers:.1f}x for answers; prompts: {gains} tokens"
        fact("speed-up", f"over fp32 on the same cores: {gains}")
    if chosen is not None and chosen.verdict is not None and not is_fp32:
        fact("accuracy", f"against fp32, on texts that it was not calibrated with: {chosen.verdict.reason}")
    if p95_objective_milliseconds is not None:
        rate = manifest.capacity.rate_within(p95_objective_milliseconds)
        if rate is not None:
            fact(
                "capacity",
                f"p95 stays under {p95_objective_milliseconds:g} ms up to {rate:.0f} requests/s ({manifest.workload})",
            )
    if manifest.token_capacity.points:
        fact("capacity", f"{manifest.token_capacity.summary} ({manifest.workload})")
    if manifest.serving_rss_bytes:
        fact("memory", f"{bytes_text(manifest.serving_rss_bytes)} resident while serving")
    for finding in manifest.findings:
        fact("note", finding)


NO_NEURON = "none"
"""Value of --neuron-target for CPUs."""


@click.command
@click.argument("file", type=click.Path(path_type=Path))
@store_option
@models_option
@click.option("--cores", type=click.IntRange(min=1), help="Physical cores, instead of the file's.")
@click.option(
    "--budget",
    "budget_seconds",
    type=FiniteRange(1, LONGEST_BUDGET_SECONDS),
    help="Seconds that it may take, instead of the file's.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print progress as JSON lines; ends when its input does, if that is a pipe."
)
@click.option(
    "--neuron-target",
    type=click.Choice([NO_NEURON, *(generation.value for generation in NeuronGeneration)]),
    envvar="PENSTOCK_NEURON_TARGET",
    show_envvar=True,
    help="Compile for this generation of AWS Inferentia instead of optimising for this machine's CPUs. Default: the "
    "file's hardwareClass if that is inf1 or inf2, else none. Not yet run on a device.",
)
@click.option(
    "--neuron-python",
    type=click.Path(path_type=Path),
    default=Path(sys.executable),
    envvar="PENSTOCK_NEURON_PYTHON",
    show_envvar=True,
    help="Interpreter with torch, transformers and the Neuron SDK; default: the one that runs this command.",
)
@verbose_option
def command(
    file: Path,
    store: Path,
    models: Path,
    cores: int | None,
    *,
    budget_seconds: float | None,
    neuron_target: str | None,
    neuron_python: Path,
    as_json: bool,
    verbose: bool,
) -> None:
    """Optimise the model of a ModelEndpoint FILE for this machine.

    Tries recipes (engine and precision), rejects those whose answers differ from fp32 by more than the accuracy budget,
    measures the rest, and writes the artefact: model, manifest.json, report.html. The same command resumes an
    interrupted run.
    """
    if as_json:
        refuse_options(["verbose"], "the table that is printed without --json")
    require_optimizer()
    # Imported here, because `penstock optimize --help` needs none of it.
    from penstock_optimizer.job.progress import DownloadReporter
    from penstock_optimizer.neuron.session import NeuronToolchain
    from penstock_optimizer.optimise import optimise

    endpoint = from_file(ModelEndpoint, file)
    models = models.expanduser()
    token = hugging_face_token(os.environ)
    target = target_of(neuron_target, endpoint)
    if target is None:
        refuse_options(["neuron_python"], "inf1 and inf2, as --neuron-target or hardwareClass")
    neuron = None if target is None else NeuronToolchain.read(target, neuron_python)
    if as_json:
        _end_with_input()
        optimise(
            endpoint, store=store, models=models, cores=cores, budget_seconds=budget_seconds, token=token,
            neuron=neuron, on_progress=_print_json,
            on_transfer=DownloadReporter(_print_json, every_seconds=TRANSFER_SECONDS),
        )  # fmt: skip
        return
    fact("cpu", describe_cpu(read_host()))
    fact("model", f"{endpoint.spec.model}  {endpoint.spec.task.value}")
    if neuron is not None:
        unsupported = f"; {INF1_UNSUPPORTED}" if target is NeuronGeneration.INF1 else ""
        packages = ", ".join(f"{name} {version}" for name, version in neuron.packages.items() if "neuron" in name)
        fact("compiles", f"for {neuron.target.value} with {packages}: {NOT_RUN}{unsupported}")
    try:
        with sigterm_interrupts(), OptimizationView() as view:
            artefact = optimise(
                endpoint, store=store, models=models, cores=cores, budget_seconds=budget_seconds, token=token,
                neuron=neuron, on_progress=view, on_transfer=DownloadReporter(view, every_seconds=TRANSFER_SECONDS),
            )  # fmt: skip
    except KeyboardInterrupt:
        fact("ended", "interrupted: the same command goes on from there")
        raise click.exceptions.Exit(INTERRUPTED) from None
    latency = endpoint.spec.objective.latency
    show_result(
        Manifest.load(artefact),
        p95_objective_milliseconds=latency.p95_milliseconds if latency else None,
        verbose=verbose,
    )
    fact("report", str(artefact / "report.html"))
    # Printed without line breaks, to be copied.
    if neuron is None:
        command_line = _serve_command(file, store=store, models=models, cores=cores)
    else:
        command_line = f"penstock serve {shlex.quote(str(artefact))}  (on an instance with Inferentia)"
    console.print(f"serve it   {command_line}")


def target_of(asked: str | None, endpoint: ModelEndpoint) -> NeuronGeneration | None:
    """The device to compile for: the option, else the endpoint's class if it is a shipped one of Inferentia."""
    name = asked or endpoint.spec.hardware_class
    return NeuronGeneration(name) if name in set(NeuronGeneration) else None


def _serve_command(file: Path, *, store: Path, models: Path, cores: int | None) -> str:
    """The command that finds this artefact again, with every option that is not a default."""
    words = ["penstock", "serve", str(file)]
    if store != DEFAULT_STORE:
        words += ["--store", str(store)]
    if models != DEFAULT_MODELS.expanduser():
        words += ["--models", str(models)]
    if cores is not None:
        words += ["--cores", str(cores)]
    return shlex.join(words)


def _print_json(progress: ProgressEvent) -> None:
    sys.stdout.write(progress.to_json_line() + "\n")
    sys.stdout.flush()


def _end_with_input() -> None:
    """Exit when standard input ends, if it is a pipe or a socket: the process that started this one is gone.

    Not for a file or /dev/null (cron, systemd, CI), which end at once.
    """
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # closed
        return
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(OSError):
            os.write(2, b"ended: standard input is a pipe and was closed, so the result is not needed\n")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
