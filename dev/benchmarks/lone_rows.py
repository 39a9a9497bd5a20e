"""How long one row alone takes in each engine's int8, with the processor awake and after a pause: native-engine.md.

    taskset -c 2,3 python -m benchmarks.lone_rows --threads 1 --threads 2
    taskset -c 2,3 python -m benchmarks.lone_rows --model mpnet --lengths 32,128 --threads 1

The real MiniLM, or a model of random weights, each graph as the optimiser makes it. All measurements are interleaved,
so that a busy machine disturbs all alike; rounds during which the hypervisor took the processor away (steal in
/proc/stat) do not count.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import click

from benchmarks.models import distilbert_with_masks, distilbert_with_spans, minilm, mpnet
from penstock.recipe import BF16_REST, COMPENSATED, PER_CHANNEL, SMOOTH, EngineName, Precision, Recipe
from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.guard.gate import CALIBRATION_ROWS, calibration_rows, own_corpus, samples, split
from penstock_optimizer.quantise import Built, build
from penstock_runtime.batching.collate import collate
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.host import read_host
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Batch, Row
from penstock_runtime.tasks import make_task

MODELS = {
    "minilm": (minilm, TaskName.FEATURE_EXTRACTION),
    "mpnet": (mpnet, TaskName.FEATURE_EXTRACTION),
    "distilbert-question-answering": (distilbert_with_spans, TaskName.QUESTION_ANSWERING),
    "distilbert-fill-mask": (distilbert_with_masks, TaskName.FILL_MASK),
}
TUNED = (COMPENSATED, PER_CHANNEL, SMOOTH)
QUICK = (PER_CHANNEL,)
"""For random weights: what else calibration decides takes minutes to find, and changes numbers rather than times."""
BF16 = Recipe(engine=EngineName.OPENVINO, precision=Precision.BF16)
MASK = 103
"""MiniLM's tokenizer's."""
PAUSE_SECONDS = 0.001
"""Between two runs of a round: helpers sleep by then, as between two requests."""


def recipes(name: str) -> tuple[Recipe, ...]:
    """Engines and precisions that are measured."""
    options = TUNED if name == "minilm" else QUICK
    int8 = tuple(
        Recipe(engine=engine, precision=precision, options=tuple(sorted((*options, *more))))
        for engine, precision, more in (
            (EngineName.ONNXRUNTIME, Precision.INT8_DYNAMIC, ()),
            (EngineName.ONNXRUNTIME, Precision.INT8_STATIC, ()),
            (EngineName.OPENVINO, Precision.INT8_STATIC, ()),
            (EngineName.OPENVINO, Precision.INT8_STATIC, (BF16_REST,)),
            (EngineName.NATIVE, Precision.INT8_ROWWISE, ()),
        )
        if not more or read_host().cpu.isa.has_bf16
    )
    return (*int8, BF16) if read_host().cpu.isa.has_bf16 else int8


def graphs(name: str, folder: Path, threads: int) -> dict[Recipe, Built]:
    """Each recipe's graph. Those that are in the folder are taken as they are."""
    find, task_name = MODELS[name]
    model = ModelFolder.open(find())
    head = HEAD_OF_TASK[task_name]
    exported = {flavour: export(model, head, folder / name / flavour.value, flavour=flavour) for flavour in Flavour}
    requests = samples(task_name, split(own_corpus())[0])
    rows = calibration_rows(make_task(task_name, model), requests, at_most=CALIBRATION_ROWS if name == "minilm" else 16)
    made = {}
    for recipe in recipes(name):
        source = exported[Flavour.PLAIN if recipe.engine is EngineName.OPENVINO else Flavour.FUSED]
        out = folder / name / recipe.slug
        there = [path for suffix in (".onnx", ".xml", ".native") if (path := out / f"model{suffix}").is_file()]
        made[recipe] = (
            Built(there[0], source.io)
            if there
            else build(recipe, source.path, source.io, rows, out, threads=threads)
        )  # fmt: skip
    return made


def row(tokens: int, turn: int) -> Batch:
    """Some text of exactly this length with a mask in it, another one in each round."""
    return collate([Row([101, MASK, *(1000 + (37 * index + 911 * turn) % 28000 for index in range(tokens - 3)), 102])])


def stolen() -> int:
    """Ticks that the hypervisor gave to other machines."""
    return int(Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[8])


def turn_of(engine: Engine, batch: Batch, runs: int, pause: float) -> list[float] | None:
    """Milliseconds of each run; None for a disturbed round."""
    before = stolen()
    engine.run(batch)
    times = []
    for _ in range(runs):
        if pause:
            time.sleep(pause)
        begin = time.perf_counter()
        engine.run(batch)
        times.append((time.perf_counter() - begin) * 1000)
    return times if stolen() == before else None


@click.command(help=__doc__)
@click.option("--lengths", default="8,16,32,64,128", show_default=True)
@click.option("--threads", "counts", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Of measuring.")
@click.option("--model", "name", type=click.Choice(sorted(MODELS)), default="minilm", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Graphs are kept there for the next run.")
def main(lengths: str, counts: tuple[int, ...], seconds: float, name: str, folder: Path | None) -> None:
    """Measure and print."""
    cpu = read_host().cpu
    sizes = [int(size) for size in lengths.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        built = graphs(name, folder or Path(scratch), max(counts))
        engines = {
            (recipe, threads): load_engine(one.path, one.io, recipe, Threads(1, threads))
            for recipe, one in built.items()
            for threads in counts
        }
        found: dict[tuple[float, Recipe, int, int], list[list[float]]] = defaultdict(list)
        end, turn = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            turn += 1
            order = list(engines.items())
            for size in sizes:
                for pause in (0.0, PAUSE_SECONDS):
                    for (recipe, threads), engine in order if turn % 2 else reversed(order):
                        times = turn_of(engine, row(size, turn), max(6, 96 // size), pause)
                        if times is not None:
                            found[pause, recipe, threads, size].append(times)
        click.echo(f"{cpu.model_name} ({cpu.isa.value}), CPUs {sorted(os.sched_getaffinity(0))}, {turn} turns;")
        click.echo(f"load {os.getloadavg()[0]:.0f}. Milliseconds: median of the turns' medians (fastest run)")
        for pause in (0.0, PAUSE_SECONDS):
            click.echo(
                f"\n| {f'{pause * 1000:.0f} ms between runs' if pause else 'run after run'} | threads | "
                + " | ".join(map(str, sizes))
                + " |"
            )
            click.echo("|" + "---|" * (len(sizes) + 2))
            for recipe, threads in engines:
                cells = [_cell(found[pause, recipe, threads, size]) for size in sizes]
                click.echo(f"| {recipe.name} | {threads} | {' | '.join(cells)} |")


def _cell(turns: list[list[float]]) -> str:
    if not turns:
        return "disturbed"
    return f"{median([median(times) for times in turns]):.2f} ({min(map(min, turns)):.2f})"


if __name__ == "__main__":
    main()
