"""The same requests alone and together: how many answers of an artefact of text generation differ.

    cd dev && ../.venv/bin/python -m benchmarks.batch_invariance --artefact FOLDER --requests 1000 --at-once 16

Half of the requests are greedy and half have a seed; prompts are random tokens of different lengths. They run on the
engine through the server's scheduler, or with `--http` through a new server: answers then count as the same if
their tokens and the logarithms of their probabilities are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from benchmarks.generation import REQUEST_SECONDS, penstock
from penstock.manifest import BatchInvariance, Manifest
from penstock_optimizer.guard.batch_invariance import (
    TEMPERATURE,
    ComparedRequest,
    measure_invariance,
    requests_of,
)
from penstock_runtime.serving.generation_model import open_generation_engine

LONGEST_PROMPT = 96


@click.command()
@click.option("--artefact", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--requests", type=int, default=1000, show_default=True)
@click.option("--at-once", type=int, default=16, show_default=True)
@click.option("--tokens", type=int, default=12, show_default=True, help="Tokens of the longest answer.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option("--http", "over_http", is_flag=True, help="Start a server, and send the requests to it.")
@click.option("--cores", type=int, default=2, show_default=True, help="Of the server.")
def main(*, artefact: Path, requests: int, at_once: int, tokens: int, seed: int, over_http: bool, cores: int) -> None:
    """Print the results."""
    random = np.random.default_rng(seed)
    decoder = Manifest.load(artefact).decoder
    if decoder is None:
        raise click.ClickException(f"{artefact} is not of text-generation")
    prompts = [
        random.integers(0, decoder.vocabulary, random.integers(1, LONGEST_PROMPT)).astype(np.int32)
        for _ in range(requests)
    ]
    compared = requests_of(prompts, requests, tokens)
    begin = time.monotonic()
    if over_http:
        with penstock(artefact, cores).running() as address:
            found = compare_answers(address, compared, at_once)
    else:
        engine = open_generation_engine(artefact)
        try:
            found = measure_invariance(engine, compared, at_once=at_once)
        finally:
            engine.close()
    seconds = time.monotonic() - begin
    click.echo(f"{found.model_dump_json()} in {seconds:.0f} s")


def compare_answers(address: str, requests: Sequence[ComparedRequest], at_once: int) -> BatchInvariance:
    """Send the requests one after the other, and then `at_once` at a time."""
    with httpx.Client(timeout=REQUEST_SECONDS, limits=httpx.Limits(max_connections=at_once)) as client:

        def answer(one: ComparedRequest) -> tuple[list[str], list[float]]:
            body: dict[str, Any] = {
                "prompt": one.prompt.tolist(),
                "max_tokens": one.length,
                "logprobs": 0,
                "temperature": 0 if one.seed is None else TEMPERATURE,
                "seed": one.seed,
            }
            response = client.post(f"{address}/v1/completions", json=body)
            response.raise_for_status()
            probabilities = response.json()["choices"][0]["logprobs"]
            return probabilities["tokens"], probabilities["token_logprobs"]

        alone = [answer(one) for one in requests]
        with ThreadPoolExecutor(at_once) as pool:
            together = list(pool.map(answer, requests))
    same = sum(
        next((at for at, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
        for pair in zip((tokens for tokens, _ in alone), (tokens for tokens, _ in together), strict=True)
    )
    return BatchInvariance(
        requests=len(requests),
        differing=sum(one != other for one, other in zip(alone, together, strict=True)),
        at_once=at_once,
        same_tokens=same / max(sum(len(tokens) for tokens, _ in alone), 1),
    )


if __name__ == "__main__":
    main()
