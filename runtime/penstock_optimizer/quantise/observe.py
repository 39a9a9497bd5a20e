"""Runs a float graph in ONNX Runtime over calibration rows and keeps what its activations reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from penstock_optimizer.quantise.linear import Range
from penstock_runtime.batching.rectangle import stack
from penstock_runtime.engines.graph_inputs import feed as graph_feed
from penstock_runtime.rows import Float, Row


def feed(row: Row, inputs: Sequence[str]) -> dict[str, Any]:
    """One row as a batch of one: int64 [1, tokens] for each of the graph's inputs."""
    return dict(graph_feed(stack([row]), inputs))


def session(path: Path, threads: int) -> Any:
    """An ONNX Runtime session on this many threads, quiet but for errors."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def outputs(path: Path, inputs: Sequence[str], rows: Sequence[Row], threads: int) -> list[list[Float]]:
    """The graph's outputs for each row."""
    running = session(path, threads)
    return [running.run(None, feed(row, inputs)) for row in rows]


def observe(
    model: Any, values: Sequence[str], inputs: Sequence[str], rows: Sequence[Row], threads: int, scratch: Path
) -> dict[str, Range]:
    """The range of each value by its last axis. `scratch` is a file path to write and remove."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    watched.graph.output.extend(
        onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None) for value in values
    )
    save(watched, scratch)
    try:
        running = session(scratch, threads)
        low: dict[str, Float] = {}
        high: dict[str, Float] = {}
        for row in rows:
            for value, array in zip(values, running.run(list(values), feed(row, inputs)), strict=True):
                flat = array.reshape(-1, array.shape[-1])
                _widen(low, value, flat.min(axis=0), np.minimum)
                _widen(high, value, flat.max(axis=0), np.maximum)
    finally:
        for path in (scratch, beside(scratch)):
            path.unlink(missing_ok=True)
    return {value: Range(low[value], high[value]) for value in values}


def _widen(seen: dict[str, Float], value: str, now: Float, keep: Any) -> None:
    seen[value] = keep(seen[value], now) if value in seen else now


def difference(expected: Sequence[Sequence[Float]], actual: Sequence[Sequence[Float]]) -> float:
    """The mean over the rows of |actual - expected|^2 / |expected|^2, all outputs of a row together; inf for NaN."""
    total = 0.0
    for row_expected, row_actual in zip(expected, actual, strict=True):
        squared = sum(
            float(np.sum((b - a).astype(np.float64) ** 2)) for a, b in zip(row_expected, row_actual, strict=True)
        )
        norm = sum(float(np.sum(a.astype(np.float64) ** 2)) for a in row_expected)
        total += squared / max(norm, 1e-12)
    return total / len(expected) if np.isfinite(total) else float("inf")


def beside(path: Path) -> Path:
    """Where the weights of a large graph stand."""
    return path.with_name(f"{path.name}.data")


def save(model: Any, path: Path) -> None:
    """Write a graph; weights beside it when protobuf's 2 GB would not hold them."""
    if model.ByteSize() > LARGE:
        onnx.save_model(model, str(path), save_as_external_data=True, location=beside(path).name)
    else:
        path.write_bytes(model.SerializeToString())


LARGE = 1_500_000_000
"""Bytes."""
