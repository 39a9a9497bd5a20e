"""Measurements for docs/decisions/engine-threads.md and openvino-shapes.md: threads, batches and shapes, in process.

    taskset -c 0,1 python -m benchmarks.engine_choices threads
    taskset -c 0 python -m benchmarks.engine_choices batches
    taskset -c 0,1 python -m benchmarks.engine_choices shapes

`threads`: a single run, and as many concurrent callers as cores, for several set-ups of the engines; and their memory.
`batches`: the gain of rows of equal length in one run, on one thread.
`shapes`: time and memory of the first run of every length, with OpenVINO.
All on the real MiniLM; all measurements are interleaved, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.models import minilm
from penstock.manifest import GraphIO
from penstock.recipe import COMPENSATED, PER_CHANNEL, SMOOTH, EngineName, Precision, Recipe
from penstock.tasks import Head, TaskName
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.guard.calibration import calibration_rows, own_corpus, samples, split
from penstock_optimizer.quantise import build
from penstock_runtime.batching.collate import collate
from penstock_runtime.engines.base import Threads
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.engines.load import load_engine
from penstock_runtime.host import read_host
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Batch, Row
from penstock_runtime.tasks import make_task

LENGTHS = (8, 32, 128, 512)
RECIPES = {
    "ort-fp32": Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32),
    "ort-int8": Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.INT8_DYNAMIC, options=(PER_CHANNEL,)),
    "ov-fp32": Recipe(engine=EngineName.OPENVINO, precision=Precision.FP32),
    "ov-bf16": Recipe(engine=EngineName.OPENVINO, precision=Precision.BF16),
    "ov-int8": Recipe(
        engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC, options=(COMPENSATED, PER_CHANNEL, SMOOTH)
    ),
}
Run = Callable[[Batch], object]


def graphs(folder: Path) -> dict[str, tuple[Path, GraphIO]]:
    """Each recipe's graph, made as the optimiser makes it."""
    model = ModelFolder.open(minilm())
    exported = {flavour: export(model, Head.ENCODER, folder / flavour.value, flavour=flavour) for flavour in Flavour}
    task = make_task(TaskName.FEATURE_EXTRACTION, model)
    rows = calibration_rows(task, samples(TaskName.FEATURE_EXTRACTION, split(own_corpus())[0]))
    made = {}
    for name, recipe in RECIPES.items():
        source = exported[Flavour.FUSED if recipe.engine is EngineName.ONNXRUNTIME else Flavour.PLAIN]
        if recipe == RECIPES["ort-fp32"]:
            made[name] = (source.path, source.io)
        else:
            built = build(recipe, source.path, source.io, rows, folder / recipe.slug, threads=2)
            made[name] = (built.path, built.io)
    return made


def batch_of(rows: int, tokens: int) -> Batch:
    """Some text of exactly this size."""
    words = [[1000 + 37 * (index + row) % 28000 for index in range(tokens - 2)] for row in range(rows)]
    return collate([Row([101, *some, 102]) for some in words])


def once(run: Run, batch: Batch) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    run(batch)
    return (time.perf_counter() - begin) * 1000


def lone(run: Run, batch: Batch, milliseconds: float = 80) -> float:
    """Milliseconds, the median of a round."""
    times: list[float] = []
    while sum(times) < milliseconds or len(times) < 3:
        times.append(once(run, batch))
    return median(times)


def crowd(run: Run, batch: Batch, callers: int, seconds: float = 0.15) -> float:
    """Runs per second of this number of threads together."""
    counts = [0] * callers
    begin = time.perf_counter()

    def work(number: int) -> None:
        while time.perf_counter() < begin + seconds:
            run(batch)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def onnxruntime_session(path: Path, io: GraphIO, pool: int, spin: str) -> Run:
    """A session as the engine does not set it up: `spin` is `off`, `on`, or microseconds."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = pool
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0" if spin == "off" else "1")
    if spin.isdigit():
        options.add_session_config_entry("session.intra_op.spin_duration_us", spin)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {name: getattr(batch, name) for name in io.inputs})


def setups(name: str, path: Path, io: GraphIO, cores: int) -> Iterator[tuple[str, Run, Run]]:
    """Ways to set an engine up: what, for the crowd, for a lone run."""
    recipe = RECIPES[name]
    if recipe.engine is EngineName.ONNXRUNTIME:
        narrow = onnxruntime_session(path, io, 1, "off")
        yield "one session of 1 thread", narrow, narrow
        for spin in ("off", "20", "50", "on"):
            shared = onnxruntime_session(path, io, cores, spin)
            yield f"one session of {cores} threads, spinning {spin}{' us' if spin.isdigit() else ''}", shared, shared
        return
    for what, threads, wide in (
        (f"{cores} streams of 1 thread", Threads(cores, 1), False),
        (f"1 stream of {cores} threads", Threads(1, cores), False),
        (f"{cores} streams of 1 thread, and 1 of {cores}", Threads(cores, 1), True),
    ):
        engine = load_engine(path, io, recipe, threads, wide=wide, max_tokens=512)
        yield what, engine.run, engine.run_wide


@click.group(help=__doc__)
def main() -> None:
    """See the module."""
    click.echo(f"{read_host().cpu.model_name} ({read_host().cpu.isa.value}), CPUs {sorted(os.sched_getaffinity(0))}\n")


@main.command("threads")
@click.option("--rounds", default=7, show_default=True)
def compare_threads(rounds: int) -> None:
    """Ways to set the engines up."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, io) in graphs(Path(folder)).items():
            click.echo(f"\n{name}: lone ms / {cores} callers' runs a second over the first line's, at {LENGTHS} tokens")
            ways = list(setups(name, path, io, cores))
            cells: list[list[str]] = [[] for _ in ways]
            for tokens in LENGTHS:
                batch = batch_of(1, tokens)
                singles: list[list[float]] = [[] for _ in ways]
                crowds: list[list[float]] = [[] for _ in ways]
                for turn in range(rounds):
                    order = range(len(ways)) if turn % 2 == 0 else reversed(range(len(ways)))
                    for index in order:
                        _, together, alone = ways[index]
                        together(batch)
                        singles[index].append(lone(alone, batch))
                        crowds[index].append(crowd(together, batch, cores, max(0.15, singles[index][-1] / 200)))
                for index in range(len(ways)):
                    ratio = median([one / first for one, first in zip(crowds[index], crowds[0], strict=True)])
                    cells[index].append(f"{median(singles[index]):.2f} / {ratio:.2f}")
            for (what, _, _), row in zip(ways, cells, strict=True):
                click.echo(f"| {what} | {' | '.join(row)} |")
            memory(name, path, io, cores)


def memory(name: str, path: Path, io: GraphIO, cores: int) -> None:
    """Anonymous memory of each way, each in a separate process, after one run on each stream."""
    given = json.dumps({"path": str(path), "io": io.model_dump(mode="json"), "name": name, "cores": cores})
    found = []
    for streams, wide in ((1, False), (cores, False), (cores, True)):
        command = [sys.executable, "-m", "benchmarks.engine_choices", "footprint", given, str(streams), str(int(wide))]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        found.append(f"{streams} streams{' and wide' if wide else ''} {done.stdout.split()[-1]} MiB")
    click.echo(f"memory: {', '.join(found)}")


@main.command(hidden=True)
@click.argument("given")
@click.argument("streams", type=int)
@click.argument("wide", type=int)
def footprint(given: str, streams: int, wide: int) -> None:
    """Print what loading an engine and running it once costs."""
    value: dict[str, Any] = json.loads(given)
    before = anonymous()
    io = GraphIO.model_validate(value["io"])
    engine = load_engine(Path(value["path"]), io, RECIPES[value["name"]], Threads(streams, 1), wide=bool(wide))
    crowd(engine.run, batch_of(1, 32), streams, 0.5)
    engine.run_wide(batch_of(1, 32))
    click.echo(round(anonymous() - before))


@main.command("batches")
@click.option("--rounds", default=11, show_default=True)
def compare_batches(rounds: int) -> None:
    """Rows of equal length together, on one thread."""
    click.echo("gain of 2 / 4 / 8 rows in one run over as many runs (ms of one row)\n")
    lengths = (8, 16, 32, 64, 128, 256)
    click.echo(f"| recipe | {' | '.join(map(str, lengths))} |\n|{'---|' * (len(lengths) + 1)}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, io) in graphs(Path(folder)).items():
            engine = load_engine(path, io, RECIPES[name], Threads(1, 1), max_tokens=512)
            cells = []
            for tokens in lengths:
                batches = {rows: batch_of(rows, tokens) for rows in (1, 2, 4, 8)}
                times: dict[int, list[float]] = {rows: [] for rows in batches}
                for _ in range(rounds):
                    for rows, batch in batches.items():
                        times[rows].append(once(engine.run, batch))
                best = {rows: float(np.quantile(some, 0.25)) for rows, some in times.items()}
                gains = " / ".join(f"{rows * best[1] / best[rows]:.2f}" for rows in (2, 4, 8))
                cells.append(f"{gains} ({best[1]:.1f})")
            click.echo(f"| {name} | {' | '.join(cells)} |")
            engine.close()


@main.command("shapes")
def first_runs() -> None:
    """The first run of every length, and the memory that remains in use."""
    grid = ShapeGrid().lengths(512)
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, io) in graphs(Path(folder)).items():
            if RECIPES[name].engine is not EngineName.OPENVINO:
                continue
            engine = load_engine(path, io, RECIPES[name], Threads(1, 1))
            engine.run(batch_of(1, 4))
            begin = anonymous()
            click.echo(f"\n{name}")
            for what, shapes in (
                ("one row, every length of the grid", [(1, tokens) for tokens in grid]),
                ("2, 4, 8 rows, up to 512 tokens", [(k, n) for k in (2, 4, 8) for n in grid if k * n <= 512]),
                ("3, 5, 7 rows, up to 512 tokens", [(k, n) for k in (3, 5, 7) for n in grid if k * n <= 512]),
            ):
                before = anonymous()
                batches = [batch_of(*shape) for shape in shapes]
                pairs = [(once(engine.run, batch), once(engine.run, batch)) for batch in batches]
                first, second = (median([pair[side] for pair in pairs]) for side in (0, 1))
                times = f"{first:.1f} ms, then {second:.1f}"
                click.echo(f"| {what} | {len(shapes)} shapes | {times} | {anonymous() - before:+.0f} MiB |")
            click.echo(f"all: {anonymous() - begin:+.0f} MiB")
            engine.close()


def anonymous() -> float:
    """MiB of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


if __name__ == "__main__":
    main()
