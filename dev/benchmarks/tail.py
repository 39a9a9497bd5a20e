"""The tail at steady load: p99 over p50 with requests at an even rate of half the capacity. The aim is at most 1.5.

    python -m benchmarks.tail [--cores 1] [--tokens 32 --tokens 128] [--seconds 30] [--rounds 9] [--share 0.5]
        [--real-time]

The client has a reserved core, unless --cores gives all of them to the server: then the tail includes the client's
work. Capacity is the rate of 16 clients that never pause. Then one request every 1/n seconds, whether or not earlier
ones are answered; latency counts from the time at which a request was due. A client with its own cores runs before
other programs there (Linux 6.12 and later). Ratios are the medians of the rounds. With --real-time the server, and a
client with its own cores, run before all other programs, as in a pod that owns its cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

import click
import psutil
from tokenizers import Tokenizer

from benchmarks.models import minilm
from benchmarks.ours import serving
from benchmarks.program import Program, verdict
from penstock.tasks import TaskName
from penstock_bench.cell import CellResult, CellSpec, Client, Turn, measure_in_turn
from penstock_bench.grid import place
from penstock_bench.results import Figures
from penstock_bench.subject import batch_bodies
from penstock_cli.terminal import FiniteRange
from penstock_optimizer.load.generator import LatencySummary
from penstock_runtime.host import read_host

AIM = 1.5
SATURATING_CLIENTS = 16
BEHIND_OTHERS = " and waited behind other programs for a core, which counts as the server's time"


@click.command(cls=Program, help=__doc__)
@click.option("--cores", type=int, show_default="all but one, which the client has", help="Of the server.")
@click.option("--tokens", "lengths", multiple=True, default=(32, 128), show_default=True, type=int)
@click.option("--seconds", default=30.0, show_default=True, help="Of each, all rounds together.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--share", default=0.5, show_default=True, type=FiniteRange(0.05, 0.95), help="Of the capacity.")
@click.option(
    "--real-time", is_flag=True, help="As root: no other program gets the cores while server or client wants them."
)
def main(
    *,
    cores: int | None,
    lengths: Sequence[int],
    seconds: float,
    rounds: int,
    share: float,
    real_time: bool,
) -> None:
    """Measure."""
    host = read_host()
    cores = max(1, host.usable - 1) if cores is None else cores
    placement = place(host, cores)
    if placement.note:
        click.echo(placement.note)
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    with ExitStack() as stack:
        server, _ = stack.enter_context(serving("minilm-512", minilm(), TaskName.FEATURE_EXTRACTION, placement))
        client = stack.enter_context(Client(placement.client))
        if real_time:
            go_before_all([*server.pids, *([client.pid] if placement.client else [])])
        for tokens in lengths:
            bodies = batch_bodies(TaskName.FEATURE_EXTRACTION, tokenizer, tokens, 1, count=64)
            spec = CellSpec(url=f"{server.url}/predict", bodies=bodies, maximum_seconds=600)
            saturating = spec.model_copy(update={"clients": SATURATING_CLIENTS, "seconds": 3.0, "warm_up_seconds": 1.0})
            (saturated,) = measure_in_turn([Turn(server, saturating)], client.measure, rounds=1)[server.name]
            capacity = saturated.completed_per_second
            if not capacity:
                click.echo(f"{tokens} tokens: no answers ({saturated.first_failure})")
                continue
            steady = spec.model_copy(
                update={"per_second": capacity * share, "seconds": seconds / rounds, "warm_up_seconds": 0.5}
            )
            ours = measure_in_turn([Turn(server, steady)], client.measure, rounds=rounds)[server.name]
            latency = Figures.of(ours).latency
            if latency is None:
                click.echo(f"{tokens} tokens: no answers ({ours[0].first_failure})")
                continue
            lag = median([cell.send_lag_p99_milliseconds for cell in ours])
            click.echo(
                f"{tokens} tokens: {capacity * share:.1f} of {capacity:.1f} requests/s, p50 {latency.p50:.2f} ms, "
                f"p95 {latency.p95:.2f}, p99 {latency.p99:.2f} in all; {latency.count} requests; the client was "
                f"{lag:.2f} ms late (p99){'' if all(cell.client_goes_first for cell in ours) else BEHIND_OTHERS}"
            )
            foreign_share = median([cell.foreign_cores or 0.0 for cell in ours]) / cores
            click.echo(f"{tokens} tokens: {judged(ratios(ours), foreign_share)}")


def go_before_all(pids: Sequence[int]) -> None:
    """Give processes on shared cores the priority that reserved cores give: the first thread of each before the rest,
    and all of them before other programs. A ClickException without the right to it."""
    for pid in pids:
        for thread in psutil.Process(pid).threads():
            try:
                os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(2 if thread.id == pid else 1))
            except PermissionError:
                raise click.ClickException("--real-time needs root or CAP_SYS_NICE") from None


def ratios(cells: Sequence[CellResult]) -> list[float]:
    """p99 over p50 of each round that has answers."""
    found = [LatencySummary.of([value / 1e3 for value in cell.latencies_milliseconds]) for cell in cells]
    return [one.p99 / one.p50 for one in found if one is not None]


def judged(found: Sequence[float], foreign_share: float) -> str:
    """Median and extremes of the rounds, and the verdict where the machine is quiet enough."""
    reached = verdict(foreign_share, reached=median(found) <= AIM)
    return f"p99/p50 {median(found):.2f} (rounds {min(found):.2f} to {max(found):.2f}); aim {AIM:g}: {reached}"


if __name__ == "__main__":
    main()
