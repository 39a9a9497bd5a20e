"""An hour of mixed lengths: does the server's memory grow?

    python -m benchmarks.soak [--minutes 60] [--cores 2] [--clients 16] [--output bench/soak]
    python -m benchmarks.soak --artefact artefacts/3f9c0a...

Without an artefact, MiniLM with a limit of 512 tokens is optimised first. Resident memory is read every few seconds.
The verdict is about the second half: its trend (the median slope over all pairs of samples, which single peaks do not
move), carried over an hour, must stay under 2 % of the memory in use. A few minutes show coarse leaks only: what pools
and caches still take in that time looks like one.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from tokenizers import Tokenizer

from benchmarks.models import MOST_TOKENS, minilm
from benchmarks.ours import serving, store
from benchmarks.program import Program
from benchmarks.trend import Sample, judge
from penstock.manifest import Manifest
from penstock.tasks import TaskName
from penstock_bench.cell import CellSpec, Client
from penstock_bench.grid import Placement, place
from penstock_bench.server import MeasuredServer, serve
from penstock_cli.options import FiniteRange
from penstock_optimizer.load.workload import LengthMix, predict_bodies
from penstock_runtime.host import read_host

SAMPLE_SECONDS = 5.0


@contextmanager
def soaked(artefact: Path | None, placement: Placement) -> Iterator[tuple[MeasuredServer, Path]]:
    """The server and what it serves. Ended afterwards."""
    if artefact is None:
        with serving("minilm-512", minilm(), TaskName.FEATURE_EXTRACTION, placement) as (server, made):
            yield server, made
        return
    cores = len(placement.server)
    server = serve(artefact, cores, cpus=placement.server, store=artefact.parent, models=store())
    try:
        yield server, artefact
    finally:
        server.stop()


@click.command(cls=Program, help=__doc__)
@click.option("--minutes", default=60.0, show_default=True, type=FiniteRange(0.2, 24 * 60))
@click.option("--cores", default=2, show_default=True)
@click.option("--clients", default=16, show_default=True)
@click.option(
    "--artefact", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Of penstock optimize: serve it."
)
@click.option("--output", default=Path("bench/soak"), show_default=True, type=click.Path(path_type=Path))
def main(*, minutes: float, cores: int, clients: int, artefact: Path | None, output: Path) -> None:
    """Load the server and watch."""
    placement = place(read_host(), cores)
    samples: list[Sample] = []
    requests = failures = 0
    with soaked(artefact, placement) as (server, served), Client(placement.client) as client:
        manifest = Manifest.load(served)
        tokenizer = Tokenizer.from_file(str(served / "tokenizer.json"))
        begun = time.monotonic()
        number = 0
        while (elapsed := time.monotonic() - begun) < minutes * 60:
            # Other texts each time: the same ones over and over would not show what distinct shapes and texts cost.
            lengths = LengthMix(maximum=min(MOST_TOKENS, manifest.model.max_tokens)).sample(512, seed=number)
            bodies = predict_bodies(manifest.task, tokenizer, lengths, seed=number)
            cell = client.measure(
                CellSpec(
                    url=f"{server.url}/predict",
                    bodies=bodies,
                    clients=clients,
                    seconds=min(SAMPLE_SECONDS, max(0.5, minutes * 60 - elapsed)),
                    warm_up_requests=0,
                    pids=server.pids,
                )
            )
            requests += len(cell.latencies_milliseconds)
            failures += cell.failed
            samples.append(Sample(time.monotonic() - begun, cell.server_rss_bytes or 0))
            number += 1
            if number % 12 == 0:
                click.echo(f"{elapsed / 60:5.1f} min  {samples[-1].bytes / 1e6:.1f} MB, {requests} requests")
    output.mkdir(parents=True, exist_ok=True)
    with (output / "memory.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["seconds", "rss_bytes"])
        writer.writerows([f"{sample.seconds:.1f}", sample.bytes] for sample in samples)
    verdict = judge(samples)
    click.echo(f"{requests} requests, {failures} failed; {verdict.sentence}")
    raise SystemExit(0 if verdict.passed and not failures else 1)


if __name__ == "__main__":
    main()
