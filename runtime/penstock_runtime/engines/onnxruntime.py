"""The ONNX Runtime engine. The only module that imports onnxruntime.

All streams share one session: `run` is thread-safe, and the weights are in memory once. With `wide` the session's pool
has all threads, so that idle ones help the current run: a single run gets all cores, busy streams one each
(docs/decisions/engine-threads.md has the measurements).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnxruntime as ort

from penstock.errors import ArtefactError
from penstock.manifest import GraphIO
from penstock.recipe import Precision, Recipe
from penstock_runtime.engines.base import EngineFacts, Streams, Threads
from penstock_runtime.engines.grid import feed
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.models.graph import count_operators
from penstock_runtime.rows import Batch, Outputs

_ERRORS_ONLY = 3
"""Severity level of the library's log."""

FUSED_OPERATORS = frozenset({
    "Attention", "QAttention", "MultiHeadAttention", "EmbedLayerNormalization", "QEmbedLayerNormalization",
    "SkipLayerNormalization", "LayerNormalization", "Gelu", "BiasGelu", "FastGelu", "FusedMatMul", "FusedGemm",
    "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QLinearMatMul", "QGemm", "QLinearAdd", "MatMulNBits",
})  # fmt: skip
"""Operators that replace several of a plain export, or an int8 product."""


class OnnxRuntimeEngine:
    """An inference session. Create it with `load`."""

    def __init__(self, session: Any, io: GraphIO, facts: EngineFacts) -> None:
        self._session = session
        self._inputs = io.inputs
        self._outputs = list(io.outputs)
        self._facts = facts

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._facts

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        try:
            values = self._session.run(self._outputs, feed(batch, self._inputs))
        except Exception as error:  # the library raises a dozen types of errors
            raise InferenceFailed(f"onnxruntime: {error}", remedy="Report it with the model and the input") from error
        return dict(zip(self._outputs, values, strict=True))

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`: the session's pool has all the threads."""
        return self.run(batch)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`: the library cannot."""
        return self.run(batch)

    def start_streams(self) -> Streams:
        """See `Engine`."""
        return ThreadStreams(self)

    def close(self) -> None:
        """See `Engine`."""
        self._session = None


def load(path: Path, io: GraphIO, recipe: Recipe, threads: Threads, *, wide: bool = False) -> OnnxRuntimeEngine:
    """See `load_engine`."""
    pool = threads.streams * threads.per_stream if wide else threads.per_stream
    session = _open(path, _options(pool))
    _check(path, io, session)
    precision = "f32" if recipe.precision is Precision.FP32 else "i8"
    return OnnxRuntimeEngine(session, io, EngineFacts("onnxruntime", ort.__version__, threads, precision))


def fused_nodes(path: Path) -> dict[str, int]:
    """The number of nodes of each fused operator after the session's graph optimisation. Loads the graph again."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "optimised.onnx"
        options = _options(1)
        options.optimized_model_filepath = str(saved)
        # Weights go to a separate file, so that the graph file is small.
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", "optimised.onnx.data"
        )
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        _ = _open(path, options)
        found = count_operators(saved)
    return {name: count for name, count in sorted(found.items()) if name in FUSED_OPERATORS}


def _options(pool: int) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    # Explicit counts: the defaults ignore the cgroup, use all cores of the host and pin threads to them.
    options.intra_op_num_threads = pool
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # A spinning thread takes the core from another stream and the HTTP server: 20 to 30 % of the throughput.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # A pattern is stored for every new shape: unbounded memory, and not faster for changing lengths.
    options.enable_mem_pattern = False
    # The arena keeps its peak size, which the plan's token budget bounds; without it each run has page faults for its
    # buffers (a quarter more CPU).
    options.enable_cpu_mem_arena = True
    options.log_severity_level = _ERRORS_ONLY
    return options


def _open(path: Path, options: Any) -> Any:
    if not path.is_file():
        raise ArtefactError(f"{path} is missing", remedy="Run penstock optimize again")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library raises a dozen types of errors
        raise ArtefactError(
            f"{path} does not load in onnxruntime {ort.__version__}: {error}", remedy="Run penstock optimize again"
        ) from error


def _check(path: Path, io: GraphIO, session: Any) -> None:
    """ArtefactError if the graph's inputs and outputs differ from `io`."""
    wanted = {value.name for value in session.get_inputs()}
    if wanted != set(io.inputs):
        raise ArtefactError(
            f"{path} takes {sorted(wanted)}, but is described as taking {sorted(io.inputs)}",
            remedy="Run penstock optimize again",
        )
    given = {value.name: value.type for value in session.get_outputs()}
    for name in io.outputs:
        if given.get(name) != "tensor(float)":
            raise ArtefactError(
                f"{path}: output {name} is {given.get(name, 'missing')}, not tensor(float)",
                remedy="Run penstock optimize again",
            )
