"""The tail at steady load: p99 over p50 with requests at an even rate of half the capacity. At most 1.5 is aimed at.

    python -m benchmarks.tail [--cores 2] [--tokens 32 --tokens 128] [--seconds 20] [--share 0.5]

Capacity is the rate of 16 clients that never pause. Then one request every 1/n seconds, whether or not earlier ones are
answered; latency counts from when each was due.
"""

from __future__ import annotations

from collections.abc import Sequence

import click
from tokenizers import Tokenizer

from benchmarks.models import minilm
from benchmarks.ours import serving
from benchmarks.program import Program, verdict
from penstock.tasks import TaskName
from penstock_optimizer.bench.bodies import batch_bodies
from penstock_optimizer.bench.cell import CellSpec
from penstock_optimizer.bench.client import Client
from penstock_optimizer.bench.figures import Figures
from penstock_optimizer.bench.places import place
from penstock_optimizer.load.summary import median
from penstock_runtime.host import read_host

AIM = 1.5
SATURATING_CLIENTS = 16


@click.command(cls=Program, help=__doc__)
@click.option("--cores", default=2, show_default=True)
@click.option("--tokens", "lengths", multiple=True, default=(32, 128), show_default=True, type=int)
@click.option("--seconds", default=20.0, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--share", default=0.5, show_default=True, type=click.FloatRange(0.05, 0.95), help="Of the capacity.")
def main(*, cores: int, lengths: Sequence[int], seconds: float, rounds: int, share: float) -> None:
    """Measure."""
    placement = place(read_host(), cores)
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    with (
        serving("minilm-512", minilm(), TaskName.FEATURE_EXTRACTION, placement) as (server, _),
        Client(placement.client) as client,
    ):
        for tokens in lengths:
            bodies = batch_bodies(TaskName.FEATURE_EXTRACTION, tokenizer, tokens, 1, count=64)
            spec = CellSpec(
                url=f"{server.url}/predict", bodies=bodies, pids=server.pids, cpus=server.cpus, maximum_seconds=600
            )
            capacity = client.measure(
                spec.model_copy(update={"clients": SATURATING_CLIENTS, "seconds": 3.0, "warm_up_seconds": 1.0})
            ).completed_per_second
            steady = spec.model_copy(
                update={"per_second": capacity * share, "seconds": seconds / rounds, "warm_up_seconds": 0.5}
            )
            cells = [client.measure(steady) for _ in range(rounds)]
            latency = Figures.of(cells).latency
            if latency is None:
                click.echo(f"{tokens} tokens: no answers ({cells[0].first_failure})")
                continue
            ratio = latency.p99 / latency.p50
            lag = median([cell.send_lag_p99_milliseconds for cell in cells])
            foreign = median([cell.foreign_cores or 0.0 for cell in cells]) / cores
            click.echo(
                f"{tokens} tokens: {capacity * share:.1f} of {capacity:.1f} requests/s, p50 {latency.p50:.2f} ms, "
                f"p95 {latency.p95:.2f}, p99 {latency.p99:.2f}, p99/p50 {ratio:.2f} "
                f"({AIM:g} aimed at: {verdict(foreign, reached=ratio <= AIM)}); {latency.count} requests; the client "
                f"was {lag:.2f} ms late (p99)"
            )


if __name__ == "__main__":
    main()
