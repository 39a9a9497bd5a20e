"""The floor: the forward pass of the chosen plan alone, in a separate process, measured in the same run.

The server adds HTTP, JSON, tokenising and queueing to it. Another engine may have been faster at some lengths:
the optimiser measured all of them alternately, and its ratios are used here (`fastest_ratio`), so that the floor is the
time of the fastest engine with answers that are good enough.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from tokenizers import Tokenizer

from penstock.manifest import Frozen, Manifest, Outcome, served_latency
from penstock_bench.cell import CellResult, CellSpec, Client, MeasurementFailed
from penstock_optimizer.candidate.isolation import Worker, WorkerFailed
from penstock_optimizer.candidate.measure import LEAST_RUNS, no_collection
from penstock_optimizer.load.workload import TextMaker
from penstock_runtime.host.forks import end_with_parent

if TYPE_CHECKING:
    from penstock_runtime.engines.base import Engine

SERVABLE = {Outcome.CHOSEN, Outcome.SLOWER, Outcome.REFERENCE}
START_SECONDS = 120.0


def fastest_ratio(manifest: Manifest) -> Mapping[int, float]:
    """By tokens: the fastest servable candidate's time over the chosen one's, as the optimiser measured them, where it
    measured both."""
    medians = {
        candidate.recipe: candidate.milliseconds for candidate in manifest.candidates if candidate.outcome in SERVABLE
    }
    chosen = served_latency(manifest.chosen.plan, manifest.candidates)
    return {
        point.tokens: min(one[point.tokens] for one in medians.values() if point.tokens in one) / point.p50_milliseconds
        for point in chosen
        if point.p50_milliseconds > 0
    }


class ForwardTimes(Frozen):
    """Runs of one row."""

    milliseconds: tuple[float, ...]
    processor_milliseconds: float
    """CPU time of the process for each run, all threads."""


def load_chosen(artefact: Path) -> Engine:
    """The engine of an artefact, on all CPUs of this process for one row. ArtefactError if it does not load."""
    # Heavy, and only the process that runs it needs it.
    from penstock_runtime.engines.base import Threads
    from penstock_runtime.engines.load import load_engine
    from penstock_runtime.engines.routed import RoutedEngine

    manifest = Manifest.load(artefact)
    served, plan = manifest.chosen, manifest.chosen.plan
    threads = Threads(streams=1, per_stream=manifest.cores)
    engine = load_engine(artefact / served.path, served.io, plan.recipe, threads)
    if served.short is None or plan.short is None:
        return engine
    short = load_engine(artefact / served.short.path, served.short.io, plan.short.recipe, threads)
    return RoutedEngine(engine, short, plan.short.longest_tokens)


class Forward:
    """The object in the floor's process: the engine with the chosen graph."""

    def load(self, artefact: str) -> None:
        """Load the engine of an artefact."""
        # It is stopped while the servers are measured, and would not notice the end of its input.
        end_with_parent(os.getppid())
        self._engine = load_chosen(Path(artefact))

    def time(self, ids: list[int], seconds: float) -> ForwardTimes:
        """Single runs of one row, one after the other, for about so long; at least three runs."""
        import numpy as np

        from penstock_runtime.rows import Batch

        tokens = np.array([ids], dtype=np.int64)
        batch = Batch(tokens, np.ones_like(tokens), np.zeros_like(tokens))
        self._engine.run(batch)
        found: list[float] = []
        with no_collection():
            processor = time.process_time()
            started = time.perf_counter()
            while len(found) < LEAST_RUNS or time.perf_counter() < started + seconds:
                begun = time.perf_counter()
                self._engine.run(batch)
                found.append((time.perf_counter() - begun) * 1e3)
            processor = time.process_time() - processor
        return ForwardTimes(milliseconds=tuple(found), processor_milliseconds=processor * 1e3 / len(found))


class Floor:
    """The floor's process, as a server that is measured alternately with the other servers."""

    name = "floor"

    def __init__(self, artefact: Path, tokenizer: Tokenizer, cpus: Sequence[int]) -> None:
        self.cpus = tuple(cpus)
        self._maker = TextMaker(tokenizer)
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-bench-")
        log = Path(self._scratch.name) / "floor.log"
        self._worker = Worker("penstock_bench.floor:Forward", log=log, cpus=cpus)
        try:
            self._worker.call("load", artefact=str(artefact), timeout_seconds=START_SECONDS)
        except WorkerFailed as error:
            self.stop()
            raise MeasurementFailed(f"the forward pass alone cannot be measured: {error.reason}") from error
        self._process = psutil.Process(self._worker.pid)

    @property
    def pids(self) -> tuple[int, ...]:
        """Its process."""
        return (self._worker.pid,)

    def pause(self) -> None:
        """Stop it."""
        self._process.suspend()

    def resume(self) -> None:
        """Let it go on."""
        self._process.resume()

    def confine(self) -> None:
        """It was started on its CPUs, and the engines keep to them."""

    def measure(self, spec: CellSpec) -> CellResult:
        """Time the forward pass at the length of the cell's bodies."""
        tokens = spec.bodies[0].group
        ids = self._maker.ids(self._maker.text(tokens))
        limit = spec.maximum_seconds + START_SECONDS
        try:
            value = self._worker.call("time", ids=ids, seconds=spec.seconds, timeout_seconds=limit)
        except WorkerFailed as error:
            raise MeasurementFailed(f"the forward pass alone cannot be measured: {error.reason}") from error
        found = ForwardTimes.model_validate(value)
        times = found.milliseconds
        recorded_seconds = sum(times) / 1e3
        return CellResult(
            seconds=recorded_seconds,
            latencies_milliseconds=times,
            groups=(tokens,) * len(times),
            completed_per_second=len(times) / recorded_seconds,
            server_cpu_milliseconds=found.processor_milliseconds,
        )

    def stop(self) -> None:
        """End it."""
        if self._worker.alive:
            psutil.Process(self._worker.pid).resume()
        self._worker.close()
        self._scratch.cleanup()


def measured_by(client: Client, floor: Floor | None) -> Callable[[CellSpec], CellResult]:
    """A function that measures a cell: of the floor by itself, of servers by the client."""

    def measure(cell: CellSpec) -> CellResult:
        return floor.measure(cell) if floor is not None and cell.pids == floor.pids else client.measure(cell)

    return measure
