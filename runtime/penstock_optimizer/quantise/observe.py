"""Runs a float graph in ONNX Runtime over calibration rows and keeps what its activations reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from penstock_optimizer.quantise.seen import Seen, Watch
from penstock_runtime.batching.collate import collate
from penstock_runtime.engines.grid import feed as graph_feed
from penstock_runtime.rows import Float, Row

LARGE = 1_500_000_000
"""Bytes of a graph beyond which its weights go to a separate file: protobuf ends at 2 GB."""
SAMPLE_TOKENS = 2048
"""Of each activation: enough to know how its channels vary together, for layers of up to some 4,000 inputs."""
PASS_BYTES = 400_000_000


def feed(row: Row, inputs: Sequence[str]) -> dict[str, Any]:
    """One row as a batch of one: int64 [1, tokens] for each of the graph's inputs."""
    return dict(graph_feed(collate([row]), inputs))


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
    model: Any, values: Sequence[str], inputs: Sequence[str], rows: Sequence[Row], *, threads: int, scratch: Path
) -> dict[str, Seen]:
    """What each value reaches over the rows. `scratch` is a file path to write and remove.

    Over the rows several times when the samples of one would take more memory than `PASS_BYTES`.
    """
    tokens = max(SAMPLE_TOKENS, len(rows))
    result: dict[str, Seen] = {}
    try:
        save(_watched(model, values), scratch)
        running = session(scratch, threads)
        first = running.run(list(values), feed(rows[0], inputs))
        bytes_each = {value: array.shape[-1] * tokens * 4 for value, array in zip(values, first, strict=True)}
        for some in _passes(bytes_each):
            watches = {value: Watch(texts=len(rows), tokens=tokens) for value in some}
            for row in rows:
                for watch, array in zip(watches.values(), running.run(some, feed(row, inputs)), strict=True):
                    watch.add(array)
            result |= {value: watch.seen() for value, watch in watches.items()}
    finally:
        for path in (scratch, weights_file(scratch)):
            path.unlink(missing_ok=True)
    return result


def _watched(model: Any, values: Sequence[str]) -> Any:
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    floats = onnx.TensorProto.FLOAT
    watched.graph.output.extend(onnx.helper.make_tensor_value_info(value, floats, None) for value in values)
    return watched


def _passes(bytes_each: Mapping[str, int]) -> list[list[str]]:
    passes: list[list[str]] = [[]]
    taken = 0
    for value, size in bytes_each.items():
        if passes[-1] and taken + size > PASS_BYTES:
            passes.append([])
            taken = 0
        passes[-1].append(value)
        taken += size
    return passes


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


def weights_file(path: Path) -> Path:
    """Where the weights of a large graph stand."""
    return path.with_name(f"{path.name}.data")


def save(model: Any, path: Path) -> None:
    """Write a graph; its weights to a separate file when protobuf's 2 GB would not hold them."""
    if model.ByteSize() > LARGE:
        onnx.save_model(model, str(path), save_as_external_data=True, location=weights_file(path).name)
    else:
        path.write_bytes(model.SerializeToString())
