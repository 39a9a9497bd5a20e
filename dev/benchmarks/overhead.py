"""CPU time around the forward pass: HTTP, JSON, tokenising, queue, response. At most 0.5 ms a request is aimed at.

    python -m benchmarks.overhead [--tokens 32] [--seconds 1] [--rounds 20]

The server has one core, so that no other thread spins while one computes. Its CPU time for each request (user +
system, all threads), less the CPU time of the same forward pass alone in a process with one thread; interleaved,
medians of rounds, which are short since a shared machine changes its pace within seconds. Also shown: the CPU time less
the forward passes that the same requests had (x-inference-time), without a change of pace between the two, and the time
that the server itself reports (x-compute-time less x-inference-time: wall time of the server's parts).
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median

import click
from tokenizers import Tokenizer

from benchmarks.models import minilm
from benchmarks.ours import serving
from benchmarks.program import Program, verdict
from penstock.tasks import TaskName
from penstock_bench.cell import CellSpec, Client, Turn, measure_in_turn
from penstock_bench.floor import Floor, measured_by
from penstock_bench.grid import place
from penstock_bench.subject import batch_bodies
from penstock_optimizer.load.generator import relative_spread
from penstock_runtime.host import read_host

AIM_MILLISECONDS = 0.5


@click.command(cls=Program, help=__doc__)
@click.option("--tokens", default=32, show_default=True)
@click.option("--seconds", default=1.0, show_default=True, help="Of each in each round.")
@click.option("--rounds", default=20, show_default=True)
def main(*, tokens: int, seconds: float, rounds: int) -> None:
    """Measure."""
    placement = place(read_host(), 1)
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    bodies = batch_bodies(TaskName.FEATURE_EXTRACTION, tokenizer, tokens, 1, count=64)
    with ExitStack() as stack:
        server, artefact = stack.enter_context(serving("minilm-512", minilm(), TaskName.FEATURE_EXTRACTION, placement))
        floor = Floor(artefact, tokenizer, placement.server)
        stack.callback(floor.stop)
        client = stack.enter_context(Client(placement.client))
        spec = CellSpec(
            url=f"{server.url}/predict",
            bodies=bodies,
            seconds=seconds,
            response_headers=("x-compute-time", "x-inference-time"),
        )
        cells = measure_in_turn([Turn(server, spec), Turn(floor, spec)], measured_by(client, floor), rounds=rounds)
    served = [cell.server_cpu_milliseconds or 0.0 for cell in cells[server.name]]
    forward = [cell.server_cpu_milliseconds or 0.0 for cell in cells[Floor.name]]
    overheads = [one - other for one, other in zip(served, forward, strict=True)]
    means = [cell.header_means for cell in cells[server.name]]
    own = [one["x-compute-time"] - one["x-inference-time"] for one in means]
    around = [cpu - one["x-inference-time"] for cpu, one in zip(served, means, strict=True)]
    foreign = median([cell.foreign_cores or 0.0 for cell in cells[server.name]])
    click.echo(
        f"CPU for each request at {tokens} tokens: {median(served):.3f} ms, forward pass alone {median(forward):.3f} ms"
    )
    click.echo(
        f"around it: {median(overheads):.3f} ms (rounds {min(overheads):.3f} to {max(overheads):.3f}, "
        f"spread of the server's {relative_spread(served):.0%}); {AIM_MILLISECONDS:g} ms aimed at: "
        f"{verdict(foreign, reached=median(overheads) <= AIM_MILLISECONDS)}"
    )
    click.echo(
        f"around the forward passes of the same requests: {median(around):.3f} ms; by the server's own headers "
        f"{median(own):.3f} ms before and after them"
    )


if __name__ == "__main__":
    main()
