"""The gain of `serving.caches` on a Zipf trace: DistilBERT, closed loop, with and without the cache of answers.

    python -m benchmarks.zipf [--texts 2000] [--exponent 1.0] [--clients 16] [--seconds 6] [--rounds 3] [--cache 16]

The request of rank r among the texts comes with a probability proportional to 1/r^s, as words and search queries do.
Two servers in turns, each with the same core and the same trace: one without caches, one with a cache of answers of the
given MiB. Rates are medians of the rounds; hits are the server's own counts over all rounds.
"""

from __future__ import annotations

import random
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import click
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.fastapi_target import target_endpoint
from benchmarks.models import distilbert
from benchmarks.ours import store, write
from benchmarks.program import Program
from penstock.resources.endpoint import Caches, ModelEndpoint
from penstock.tasks import TaskName
from penstock_bench.grid import place
from penstock_bench.server import MeasuredServer, find_or_make, serve
from penstock_bench.subject import everyday_tokenizer
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.generator import ClosedLoop, LoadResult, LoadSpec, run_load
from penstock_optimizer.load.workload import LengthMix, predict_bodies
from penstock_runtime.host import read_host

REQUESTS = 20_000
"""Length of the trace, which is repeated."""
MOST_TOKENS = 512


def zipf_trace(texts: int, exponent: float, requests: int, *, seed: int) -> list[int]:
    """Ranks from 0, drawn with a probability proportional to 1/(rank + 1)^exponent; the same for the same seed."""
    weights = [1 / rank**exponent for rank in range(1, texts + 1)]
    return random.Random(seed).choices(range(texts), weights, k=requests)  # noqa: S311 - reproducible, not secret


def bodies_of(texts: int, exponent: float) -> tuple[RequestBody, ...]:
    """The requests of the trace, with the lengths of the default workload."""
    lengths = LengthMix(maximum=MOST_TOKENS).sample(texts, seed=1)
    distinct = predict_bodies(TaskName.TEXT_CLASSIFICATION, everyday_tokenizer(), lengths, seed=1)
    return tuple(distinct[rank] for rank in zipf_trace(texts, exponent, REQUESTS, seed=1))


@click.command(cls=Program, help=__doc__)
@click.option("--texts", default=2000, show_default=True, help="Different texts.")
@click.option("--exponent", default=1.0, show_default=True)
@click.option("--clients", default=16, show_default=True)
@click.option("--seconds", default=6.0, show_default=True, help="Of each server in each round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--cache", default=16, show_default=True, help="MiB for answers.")
@click.option(
    "--budget", default=600.0, show_default=True, help="Seconds of the optimisation, if there is no artefact."
)
def main(*, texts: int, exponent: float, clients: int, seconds: float, rounds: int, cache: int, budget: float) -> None:
    """Measure."""
    plain = target_endpoint("distilbert", distilbert(), 1, budget)
    find_or_make(plain, 1, store=store(), models=store(), on_line=lambda line: click.echo(f"          {line}"))
    bodies = bodies_of(texts, exponent)
    cpus = place(read_host(), 1)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-zipf-")))
        servers = {}
        for name, caches in (("none", None), (f"{cache} MiB", Caches(answers_mebibytes=cache))):
            folder = scratch / name.replace(" ", "")
            folder.mkdir()
            file = write(_with(plain, caches), folder)
            server = serve(file, 1, cpus=cpus.server, store=store(), models=store())
            stack.callback(server.stop)
            servers[name] = server
        results: dict[str, list[LoadResult]] = {name: [] for name in servers}
        for _ in range(rounds):
            for name, server in servers.items():
                results[name].append(_load(server, bodies, clients=clients, seconds=seconds, cpus=cpus.client))
        for name, server in servers.items():
            click.echo(_line(name, results[name], _hits(server)))


def _with(endpoint: ModelEndpoint, caches: Caches | None) -> ModelEndpoint:
    serving = endpoint.spec.serving.model_copy(update={"caches": caches})
    return endpoint.model_copy(update={"spec": endpoint.spec.model_copy(update={"serving": serving})})


def _load(
    server: MeasuredServer, bodies: tuple[RequestBody, ...], *, clients: int, seconds: float, cpus: Sequence[int]
) -> LoadResult:
    return run_load(
        LoadSpec(
            url=f"{server.url}/predict", bodies=bodies, pattern=ClosedLoop(clients=clients), seconds=seconds,
            cpus=tuple(cpus),
        )
    )  # fmt: skip


def _hits(server: MeasuredServer) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.labels["cache"], sample.labels["result"]): sample.value
            for family in families
            for sample in family.samples
            if sample.name == "penstock_cache_total"
        }


def _line(name: str, results: Sequence[LoadResult], hits: dict[tuple[str, str], float]) -> str:
    rate = median(result.completed_per_second for result in results)
    p95 = median(result.latency.p95 for result in results if result.latency is not None)
    asked = sum(count for (cache, _), count in hits.items() if cache == "answers")
    remembered = hits.get(("answers", "hit"), 0) / asked if asked else 0.0
    shared = hits.get(("in-progress", "hit"), 0) / asked if asked else 0.0
    failed = sum(result.failed for result in results)
    return (
        f"{name:10} {rate:8.0f} requests/s   p95 {p95:6.1f} ms   from memory {remembered:.1%}   "
        f"waited for the same {shared:.1%}   failed {failed}"
    )


if __name__ == "__main__":
    main()
