"""`penstock optimize`: make the artefact, or find it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import stat
import sys
import threading
from pathlib import Path

import click

from penstock.manifest import Manifest
from penstock.process import sigterm_interrupts
from penstock.resources.endpoint import LONGEST_BUDGET_SECONDS, ModelEndpoint
from penstock_cli.finite import FiniteRange
from penstock_cli.folders import DEFAULT_MODELS, DEFAULT_STORE, models_option, store_option
from penstock_cli.host import describe_cpu
from penstock_cli.packages import require_optimizer
from penstock_cli.progress import OptimizationView, show_result
from penstock_cli.screen import INTERRUPTED, TRANSFER_SECONDS, console, fact
from penstock_optimizer.job.progress import ProgressEvent
from penstock_runtime.host import read_host


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
def command(
    file: Path, store: Path, models: Path, cores: int | None, budget_seconds: float | None, *, as_json: bool
) -> None:
    """Optimise the model of a ModelEndpoint FILE for this machine.

    Tries recipes (engine and precision), rejects those whose answers differ from fp32 by more than the accuracy budget,
    measures the rest, and writes the artefact: model, manifest.json, report.html. Interrupted, it goes on where it was.
    """
    require_optimizer()
    # Not with the module: `penstock --help` and the documents read this command, and need none of it.
    from penstock_optimizer.job.optimise import optimise
    from penstock_optimizer.job.progress import DownloadReporter

    endpoint = ModelEndpoint.from_file(file)
    models = models.expanduser()
    token = os.environ.get("HF_TOKEN")
    if as_json:
        _end_with_input()
        optimise(
            endpoint, store=store, models=models, cores=cores, budget_seconds=budget_seconds, token=token,
            on_progress=_print_json, on_transfer=DownloadReporter(_print_json, every_seconds=TRANSFER_SECONDS),
        )  # fmt: skip
        return
    fact("cpu", describe_cpu(read_host()))
    fact("model", f"{endpoint.spec.model}  {endpoint.spec.task.value}")
    try:
        with sigterm_interrupts(), OptimizationView() as view:
            artefact = optimise(
                endpoint, store=store, models=models, cores=cores, budget_seconds=budget_seconds, token=token,
                on_progress=view, on_transfer=DownloadReporter(view, every_seconds=TRANSFER_SECONDS),
            )  # fmt: skip
    except KeyboardInterrupt:
        fact("ended", "interrupted: the same command goes on from there")
        raise click.exceptions.Exit(INTERRUPTED) from None
    latency = endpoint.spec.objective.latency
    show_result(Manifest.load(artefact), p95_objective_milliseconds=latency.p95_milliseconds if latency else None)
    fact("report", str(artefact / "report.html"))
    # No fact: that would be broken between words, and is to be copied.
    console.print(f"serve it   {_serve_command(file, store=store, models=models, cores=cores)}", markup=False)


def _serve_command(file: Path, *, store: Path, models: Path, cores: int | None) -> str:
    """What finds the artefact that was made with these: what is no default has to be said again."""
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
    """End when standard input does, if somebody holds the other end: they are gone, and nobody wants the result.

    A file or /dev/null (cron, systemd, CI) has nobody at its end, and ends at once.
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
            os.write(2, b"ended: standard input is a pipe that has ended, so nobody waits for the result\n")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
