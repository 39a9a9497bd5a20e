"""The OpenVINO engine (CPU plugin). The only module of the runtime that imports openvino.

All streams share one compiled model, with one copy of the packed weights. With `wide` a second model with one stream
over all threads is compiled from the same graph, with a second copy of the packed weights (`EngineFacts`).

Lengths are rounded up to a grid, because the plugin compiles its layers for every shape (`engines.grid`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import openvino as ov

from penstock.errors import ArtefactError
from penstock.manifest import Axes, GraphIO
from penstock.recipe import BF16_REST, Precision, Recipe
from penstock_runtime.engines.base import EngineFacts, Streams, Threads
from penstock_runtime.engines.grid import ShapeGrid, feed, pad
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Batch, Float, Int, Outputs

_PRODUCTS = ("FullyConnected", "MatMul")
"""Layers with a run-time precision that counts as the precision of the arithmetic."""


class _FirstRun:
    """Serialises the first run of the process. The binding initialises itself on first use: it holds its lock without
    the GIL, then the GIL without its lock, so that two concurrent first runs deadlock (2026.4)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        if self._over:
            yield
            return
        with self._lock:
            yield
            self._over = True


_FIRST_RUN = _FirstRun()


class OpenVinoEngine:
    """A compiled model and its infer requests. Create it with `load`."""

    def __init__(self, narrow: _Requests, wide: _Requests, facts: EngineFacts) -> None:
        self._narrow = narrow
        self._wide = wide
        self._facts = facts

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._facts

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._narrow.run(batch)

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._wide.run(batch)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`: the library cannot."""
        return self.run(batch)

    def start_streams(self) -> Streams:
        """See `Engine`."""
        return ThreadStreams(self)

    def close(self) -> None:
        """See `Engine`."""
        self._narrow.close()
        self._wide.close()


class _Requests:
    """A pool of infer requests, one for each stream."""

    def __init__(self, compiled: Any, io: GraphIO, streams: int, grid: ShapeGrid) -> None:
        # Inputs by number: looking up names takes half the binding's time of a short run.
        self._inputs = [next(name for name in port.get_names() if name in io.inputs) for port in compiled.inputs]
        self._grid = grid
        self._outputs = [(name, axes, compiled.output(name)) for name, axes in io.outputs.items()]
        self._free: SimpleQueue[Any] = SimpleQueue()
        for _ in range(streams):
            self._free.put(compiled.create_infer_request())

    def run(self, batch: Batch) -> Outputs:
        tokens = batch.input_ids.shape[1]
        longest = self._grid.longest
        if longest is not None and tokens > longest:
            # The plugin would read positions beyond the end of the table, and continue with zeros.
            raise InferenceFailed(f"openvino: {tokens} tokens are more than the model's {longest}")
        padded = pad(batch, self._grid.length(tokens))
        request = self._free.get()
        try:
            with _FIRST_RUN.turn():
                self._mark(request)
                self._infer(request, padded)
                return self._results(request, tokens)
        except RuntimeError as error:
            self._recover(request, padded)
            raise InferenceFailed(f"openvino: {error}", remedy="Report it with the model and the input") from error
        finally:
            self._free.put(request)

    def _infer(self, request: Any, batch: Batch) -> None:
        # Not copied: referenced here and not changed during the run.
        inputs = [_tensor(array) for array in feed(batch, self._inputs).values()]
        for number, tensor in enumerate(inputs):
            request.set_input_tensor(number, tensor)
        # In this thread: an asynchronous run waits until one of the plugin's threads wakes up, which takes 0.3 ms of a
        # short run and a sixth of the throughput of two callers.
        request.infer(share_outputs=True)

    def _mark(self, request: Any) -> None:
        """Overwrite the output of the last run with NaN: with one thread the plugin loses the exceptions of `infer`
        (2026.4), and a failed run would return the previous answer."""
        for _, _, port in self._outputs:
            last = request.get_tensor(port).data
            if last.size:
                last.flat[0] = np.nan

    def _results(self, request: Any, tokens: int) -> Outputs:
        """Copies of the outputs: the next run overwrites the request's memory. RuntimeError if the run failed."""
        results = {}
        for name, axes, port in self._outputs:
            values = request.get_tensor(port).data
            if values.size and np.isnan(values.flat[0]):
                raise RuntimeError(f"{name} is not a number: the run failed, or the model overflows on this input")
            results[name] = np.array(_unpadded(values, axes, tokens))
        return results

    def _recover(self, request: Any, failed: Batch) -> None:
        """Run another shape: after a failure a stream takes the next batch of the same shape for prepared, and fails
        again."""
        shortest = self._grid.length(1)
        tokens = shortest if failed.input_ids.shape[1] != shortest else self._grid.length(shortest + 1)
        other = np.ones((1, tokens), dtype=np.int64)
        with contextlib.suppress(RuntimeError):
            self._infer(request, Batch(other, other, np.zeros_like(other)))

    def close(self) -> None:
        self._outputs = []
        while not self._free.empty():
            self._free.get()


def load(
    path: Path, io: GraphIO, recipe: Recipe, threads: Threads, *, wide: bool = False, max_tokens: int | None = None
) -> OpenVinoEngine:
    """See `load_engine`."""
    if not path.is_file():
        raise ArtefactError(f"{path} is missing", remedy="Run penstock optimize again")
    core = ov.Core()
    try:
        model = core.read_model(str(path))
        _check(path, io, model)
        narrow = core.compile_model(model, "CPU", _properties(recipe, threads))
        # With one stream a single run has all threads already.
        second = wide and threads.streams > 1
        alone = Threads(1, threads.streams * threads.per_stream)
        wider = core.compile_model(model, "CPU", _properties(recipe, alone)) if second else narrow
        precision, fused = _read_back(narrow, recipe)
    except RuntimeError as error:
        raise ArtefactError(
            f"{path} does not load in openvino {ov.get_version()}: {error}", remedy="Run penstock optimize again"
        ) from error
    version = ov.get_version().split("-", maxsplit=1)[0]
    grid = ShapeGrid(max_tokens)
    requests = _Requests(narrow, io, threads.streams, grid)
    return OpenVinoEngine(
        requests,
        _Requests(wider, io, 1, grid) if second else requests,
        EngineFacts("openvino", version, threads, precision, fused, weight_copies=2 if second else 1, grid=grid),
    )


def _tensor(array: Int) -> Any:
    """A tensor on the array's memory, which must be writable."""
    return ov.Tensor(array if array.flags.writeable else array.copy(), shared_memory=True)


def _unpadded(values: Float, axes: Axes, tokens: int) -> Float:
    return values[:, :tokens] if axes is Axes.TOKENS else values


def _properties(recipe: Recipe, threads: Threads) -> dict[str, Any]:
    return {
        "NUM_STREAMS": str(threads.streams),
        "INFERENCE_NUM_THREADS": threads.streams * threads.per_stream,
        # penstock_runtime.host pins the process to its cores; the plugin's pinning would start at core 0 of the
        # machine, and clash with other processes that do the same.
        "ENABLE_CPU_PINNING": False,
        "ENABLE_HYPER_THREADING": False,
        # By default the plugin computes in bf16 if the processor has it: answers would depend on the processor.
        "INFERENCE_PRECISION_HINT": "bf16" if _wants_bf16(recipe) else "f32",
        # ACCURACY also keeps fp32 graphs from being quantised on the fly.
        "EXECUTION_MODE_HINT": "ACCURACY" if recipe.precision is Precision.FP32 else "PERFORMANCE",
    }


def _wants_bf16(recipe: Recipe) -> bool:
    return recipe.precision is Precision.BF16 or BF16_REST in recipe.options


def _check(path: Path, io: GraphIO, model: Any) -> None:
    """ArtefactError if the graph's inputs and outputs differ from `io`."""
    taken = {name for port in model.inputs for name in port.get_names()}
    given = {name for port in model.outputs for name in port.get_names()}
    for what, wanted, found in (("takes", set(io.inputs), taken), ("gives", set(io.outputs), given)):
        if not wanted <= found:
            raise ArtefactError(
                f"{path} {what} {sorted(found)}, but is described with {sorted(wanted)}",
                remedy="Run penstock optimize again",
            )
    if len(model.inputs) != len(io.inputs):
        raise ArtefactError(
            f"{path} takes {sorted(taken)}, but is described as taking {sorted(io.inputs)}",
            remedy="Run penstock optimize again",
        )


def _read_back(compiled: Any, recipe: Recipe) -> tuple[str, dict[str, int]]:
    """The actual precision of most matrix products, and the number of each fused layer."""
    precisions: Counter[str] = Counter()
    layers: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        layer = str(info["layerType"].astype(str))
        layers[layer] += 1
        if layer in _PRODUCTS:
            precisions[str(info["runtimePrecision"].astype(str))] += 1
    found = precisions.most_common(1)[0][0] if precisions else "f32"
    fused = {name: layers[name] for name in ("FullyConnected", "ScaledDotProductAttention", "MHA") if layers[name]}
    # Weights in int8 with dynamically quantised activations show as f32: the plugin reports the inputs' precision.
    return ("i8" if found in {"u8", "i8"} or recipe.precision is Precision.INT8_ROWWISE else found), fused
