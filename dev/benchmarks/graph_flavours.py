"""What the flavours of the exported graph cost, for docs/decisions/export.md.

    taskset -c 0,1 python dev/benchmarks/graph_flavours.py [--threads 2] [--cpu-time]

MiniLM (an encoder) and DistilBERT (with a classifier), batch 1, all graphs of a model in turns. `--cpu-time` counts the
process's CPU seconds instead of the clock's: with one thread that is the same on an idle machine, and hardly moves when
others work on it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import models
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import Head
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.quantise import build
from penstock_optimizer.search.recipes import PER_CHANNEL
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Batch

LENGTHS = (8, 32, 128, 512)
SECONDS = 0.5
"""Of one graph at one length in one round."""
ROUNDS = 10
RECIPES = (
    Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32),
    Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.INT8_DYNAMIC, options=(PER_CHANNEL,)),
    Recipe(engine=EngineName.OPENVINO, precision=Precision.FP32),
)


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    print(
        f"{arguments.threads} threads, {'CPU' if arguments.cpu_time else 'wall'} ms: lowest median of {ROUNDS} rounds"
    )
    print("| model, engine, flavour | export s |", " | ".join(str(length) for length in LENGTHS), "|")
    print("|---|---|", "---|" * len(LENGTHS), sep="")
    for name, folder, head in (
        ("MiniLM", models.minilm(), Head.ENCODER),
        ("DistilBERT", models.distilbert(), Head.SEQUENCE),
    ):
        with tempfile.TemporaryDirectory() as scratch:
            engines = dict(loaded(ModelFolder.open(folder), head, Path(scratch), Threads(1, arguments.threads)))
            times = measured({key: engine for key, (engine, _) in engines.items()}, clock)
            for key, (_, seconds) in engines.items():
                cells = " | ".join(f"{times[key][length] * 1000:.2f}" for length in LENGTHS)
                print(f"| {name}, {key} | {seconds:.1f} | {cells} |", flush=True)


def loaded(
    folder: ModelFolder, head: Head, scratch: Path, threads: Threads
) -> Iterator[tuple[str, tuple[Engine, float]]]:
    """Every flavour in every engine, with the seconds that its export took."""
    for flavour in Flavour:
        start = time.perf_counter()
        exported = export(folder, head, scratch / flavour, flavour=flavour)
        seconds = time.perf_counter() - start
        for recipe in RECIPES:
            graph, io = exported.path, exported.io
            if recipe.precision is not Precision.FP32:
                built = build(recipe, graph, io, (), scratch / f"{flavour}-{recipe.slug}")
                graph, io = built.path, built.io
            yield f"{recipe.engine} {recipe.precision}, {flavour}", (load_engine(graph, io, recipe, threads), seconds)


def measured(engines: dict[str, Engine], clock: Callable[[], float]) -> dict[str, dict[int, float]]:
    """Seconds a run by engine and length: the lowest of the rounds' medians, which other work disturbed least."""
    medians: dict[str, dict[int, list[float]]] = {key: {length: [] for length in LENGTHS} for key in engines}
    for length in LENGTHS:
        ids = np.random.default_rng(length).integers(1000, 20_000, (1, length))
        batch = Batch(ids, np.ones_like(ids), np.zeros_like(ids))
        for _ in range(ROUNDS):
            for key, engine in engines.items():
                medians[key][length].append(statistics.median(runs(engine, batch, clock)))
    return {key: {length: min(found) for length, found in of.items()} for key, of in medians.items()}


def runs(engine: Engine, batch: Batch, clock: Callable[[], float]) -> list[float]:
    """Seconds of each of the runs that fit the time, three at least, after one that does not count."""
    engine.run(batch)
    found: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(found) < 3:
        start = clock()
        engine.run(batch)
        found.append(clock() - start)
    return found


if __name__ == "__main__":
    main()
