"""The published experiment with the real MiniLM: embeddings, two cores, one client, one text each, 8 to 512 tokens.

    python -m benchmarks.minilm [--cores 2] [--seconds 6] [--rounds 5] [--output bench/minilm]

Penstock's chosen plan against a plain transformers pipeline behind FastAPI, interleaved, in one run. Writes
results.csv, results.json, report.html and results.md.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.experiment import experiment
from benchmarks.models import minilm
from benchmarks.program import Program
from penstock.tasks import TaskName


@click.command(cls=Program, help=__doc__)
@click.option("--cores", default=2, show_default=True)
@click.option("--seconds", default=6.0, show_default=True, help="Of each server at each length, all rounds together.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", default=Path("bench/minilm"), show_default=True, type=click.Path(path_type=Path))
def main(*, cores: int, seconds: float, rounds: int, output: Path) -> None:
    """Measure."""
    experiment(
        "minilm-512", minilm(), TaskName.FEATURE_EXTRACTION, cores=cores, seconds=seconds, rounds=rounds, output=output
    )


if __name__ == "__main__":
    main()
