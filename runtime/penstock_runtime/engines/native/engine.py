"""The native engine: a mapped graph, opened in the C library.

One model serves all streams: `run` computes in the calling thread, and `run_wide` has the helpers of a small pool,
which sleep between runs. Answers are the same bit for bit on any number of threads and in any company: activations
are quantised token by token, and sums are made in one order.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from penstock.errors import ArtefactError
from penstock.manifest import GraphIO
from penstock.recipe import Recipe
from penstock_runtime.engines.base import Breadth, EngineFacts, Threads
from penstock_runtime.engines.native.graph_file import Activation, NativeGraph, Operator, Step, output_width, read
from penstock_runtime.engines.native.job import NativeJob
from penstock_runtime.engines.native.library import CStep, Kernels, Kind, Status, best_kernels, load_library
from penstock_runtime.engines.native.lone import LoneRows
from penstock_runtime.engines.native.streams import NativeStreams
from penstock_runtime.rows import Batch, Outputs, Row

_KINDS: dict[Operator, Kind] = {
    "embed": Kind.EMBED,
    "norm": Kind.NORM,
    "linear8": Kind.LINEAR8,
    "linear32": Kind.LINEAR32,
    "attention": Kind.ATTENTION,
    "first": Kind.FIRST,
    "chosen": Kind.CHOSEN,
}
_ACTIVATIONS: dict[Activation, int] = {"none": 0, "gelu": 1, "relu": 2, "tanh": 3, "gelu-tanh": 4}


class NativeEngine:
    """See `Engine`. Make it with `load`."""

    def __init__(self, graph: NativeGraph, facts: EngineFacts, *, helpers: bool, kernels: Kernels) -> None:
        """Packs the weights. ArtefactError when the library refuses the steps, MemoryError when there is no room."""
        self._library = load_library()
        self._graph = graph  # tables of words are read from the mapped file
        self._facts = facts
        threads = facts.threads
        self._wide = threads.streams * threads.per_stream if helpers else threads.per_stream
        steps = (CStep * len(graph.steps))(*(_c_step(step, graph) for step in graph.steps))
        status = ctypes.c_int32()
        self._model = self._library.penstock_open(
            steps, len(steps), graph.output.buffer, self._wide, kernels, ctypes.byref(status)
        )
        if self._model is None:
            if status.value == Status.NO_MEMORY:
                raise MemoryError("no memory for a native graph's weights, or no thread can be started")
            raise ArtefactError("the native graph's steps do not fit together", remedy="Run penstock optimize again")
        self._width = output_width(graph.steps, graph.output)
        self._lone = LoneRows(self._library, self._model, graph.output, self._width)

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._facts

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._run(batch, Breadth.NARROW)

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`. A second caller at the same time is welcome, but has no helpers."""
        return self._run(batch, Breadth.WIDE)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._run(batch, Breadth.WIDENING)

    def job(self, batch: Batch, breadth: Breadth) -> NativeJob:
        """A run of the batch that has not begun."""
        threads, company = self._threads(breadth), breadth is Breadth.WIDENING
        return NativeJob(self._model, batch, self._graph.output, self._width, threads=threads, company=company)

    def run_row(self, row: Row, breadth: Breadth) -> Outputs | None:
        """See `RunsRows`."""
        return self._lone.run(row, threads=self._threads(breadth), company=breadth is Breadth.WIDENING)

    def start_streams(self) -> NativeStreams:
        """See `Engine`."""
        return NativeStreams(self.job, self._facts.threads)

    def close(self) -> None:
        """See `Engine`."""
        model, self._model = self._model, None
        if model is not None:
            self._library.penstock_close(model)

    def _threads(self, breadth: Breadth) -> int:
        return self._facts.threads.per_stream if breadth is Breadth.NARROW else self._wide

    def _run(self, batch: Batch, breadth: Breadth) -> Outputs:
        job = self.job(batch, breadth)
        self._library.penstock_run(job.record)
        return job.outputs


def load(path: Path, io: GraphIO, recipe: Recipe, threads: Threads, *, wide: bool = False) -> NativeEngine:
    """See `EngineLoader`."""
    del recipe  # the file says it all
    library = load_library()
    graph = read(path)
    if set(io.outputs) != set(graph.output.names):
        raise ArtefactError(
            f"{path} gives {', '.join(graph.output.names)}, but is described as giving {', '.join(io.outputs)}",
            remedy="Run penstock optimize again",
        )
    kernels = best_kernels()
    facts = EngineFacts(
        "native",
        f"{library.penstock_abi()} ({kernels.name.lower().replace('_', '-')})",
        threads,
        precision="i8",
        divides_batches=True,
    )
    try:
        return NativeEngine(graph, facts, helpers=wide, kernels=kernels)
    except ArtefactError as error:
        raise ArtefactError(f"{path}: {error.message}", remedy=error.remedy) from error


def _c_step(step: Step, graph: NativeGraph) -> CStep:
    numbers = ("source", "target", "residual", "keys", "values", "inputs", "outputs", "heads", "positions", "types")
    made = CStep(
        kind=_KINDS[step.operator],
        activation=_ACTIVATIONS[step.activation],
        padding=step.padding,
        epsilon=step.epsilon,
        **{name: getattr(step, name) for name in numbers},
    )
    for part, name in step.tensors.items():
        setattr(made, part, graph.tensors[name].ctypes.data)
    return made
