"""The native engine: a memory-mapped graph, opened in the C library.

All streams share one model: `run` computes in the calling thread, `run_wide` also uses the threads of a small pool,
which sleep between runs. Outputs are bitwise equal for any number of threads and in any batch: activations are
quantised token by token, and sums have a fixed order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from penstock.errors import ArtefactError
from penstock.manifest import GraphIO
from penstock.recipe import Recipe
from penstock_runtime.engines.base import Engine, EngineFacts, Parallelism, Threads
from penstock_runtime.engines.native.graph_file import Activation, GraphStep, NativeGraph, Operator, output_width, read
from penstock_runtime.engines.native.library import CStep, Kernels, RunStatus, StepKind, best_kernels, load_library
from penstock_runtime.engines.native.runs import NativeRun, NativeStreams, SingleRow
from penstock_runtime.rows import Batch, Outputs, Row

_KINDS: dict[Operator, StepKind] = {
    "embed": StepKind.EMBED,
    "norm": StepKind.NORM,
    "linear8": StepKind.LINEAR8,
    "linear32": StepKind.LINEAR32,
    "attention": StepKind.ATTENTION,
    "first": StepKind.FIRST,
    "chosen": StepKind.CHOSEN,
    "rotate": StepKind.ROTATE,
    "average": StepKind.AVERAGE,
    "head-norm": StepKind.HEAD_NORM,
    "last": StepKind.LAST,
    "largest": StepKind.LARGEST,
}
ACTIVATIONS: dict[Activation, int] = {"none": 0, "gelu": 1, "relu": 2, "tanh": 3, "gelu-tanh": 4, "silu": 5}
"""`enum penstock_activation`."""


class NativeEngine:
    """See `Engine`. Make it with `load`."""

    def __init__(self, graph: NativeGraph, facts: EngineFacts, *, helpers: bool, kernels: Kernels) -> None:
        """Pack the weights. ArtefactError if the library rejects the steps, MemoryError if there is no memory."""
        self._library = load_library()
        self._graph = graph  # keeps the file mapped: embedding tables are read from it
        self._facts = facts
        threads = facts.threads
        self._wide = threads.streams * threads.per_stream if helpers else threads.per_stream
        steps = (CStep * len(graph.steps))(*(_c_step(step, graph) for step in graph.steps))
        status = ctypes.c_int32()
        self._model = self._library.penstock_open(
            steps, len(steps), graph.output.buffer, self._wide, kernels, ctypes.byref(status)
        )
        if self._model is None:
            if status.value == RunStatus.NO_MEMORY:
                raise MemoryError("no memory for a native graph's weights, or no thread can be started")
            raise ArtefactError("the native graph's steps do not fit together", remedy="Run penstock optimize again")
        self._width = output_width(graph.steps, graph.output)
        self._single_row = SingleRow(self._library, self._model, graph.output, self._width)

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._facts

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._run(batch, Parallelism.NARROW)

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`. A second concurrent caller is allowed, but has no pool threads."""
        return self._run(batch, Parallelism.WIDE)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._run(batch, Parallelism.WIDENING)

    def new_run(self, batch: Batch, parallelism: Parallelism) -> NativeRun:
        """A run of the batch that has not started."""
        threads, when_idle = self._threads(parallelism), parallelism is Parallelism.WIDENING
        return NativeRun(self._model, batch, self._graph.output, self._width, threads=threads, when_idle=when_idle)

    def run_row(self, row: Row, parallelism: Parallelism) -> Outputs | None:
        """See `RunsRows`."""
        return self._single_row.run(
            row, threads=self._threads(parallelism), when_idle=parallelism is Parallelism.WIDENING
        )

    def start_streams(self) -> NativeStreams:
        """See `Engine`."""
        return NativeStreams(self.new_run, self._facts.threads)

    def start_shared_streams(self, short: Engine, is_short: Callable[[Batch], bool]) -> NativeStreams | None:
        """See `SharesStreams`."""
        if not isinstance(short, NativeEngine):
            return None

        def new_run(batch: Batch, parallelism: Parallelism) -> NativeRun:
            return (short if is_short(batch) else self).new_run(batch, parallelism)

        return NativeStreams(new_run, self._facts.threads)

    def close(self) -> None:
        """See `Engine`."""
        model, self._model = self._model, None
        if model is not None:
            self._library.penstock_close(model)

    def _threads(self, parallelism: Parallelism) -> int:
        return self._facts.threads.per_stream if parallelism is Parallelism.NARROW else self._wide

    def _run(self, batch: Batch, parallelism: Parallelism) -> Outputs:
        run = self.new_run(batch, parallelism)
        self._library.penstock_run(run.record)
        return run.outputs


def load(path: Path, io: GraphIO, recipe: Recipe, threads: Threads, *, wide: bool = False) -> NativeEngine:
    """See `load_engine`."""
    del recipe  # the file describes the graph completely
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
        runs_next_to_streams=True,
    )
    try:
        return NativeEngine(graph, facts, helpers=wide, kernels=kernels)
    except ArtefactError as error:
        raise ArtefactError(f"{path}: {error.message}", remedy=error.remedy) from error


def _c_step(step: GraphStep, graph: NativeGraph) -> CStep:
    numbers = ("source", "target", "residual", "keys", "values", "inputs", "outputs", "heads", "positions", "types")
    made = CStep(
        kind=_KINDS[step.operator],
        activation=ACTIVATIONS[step.activation],
        padding=step.padding,
        gated=step.gated,
        key_heads=step.key_heads or step.heads,
        before=step.before,
        after=step.after,
        epsilon=step.epsilon,
        **{name: getattr(step, name) for name in numbers},
    )
    for part, name in step.tensors.items():
        setattr(made, part, graph.tensors[name].ctypes.data)
    return made
