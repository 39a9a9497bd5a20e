"""The native engine: a mapped graph, opened in the C library.

One model serves all streams: `run` computes in the calling thread, and `run_wide` has the helpers of a small pool,
which sleep between runs. Answers are the same bit for bit on any number of threads and in any company: activations
are quantised token by token, and sums are made in one order.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from penstock.errors import ArtefactError
from penstock.manifest import GraphIO
from penstock.recipe import Recipe
from penstock_runtime.engines.base import EngineFacts, Threads
from penstock_runtime.engines.native.graph_file import Activation, NativeGraph, Operator, Step, output_width, read
from penstock_runtime.engines.native.library import CStep, Kernels, Kind, Status, best_kernels, load_library
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Batch, Int, Outputs

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

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._facts

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._run(batch, self._facts.threads.per_stream)

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`. A second caller at the same time is welcome, but has no helpers."""
        return self._run(batch, self._wide)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._run(batch, self._wide, company=True)

    def close(self) -> None:
        """See `Engine`."""
        model, self._model = self._model, None
        if model is not None:
            self._library.penstock_close(model)

    def _run(self, batch: Batch, threads: int, *, company: bool = False) -> Outputs:
        ids, mask, types = map(_rows, (batch.input_ids, batch.attention_mask, batch.token_type_ids))
        rows, tokens = ids.shape
        output = self._graph.output
        lines = (rows,) if output.per_row else (rows, tokens)
        if output.chosen_id >= 0:
            lines = (np.count_nonzero(ids == output.chosen_id),)
        values = np.empty((*lines, self._width), np.float32)
        status = self._library.penstock_run(
            self._model, ids.ctypes.data, mask.ctypes.data, types.ctypes.data, rows, tokens, threads,
            company, values.ctypes.data, values.size,
        )  # fmt: skip
        if status == Status.NO_MEMORY:
            raise InferenceFailed(f"native: no memory for {rows} x {tokens} tokens", remedy="Allow the pod more memory")
        if status == Status.BAD_MODEL:
            raise InferenceFailed(
                f"native: the graph's output {output.name} has not as many lines as its file says",
                remedy="Run penstock optimize again",
            )
        if status != Status.OK:
            raise InferenceFailed(
                f"native: {rows} x {tokens} tokens hold an id that the model has no vector for, or are too many",
                remedy="Send ids of the model's own tokenizer, and rows within its length",
            )
        if output.columns:
            return {name: np.ascontiguousarray(values[..., at]) for at, name in enumerate(output.columns)}
        return {output.name: values[..., : output.width]}


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
        in_callers_thread=True,
        divides_batches=True,
    )
    try:
        return NativeEngine(graph, facts, helpers=wide, kernels=kernels)
    except ArtefactError as error:
        raise ArtefactError(f"{path}: {error.message}", remedy=error.remedy) from error


def _rows(values: Int) -> Int:
    return np.ascontiguousarray(values, np.int64)


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
