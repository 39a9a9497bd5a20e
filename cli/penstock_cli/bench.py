"""`penstock bench`: measures throughput and latency of an endpoint by cores, sequence length and batch size."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from penstock.errors import SpecError
from penstock_bench.cell import MeasurementFailed
from penstock_bench.grid import BenchOptions
from penstock_bench.random_models.families import CONFIGURATIONS, family_endpoint
from penstock_bench.run import BenchProgress, run_bench
from penstock_cli.cluster.forward import forwarded
from penstock_cli.cluster.kubectl import ClusterReader
from penstock_cli.main import INTERRUPTED
from penstock_cli.terminal import FiniteRange, PositiveIntegers, console, fact, models_option, refuse_options

FIELDS = BenchOptions.model_fields
OF_A_CLUSTER = "modelendpoint/"
OF_A_FILE = ("cores", "baseline", "store", "models")
OF_A_SERVER = ("tokenizer", "task", "info_url", "auth_token")
OF_THE_CLUSTER = ("namespace", "context")
"""Options by the kind of target that they work with."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SERVICE_PORT, INTERNAL_PORT = 80, 8081
"""Of an endpoint's Service, and of its pods for /info."""


def _help(name: str) -> str:
    field = FIELDS[name]
    default = field.default
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{field.description}" + (f"  [default: {shown}]" if shown not in {None, False, ""} else "")


def _show(progress: BenchProgress) -> None:
    left = ""
    if progress.remaining_seconds is not None and progress.done < progress.total:
        left = f"  (measuring the rest takes about {max(round(progress.remaining_seconds / 60), 1)} min)"
    name = "note" if progress.is_note else f"{progress.done}/{progress.total}" if progress.total else "model"
    fact(name, progress.message + left)


@click.command
@click.argument("target", metavar="FILE|URL|modelendpoint/NAME", required=False)
@click.option(
    "--family",
    type=click.Choice(list(CONFIGURATIONS)),
    help="Instead of a target: a base model of this family with random weights, written to the models folder.",
)
@click.option("--cores", type=PositiveIntegers(), default=FIELDS["cores"].default, help=_help("cores"))
@click.option("--lengths", type=PositiveIntegers(), default=FIELDS["lengths"].default, help=_help("lengths"))
@click.option("--batches", type=PositiveIntegers(), default=FIELDS["batches"].default, help=_help("batches"))
@click.option("--seconds", type=FiniteRange(min=0.1), default=FIELDS["seconds"].default, help=_help("seconds"))
@click.option("--rounds", type=click.IntRange(1, 50), default=FIELDS["rounds"].default, help=_help("rounds"))
@click.option(
    "--patience-seconds",
    type=FiniteRange(min=1),
    default=FIELDS["patience_seconds"].default,
    help=_help("patience_seconds"),
)
@click.option("--baseline", is_flag=True, help=_help("baseline"))
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), help=_help("tokenizer"))
@click.option("--task", help=_help("task"))
@click.option("--info-url", metavar="URL", default=FIELDS["info_url"].default, help=_help("info_url"))
@click.option(
    "--auth-token",
    envvar="PENSTOCK_AUTH_TOKEN",
    show_envvar=True,
    default=FIELDS["auth_token"].default,
    help=_help("auth_token"),
)
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), default=FIELDS["output"].default, help=_help("output")
)
@click.option("--store", type=click.Path(file_okay=False, path_type=Path), envvar="PENSTOCK_STORE", help=_help("store"))
@models_option
@click.option("--fresh", is_flag=True, help=_help("fresh"))
@click.option("--seed", type=int, default=FIELDS["seed"].default, help=_help("seed"))
@click.option("--namespace", "-n", default="", help="Of modelendpoint/NAME. Default: that of the current context.")
@click.option("--context", default="", help="Of modelendpoint/NAME. Default: the current context of the kubeconfig.")
def command(namespace: str, context: str, family: str | None, **options: Any) -> None:
    """Measure an endpoint: throughput and latency for cores x lengths x batches.

    FILE is a ModelEndpoint, which is optimised and served for each number of cores; URL is a running server;
    modelendpoint/NAME is an endpoint of a cluster, reached by kubectl port-forward, which limits its throughput.
    Settings that this machine cannot run are listed. Writes results.csv, results.json and report.html. An interrupted
    run is resumed by the same command.
    """
    output = options["output"]
    if (family is None) == (options["target"] is None):
        raise click.UsageError("Give either FILE, URL or modelendpoint/NAME, or --family.")
    target = options["target"] or ""
    if not target.startswith(OF_A_CLUSTER):
        refuse_options(OF_THE_CLUSTER, f"{OF_A_CLUSTER}NAME")
    if target.startswith(OF_A_CLUSTER) or "://" in target:
        refuse_options(OF_A_FILE, "a FILE or --family, whose servers this command starts")
    else:
        refuse_options(OF_A_SERVER, f"a URL or {OF_A_CLUSTER}NAME")
    if family is not None:
        options["target"] = str(family_endpoint(family, options["models"]))
    try:
        with ExitStack() as stack:
            if _NAME.fullmatch(options["target"]) and not Path(options["target"]).exists():
                raise SpecError(
                    f"there is no file {options['target']}",
                    remedy=f"Give {OF_A_CLUSTER}{options['target']} for an endpoint of a cluster, or a file's path",
                )
            if options["target"].startswith(OF_A_CLUSTER):
                kubectl = ClusterReader(namespace, context)
                name = options["target"].removeprefix(OF_A_CLUSTER)
                if (kubectl.require_endpoint(name).get("spec") or {}).get("tls"):
                    raise SpecError(
                        f"{name} serves HTTPS, and requests of the bench are plain HTTP",
                        field="spec.tls",
                        remedy="Measure an endpoint with the same spec without tls",
                    )
                options["target"] = stack.enter_context(forwarded(kubectl, f"service/{name}", SERVICE_PORT))
                if not options["info_url"]:
                    pod = f"deployment/{name}"
                    options["info_url"] = stack.enter_context(forwarded(kubectl, pod, INTERNAL_PORT))
            results = run_bench(BenchOptions(**options), _show)
    except KeyboardInterrupt:
        fact("ended", f"what was measured is in {output}: the same command goes on from there")
        raise click.exceptions.Exit(INTERRUPTED) from None
    for note in results.notes:
        fact("note", note)
    console.print(f"report     {output / 'report.html'}")
    if not results.answered:
        raise MeasurementFailed(
            f"no request to {results.target} was answered in any setting",
            remedy="The report and the lines above show the answers",
        )
