"""The same requests alone and together, on the engine of an artefact of text generation: how many answers differ.

    cd dev && ../.venv/bin/python -m benchmarks.batch_invariance --artefact FOLDER --requests 1000 --at-once 16

Half of the requests are greedy and half have a seed; prompts are random tokens of different lengths.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import numpy as np

from penstock_optimizer.generation.batch_invariance import measure_invariance, requests_of
from penstock_runtime.generation.open import open_generation_engine

LONGEST_PROMPT = 96


@click.command()
@click.option("--artefact", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--requests", type=int, default=1000, show_default=True)
@click.option("--at-once", type=int, default=16, show_default=True)
@click.option("--tokens", type=int, default=12, show_default=True, help="Tokens of the longest answer.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
def main(artefact: Path, requests: int, at_once: int, tokens: int, seed: int) -> None:
    """Print what was found."""
    random = np.random.default_rng(seed)
    engine = open_generation_engine(artefact)
    try:
        prompts = [
            random.integers(0, engine.vocabulary, random.integers(1, LONGEST_PROMPT)).astype(np.int32)
            for _ in range(requests)
        ]
        begin = time.monotonic()
        found = measure_invariance(engine, requests_of(prompts, requests, tokens), at_once=at_once)
    finally:
        engine.close()
    seconds = time.monotonic() - begin
    click.echo(f"{found.model_dump_json()} in {seconds:.0f} s")


if __name__ == "__main__":
    main()
