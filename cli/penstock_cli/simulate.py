"""`penstock simulate`: compares autoscaling policies on recorded or built-in load traces."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.capacity import CapacityCurve, TokenCurve
from penstock.errors import SettingError
from penstock_cli.terminal import NAME_WIDTH, PLAIN_SECONDS, FiniteRange, console, fact, read_artefact, refuse_options
from penstock_runtime.host.disk import prepare_folder, translate_write_errors
from penstock_simulator.choices import BUILT_IN_TRACES, Dispatch, PolicyKind

if TYPE_CHECKING:
    from penstock_simulator.compare import Experiment, PolicyVerdict, TraceResult
    from penstock_simulator.fleet import ReplicaModel

NO_ARTEFACT = "Give the folder of an artefact that penstock optimize has made, or none for an example endpoint"
MANY_REQUESTS = 20e6
"""Simulated requests from which on a run takes minutes."""
OUTPUT = "the folder"
"""Name of the output folder in errors."""


@click.command
@click.argument("artefact", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--trace",
    "traces",
    multiple=True,
    metavar="NAME|CSV",
    help=f"A built-in trace ({', '.join(BUILT_IN_TRACES)}) or a CSV file with seconds,requests_per_second; "
    "may be repeated.  [default: all built-in ones]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice([kind.value for kind in PolicyKind]),
    help="An autoscaling policy; may be repeated.  [default: all]",
)
@click.option(
    "--p95-milliseconds",
    type=FiniteRange(min=0, min_open=True),
    help="The objective, instead of the artefact's; of text generation that of the time to the first token.",
)
@click.option(
    "--headroom",
    type=FiniteRange(0, 1, min_open=True),
    default=0.75,
    show_default=True,
    help="Headroom of Penstock's policy.",
)
@click.option("--min-replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Never fewer.")
@click.option("--max-replicas", type=click.IntRange(min=1), default=24, show_default=True, help="Never more.")
@click.option(
    "--start-up-seconds",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="From the request for a replica until it takes traffic.",
)
@click.option(
    "--scrape-interval",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Seconds between Prometheus' scrapes.",
)
@click.option(
    "--dispatch",
    type=click.Choice([dispatch.value for dispatch in Dispatch]),
    default=Dispatch.LEAST_OUTSTANDING.value,
    show_default=True,
    help="What chooses the replica for a request: a gateway by outstanding requests, kube-proxy at random, or a "
    "gateway that keeps the queue.",
)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each, averaged.")
@click.option("--price", type=FiniteRange(min=0), help="Price of a replica for an hour, for the cost column.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=lambda: len(os.sched_getaffinity(0)),
    show_default="one a CPU",
    help="Processes that simulate.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("simulation"),
    show_default=True,
    help="Folder for figures.csv and report.html.",
)
def command(artefact: Path | None, **options: Any) -> None:
    """Replay load against autoscalers: late requests, replica-hours, flips, cost.

    ARTEFACT is a folder that penstock optimize has made: its capacity curve becomes the simulated replica. Without it,
    an example endpoint is used. Penstock's policy is compared with HPA on p95, HPA on requests in flight, KEDA on the
    request rate and Knative's KPA, each over a range of its knob, at equal replica-hours.
    """
    from penstock_simulator.compare import compare
    from penstock_simulator.report import figures_csv, flips_text, headline, overall, page

    ours = (PolicyKind.PENSTOCK, PolicyKind.PENSTOCK_PROMETHEUS)
    if options["policies"] and not set(ours) & set(options["policies"]):
        refuse_options(["headroom"], f"--policy {' or '.join(ours)}")
    experiment = _experiment(artefact, options)
    output: Path = options["output"]
    prepare_folder(output, what=OUTPUT, option="--output")
    service = experiment.service
    fact("replica", _replica(experiment))
    fact("policies", ", ".join(kind.value for kind in experiment.policies))
    fact("work", _work(experiment))
    results: list[TraceResult] = []
    with Progress(
        TextColumn(f"[dim]{'simulate':<{NAME_WIDTH - 1}}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[message]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("simulate", total=None, message="")
        printed = time.monotonic()

        def on_progress(done: int, total: int, what: str) -> None:
            nonlocal printed
            bar.update(task, completed=done, total=total, message=what)
            if not console.is_terminal and time.monotonic() - printed > PLAIN_SECONDS:
                printed = time.monotonic()
                fact("simulate", f"{done}/{total}  {what}")

        for result in compare(experiment, workers=options["workers"], on_progress=on_progress):
            results.append(result)
            fact(result.trace.name, f"{result.trace.description}; {result.trace.changes_text}")
            bar.console.print(_table(experiment, result, options["price"]))
    fact("outcome", headline(results))
    if flips := flips_text(experiment, results):
        fact("flips", flips)
    for line in overall(experiment, results):
        fact("all traces", line)
    with translate_write_errors(output, what=OUTPUT, option="--output"):
        (output / "figures.csv").write_text(figures_csv(results, options["price"]), encoding="utf-8")
        (output / "report.html").write_text(page(experiment, results, options["price"]), encoding="utf-8")
    fact("report", str(output / "report.html"))
    if not service.within_objective:
        fact("note", "not even a nearly idle replica keeps the objective: every request may be late")


def _experiment(artefact: Path | None, options: dict[str, Any]) -> Experiment:
    from penstock_operator.decide import Service
    from penstock_simulator.compare import Experiment, pooled
    from penstock_simulator.fleet import MODEL, FleetSettings, reference_curve
    from penstock_simulator.policies import Limits
    from penstock_simulator.traces import from_csv

    if options["min_replicas"] > options["max_replicas"]:
        raise SettingError(
            f"--min-replicas {options['min_replicas']} is over --max-replicas {options['max_replicas']}",
            field="--max-replicas",
            remedy="Raise --max-replicas",
        )
    dispatch = Dispatch(options["dispatch"])
    curve: CapacityCurve = reference_curve()
    tokens = TokenCurve()
    if artefact is not None:
        manifest = read_artefact(artefact, otherwise=NO_ARTEFACT)
        curve, tokens = manifest.capacity, manifest.token_capacity
    limit = options["p95_milliseconds"]
    if tokens.points and limit is not None:
        tokens = tokens.model_copy(update={"first_token_objective_milliseconds": limit})
    is_pooled = pooled(dispatch)
    service = (
        Service.from_tokens(tokens, pooled=is_pooled)
        if tokens.points
        else Service.from_curve(curve, p95_objective_milliseconds=limit, pooled=is_pooled)
    )
    if service is None:
        raise SettingError(
            f"{artefact} has no capacity curve, or one that the replica never kept up with",
            field="ARTEFACT",
            remedy="Optimise again with more time (--budget), or leave the artefact out",
        )
    return Experiment(
        service=service,
        model=_model(curve, tokens) if artefact is not None else MODEL,
        traces=tuple(
            name if name in BUILT_IN_TRACES else from_csv(Path(name)) for name in options["traces"] or BUILT_IN_TRACES
        ),
        policies=tuple(map(PolicyKind, options["policies"])) or tuple(PolicyKind),
        limits=Limits(options["min_replicas"], options["max_replicas"]),
        fleet=FleetSettings(dispatch=dispatch, start_up_seconds=float(options["start_up_seconds"])),
        scrape_interval=options["scrape_interval"],
        headroom=options["headroom"],
        seeds=tuple(range(1, options["seeds"] + 1)),
    )


def _model(curve: CapacityCurve, tokens: TokenCurve) -> ReplicaModel:
    from penstock_simulator.fleet import ReplicaModel

    return ReplicaModel.from_tokens(tokens) if tokens.points else ReplicaModel.from_curve(curve)


def _work(experiment: Experiment) -> str:
    requests = experiment.requests
    work = (
        f"{experiment.runs} runs, {requests / 1e6:,.0f} million requests"
        if requests >= 1e6
        else f"{experiment.runs} runs"
    )
    return f"{work}; --trace, --policy and --seeds make it less" if requests >= MANY_REQUESTS else work


def _replica(experiment: Experiment) -> str:
    service, model = experiment.service, experiment.model
    servers = f"{model.servers} server{'' if model.servers == 1 else 's'}"
    first = "" if model.first_token_seconds is None else " of the first token"
    return (
        f"{service.rate:.3g} requests/s within p95{first} {service.p95_objective_milliseconds:g} ms, saturates at "
        f"{model.saturation:.3g}; as a queue: {servers} of {model.mean_service_seconds * 1000:.3g} ms"
    )


def _table(experiment: Experiment, result: TraceResult, price: float | None) -> Table:
    """One row for each policy, at about the replica-hours of Penstock's."""
    from penstock_simulator.policies import POLICIES as ALL
    from penstock_simulator.report import equal_hours, flips_of, shown

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  policy", no_wrap=True)
    heads = ["knob", "late", "replica-hours", "flips (most)", "replicas", "late at equal hours", "over the range"]
    for head in [*heads, "cost"] if price is not None else heads:
        table.add_column(head, justify="right", no_wrap=True)
    for point in shown(experiment, result):
        verdict = next((verdict for verdict in result.verdicts if verdict.rival is point.kind), None)
        at = "" if verdict is None else equal_hours(verdict, point.requests)
        at += "" if verdict is None or verdict.fewer else " (as many)" if verdict.even else " (fewer)"
        row = [
            f"  {ALL[point.kind].title}", f"{point.knob:g}", f"{point.late_share:.2%}", f"{point.replica_hours:.2f}",
            flips_of(point), str(point.most_replicas), at, _over(verdict, point.requests),
        ]  # fmt: skip
        if price is not None:
            row.append(f"{point.replica_hours * price:.2f}")
        table.add_row(*row, style="bold" if ALL[point.kind].is_ours else "")
    return table


def _over(verdict: PolicyVerdict | None, requests: float) -> str:
    """The mean shares of late requests over the replica-hours that both can reach."""
    if verdict is None or verdict.over is None:
        return ""
    return f"{verdict.over.rival_late / requests:.2%}, ours {verdict.over.our_late / requests:.2%}"
