"""`penstock bench` for one of the benchmarks' models: two cores, batch 1, the baseline in the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.markdown import against_published
from benchmarks.ours import endpoint, store, write
from benchmarks.program import Program
from penstock.tasks import TaskName
from penstock_bench import BenchOptions, BenchProgress, run_bench
from penstock_optimizer.load.workload import STANDARD_LENGTHS


def experiment(name: str, find_model: Callable[[], Path], task: TaskName, *, output: Path, text: str) -> click.Command:
    """The command: it prints the table, and writes results.md into the folder of `penstock bench`. `text`: its help."""

    @click.command(cls=Program, help=text)
    @click.option("--cores", default=2, show_default=True)
    @click.option("--seconds", default=6.0, show_default=True, help="Of each server at each length, in all rounds.")
    @click.option("--rounds", default=5, show_default=True)
    @click.option("--output", default=output, show_default=True, type=click.Path(path_type=Path))
    def main(*, cores: int, seconds: float, rounds: int, output: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            options = BenchOptions(
                # Each of the table's lengths is as much of the workload as any other.
                target=str(write(endpoint(name, find_model(), task, cores, STANDARD_LENGTHS), Path(scratch))),
                cores=(cores,),
                batches=(1,),
                seconds=seconds,
                rounds=rounds,
                baseline=True,
                output=output,
                store=store(),
            )
            results = run_bench(options, show)
        table = against_published(results)
        (output / "results.md").write_text(
            f"{name}: {results.cpu.summary}; {results.rule.sentence}.\n\n{table}", encoding="utf-8"
        )
        click.echo(f"\n{table}\nwritten   {output}/report.html, results.csv, results.json, results.md")

    return main


def show(progress: BenchProgress) -> None:
    """One line for each event."""
    click.echo(f"{progress.done:3}/{progress.total}   {progress.message}")
