"""Several models on one set of cores: p95 of each at its planned rate, and while one of them gets more.

    python -m benchmarks.shared_cores FILE FILE... --flood NAME [--factor 3] [--load 0.5] [--tokens 32] [--seconds 10]
        [--rounds 3] [--cores 2] [--priority NAME=NUMBER]

The files are of ModelEndpoints, as `penstock serve` takes them. A model that was not optimised for these cores
(`penstock optimize FILE --store ~/.cache/penstock/benchmarks/artefacts`) is served as fp32, without a curve. The rate
of a model is its share of --load, of what it answers alone with eight clients. Then all models get their rates, in turn
without and with --factor times the rate for the flooded one; latency counts from the time at which a request was due.
The clients share the machine with the server. Aim: each model that is not flooded within its objective, and none of its
requests refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from tokenizers import Tokenizer

from benchmarks.ours import store
from benchmarks.program import Program
from penstock.process import python_module
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_file
from penstock.tasks import TaskName
from penstock_bench.cell import CellResult, CellSpec, Client
from penstock_bench.server import READY_SECONDS, MeasuredServer, free_port
from penstock_bench.subject import batch_bodies
from penstock_cli.terminal import FiniteRange
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.generator import LatencySummary
from penstock_optimizer.optimise import prepare
from penstock_runtime.host import read_host

CLIENTS = 8
CONTINUATION = 16
"""Tokens of a generated text."""


@dataclass(frozen=True)
class Member:
    """One of the models."""

    name: str
    spec: CellSpec
    objective_milliseconds: float | None

    def line(self, results: Sequence[CellResult]) -> str:
        """p95 and refusals of some rounds."""
        latencies = [value / 1e3 for one in results for value in one.latencies_milliseconds]
        summary = LatencySummary.of(latencies)
        failed = sum((Counter(one.failures) for one in results), Counter[str]())
        refused = ", ".join(f"{count} x {status}" for status, count in sorted(failed.items())) or "none refused"
        p95 = "" if summary is None else f"p95 {summary.p95:7.2f} ms, "
        return f"{len(latencies):6} answers, {p95}{refused}"


@click.command(cls=Program, help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--flood", "flooded", required=True, help="The model that gets more.")
@click.option("--factor", default=3.0, show_default=True, type=FiniteRange(1.0, 1000.0))
@click.option("--load", default=0.5, show_default=True, type=FiniteRange(0.05, 0.95), help="Of the capacity, of all.")
@click.option("--tokens", default=32, show_default=True)
@click.option("--seconds", default=10.0, show_default=True, type=FiniteRange(0.5, 600.0), help="Of each round.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--cores", default=None, type=click.IntRange(min=1), show_default="all")
@click.option("--priority", "priorities", multiple=True, help="As of penstock serve.")
def main(
    *,
    files: tuple[Path, ...],
    flooded: str,
    factor: float,
    load: float,
    tokens: int,
    seconds: float,
    rounds: int,
    cores: int | None,
    priorities: tuple[str, ...],
) -> None:
    """Measure."""
    cores = cores or read_host().usable
    endpoints = [from_file(ModelEndpoint, file) for file in files]
    if flooded not in [one.metadata.name for one in endpoints]:
        raise click.ClickException(f"--flood {flooded}: no file has this metadata.name")
    with ExitStack() as stack:
        artefacts = [prepare(one, store=store(), models=store(), cores=cores).artefact for one in endpoints]
        port = free_port()
        words = ["serve", *map(str, files), "--port", str(port), "--store", str(store()), "--models", str(store())]
        words += ["--cores", str(cores), "--no-optimize", *(f"--priority={one}" for one in priorities)]
        server = MeasuredServer.start("several", [*python_module("penstock_cli.main"), *words], port=port)
        stack.callback(server.stop)
        server.wait_until_ready("/readyz", seconds=READY_SECONDS)
        members = [
            member(one, artefact, f"{server.url}/models/{one.metadata.name}", tokens)
            for one, artefact in zip(endpoints, artefacts, strict=True)
        ]
        clients = {one.name: stack.enter_context(Client()) for one in members}
        rates: dict[str, float] = {}
        for one in members:
            saturating = one.spec.model_copy(update={"clients": CLIENTS, "seconds": 2.0, "warm_up_seconds": 0.5})
            capacity = clients[one.name].measure(saturating).completed_per_second
            rates[one.name] = capacity * load / len(members)
            click.echo(f"{one.name:20} {capacity:8.1f} requests/s alone, planned {rates[one.name]:.1f}")
        planned, flood = [], []
        for _ in range(rounds):
            planned.append(measure(members, clients, rates, seconds))
            flood.append(measure(members, clients, rates | {flooded: rates[flooded] * factor}, seconds))
    for one in members:
        objective = "" if one.objective_milliseconds is None else f" (objective {one.objective_milliseconds:g} ms)"
        click.echo(f"{one.name}{objective}{' is flooded' if one.name == flooded else ''}")
        click.echo(f"  planned {one.line([found[one.name] for found in planned])}")
        click.echo(f"  flood   {one.line([found[one.name] for found in flood])}")


def member(endpoint: ModelEndpoint, artefact: Path, url: str, tokens: int) -> Member:
    """A model with requests of this length."""
    spec = endpoint.spec
    if spec.task is TaskName.TEXT_GENERATION:
        body = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": CONTINUATION, "temperature": 0}
        bodies: tuple[RequestBody, ...] = (RequestBody(body=json.dumps(body), group=CONTINUATION),)
        url = f"{url}/v1/chat/completions"
    else:
        tokenizer = Tokenizer.from_file(str(artefact / "tokenizer.json"))
        url, bodies = f"{url}/predict", batch_bodies(spec.task, tokenizer, tokens, 1, count=64)
    latency = spec.objective.latency
    return Member(
        endpoint.metadata.name,
        CellSpec(url=url, bodies=bodies, maximum_seconds=600),
        None if latency is None else latency.p95_milliseconds,
    )


def measure(
    members: Sequence[Member], clients: Mapping[str, Client], rates: Mapping[str, float], seconds: float
) -> dict[str, CellResult]:
    """One round: each model gets its rate."""

    def one(member: Member) -> CellResult:
        update = {"per_second": rates[member.name], "seconds": seconds, "warm_up_seconds": 0.5}
        return clients[member.name].measure(member.spec.model_copy(update=update))

    with ThreadPoolExecutor(len(members)) as pool:
        return dict(zip((member.name for member in members), pool.map(one, members), strict=True))


if __name__ == "__main__":
    main()
