"""Every recipe side by side, in process: latency at batch 1 by length, and the guard's verdict on its answers.

    taskset -c 0,1 python -m benchmarks.recipes [--model minilm] [--threads 2] [--lengths 8,32,128,512] [--isa amx]

The graphs are made as the optimiser makes them, judged by the guard with all its judging texts, and timed by the
engines that serve, interleaved: one recipe after the other within each round, every second round backwards. Printed are
the medians of the rounds' medians and, in brackets, the best of all runs, which a busy machine disturbs least.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.models import distilbert, minilm
from penstock.errors import OptimizationError
from penstock.hardware import Isa
from penstock.manifest import Verdict
from penstock.recipe import EngineName, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget
from penstock.tasks import HEAD_OF_TASK, TaskName
from penstock_optimizer.export import Exported, Flavour, export
from penstock_optimizer.guard.gate import (
    Reference,
    arithmetic_of,
    calibration_rows,
    forward_of,
    judge_candidate,
    judging_samples,
    observe_reference,
    own_corpus,
    samples,
    split,
)
from penstock_optimizer.quantise import build
from penstock_optimizer.search.recipes import REFERENCE, candidate_recipes
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.host import read_host
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Row, collate
from penstock_runtime.tasks import Task, make_task

MODELS = {
    "minilm": (minilm, TaskName.FEATURE_EXTRACTION),
    "distilbert": (distilbert, TaskName.FEATURE_EXTRACTION),
}
MILLISECONDS_A_TURN = 60.0
Clock = Callable[[], float]


@dataclass(frozen=True)
class Entry:
    """A recipe that was made."""

    recipe: Recipe
    engine: Engine
    verdict: Verdict
    build_seconds: float


@dataclass(frozen=True)
class Workshop:
    """One model, exported both ways, with what calibrates and judges."""

    task: Task
    exported: dict[EngineName, Exported]
    calibration: list[Row]
    reference: Reference
    threads: int
    folder: Path

    @classmethod
    def open(cls, path: Path, task_name: TaskName, threads: int, folder: Path) -> Workshop:
        """Export the model and compute the reference's answers."""
        model = ModelFolder.open(path)
        task = make_task(task_name, model)
        exported = {
            engine: export(model, HEAD_OF_TASK[task_name], folder / flavour.value, flavour=flavour)
            for engine, flavour in (
                (EngineName.ONNXRUNTIME, Flavour.FUSED),
                (EngineName.OPENVINO, Flavour.PLAIN),
                (EngineName.NATIVE, Flavour.FUSED),
            )
        }
        calibrating, judging = split(own_corpus())
        fused = exported[EngineName.ONNXRUNTIME]
        engine = load_engine(fused.path, fused.io, REFERENCE, Threads(1, threads))
        requests = judging_samples(task, samples(task_name, judging))
        reference = observe_reference(task, forward_of(engine, fused.io), requests)
        rows = calibration_rows(task, samples(task_name, calibrating))
        return cls(task, exported, rows, reference, threads, folder)

    def make(self, recipe: Recipe) -> Entry:
        """Build, load and judge a recipe."""
        source = self.exported[recipe.engine]
        begin = time.perf_counter()
        built = build(recipe, source.path, source.io, self.calibration, self.folder / recipe.slug, threads=self.threads)
        seconds = time.perf_counter() - begin
        engine = load_engine(built.path, built.io, recipe, Threads(1, self.threads))
        verdict = judge_candidate(
            self.task,
            forward_of(engine, built.io),
            self.reference,
            AccuracyBudget(),
            arithmetic=arithmetic_of(recipe),
            grid=engine.facts.grid,
        )
        return Entry(recipe, engine, verdict, seconds)


def timings(entries: Sequence[Entry], tokens: int, rounds: int, clock: Clock) -> list[tuple[float, float]]:
    """For each entry the median of its rounds' medians and the fastest run, milliseconds."""
    batch = collate([Row([101, *(1000 + index * 37 % 28000 for index in range(tokens - 2)), 102])])
    medians: list[list[float]] = [[] for _ in entries]
    best = [float("inf")] * len(entries)
    for entry in entries:
        for _ in range(3):
            entry.engine.run(batch)
    for turn in range(rounds):
        order = range(len(entries)) if turn % 2 == 0 else reversed(range(len(entries)))
        for index in order:
            run = entries[index].engine.run
            times: list[float] = []
            while sum(times) < MILLISECONDS_A_TURN or len(times) < 3:
                begin = clock()
                run(batch)
                times.append((clock() - begin) * 1000)
            medians[index].append(median(times))
            best[index] = min(best[index], *times)
    return [(median(some), fastest) for some, fastest in zip(medians, best, strict=True)]


def cells(verdict: Verdict) -> list[str]:
    """A verdict in the table."""
    values = {metric.name: metric.value for metric in verdict.metrics}
    shown = [f"{values[name]:.4f}" if name in values else "" for name in ("mean_cosine", "p1_cosine", "min_cosine")]
    return [*shown, f"accepted, {verdict.batching}" if verdict.passed else "rejected"]


@click.command(help=__doc__)
@click.option("--model", type=click.Choice(list(MODELS)), default="minilm", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--lengths", default="8,32,128,512", show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--isa", type=click.Choice([isa.value for isa in Isa]), help="Its candidates. Default: this CPU's.")
@click.option("--cpu-time", is_flag=True, help="CPU time of all threads, which a busy machine disturbs less.")
@click.option("--only", default="", help="Only recipes with this in their names.")
def main(*, model: str, threads: int, lengths: str, rounds: int, isa: str | None, cpu_time: bool, only: str) -> None:
    """Print a table in Markdown."""
    cpu = read_host().cpu
    wanted = candidate_recipes(Isa(isa) if isa else cpu.isa, tuple(EngineName), tuple(Precision)).recipes
    folder, task = MODELS[model]
    clock, unit = (time.process_time, "CPU ms") if cpu_time else (time.perf_counter, "ms")
    columns = [int(tokens) for tokens in lengths.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        workshop = Workshop.open(folder(), task, threads, Path(scratch))
        entries = []
        for recipe in wanted:
            if only in recipe.name:
                try:
                    entries.append(workshop.make(recipe))
                except OptimizationError as error:
                    click.echo(f"{recipe.name}: {error}", err=True)
        measured = [timings(entries, tokens, rounds, clock) for tokens in columns]
        click.echo(
            f"{model}, {cpu.model_name} ({cpu.isa.value}), {threads} threads, batch 1, {unit}: median (fastest)\n"
        )
        heads = ["recipe", *map(str, columns), "mean cosine", "p1", "min", "guard", "made in s"]
        click.echo("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
        for index, entry in enumerate(entries):
            times = [f"{column[index][0]:.2f} ({column[index][1]:.2f})" for column in measured]
            row = [entry.recipe.name, *times, *cells(entry.verdict), f"{entry.build_seconds:.0f}"]
            click.echo("| " + " | ".join(row) + " |")
            entry.engine.close()


if __name__ == "__main__":
    main()
