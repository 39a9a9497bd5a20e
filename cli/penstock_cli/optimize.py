"""`penstock optimize`: makes the optimised artefact of an endpoint, or finds the one made before."""

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

from penstock.artefact_store import DEFAULT_MODELS, DEFAULT_STORE
from penstock.hardware import INF1_UNSUPPORTED, NOT_RUN, NeuronGeneration
from penstock.manifest import Manifest
from penstock.process import sigterm_interrupts
from penstock.resources.endpoint import LONGEST_BUDGET_SECONDS, ModelEndpoint
from penstock.settings import hugging_face_token
from penstock_cli.host import describe_cpu
from penstock_cli.options import FiniteRange, models_option, refuse_options, store_option, verbose_option
from penstock_cli.packages import require_optimizer
from penstock_cli.process import INTERRUPTED
from penstock_cli.progress import OptimizationView, show_result
from penstock_cli.screen import TRANSFER_SECONDS, console, fact
from penstock_optimizer.job.progress import ProgressEvent
from penstock_runtime.host import read_host

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

    endpoint = ModelEndpoint.from_file(file)
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
