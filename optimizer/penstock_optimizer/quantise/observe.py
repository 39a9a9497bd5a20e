"""Runs a float graph in ONNX Runtime over calibration rows and keeps the range of its activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from penstock_optimizer.export.exported import open_session
from penstock_runtime.batching.collate import collate
from penstock_runtime.engines.grid import feed as graph_feed
from penstock_runtime.rows import Float, Row


@dataclass(frozen=True, eq=False)
class Seen:
    """One activation over the calibration texts, by channel (its last axis). Each text counts the same."""

    low: Float
    """[channels]: the smallest value."""
    high: Float
    """[channels]: the largest value."""
    mean: Float
    """[channels]"""
    samples: Float
    """[n, channels]: some tokens of each text, scaled so that `samples.T @ samples` is a sum of means over texts."""

    @property
    def magnitude(self) -> Float:
        """[channels]: the largest absolute value."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


class Watch:
    """Collects `Seen` text by text. `tokens` is about how many samples there will be at most, over `texts` texts."""

    def __init__(self, *, texts: int, tokens: int) -> None:
        self._most = max(1, tokens // max(texts, 1))
        self._low: list[Float] = []
        self._high: list[Float] = []
        self._mean: list[Float] = []
        self._samples: list[Float] = []

    def add(self, values: Float) -> None:
        """One text's activation, float32 [..., channels]."""
        flat = values.reshape(-1, values.shape[-1])
        self._low.append(flat.min(axis=0))
        self._high.append(flat.max(axis=0))
        self._mean.append(flat.mean(axis=0))
        count = min(len(flat), self._most)
        # Evenly from the first token to the last: special tokens, which stand there, reach the largest values.
        picked = flat[np.linspace(0, len(flat) - 1, count).round().astype(int)]
        self._samples.append(picked / np.float32(np.sqrt(count)))

    def seen(self) -> Seen:
        """The summary. At least one text must have been added."""
        return Seen(
            low=np.min(self._low, axis=0),
            high=np.max(self._high, axis=0),
            mean=np.mean(self._mean, axis=0, dtype=np.float32),
            samples=np.concatenate(self._samples),
        )


def together(several: Sequence[Seen]) -> Seen:
    """Several activations that meet the same weight, as one."""
    return Seen(
        low=np.min([one.low for one in several], axis=0),
        high=np.max([one.high for one in several], axis=0),
        mean=np.mean([one.mean for one in several], axis=0, dtype=np.float32),
        samples=np.concatenate([one.samples for one in several]),
    )


LARGE = 1_500_000_000
"""Bytes of a graph beyond which its weights go to a separate file: protobuf ends at 2 GB."""
SAMPLE_TOKENS = 2048
"""Of each activation: enough to know how its channels vary together, for layers of up to some 4,000 inputs."""
PASS_BYTES = 400_000_000


def feed(row: Row, inputs: Sequence[str]) -> dict[str, Any]:
    """One row as a batch of one: int64 [1, tokens] for each of the graph's inputs."""
    return dict(graph_feed(collate([row]), inputs))


def outputs(path: Path, inputs: Sequence[str], rows: Sequence[Row], threads: int) -> list[list[Float]]:
    """The graph's outputs for each row."""
    running = open_session(path, threads)
    return [running.run(None, feed(row, inputs)) for row in rows]


def observe(
    model: Any, values: Sequence[str], inputs: Sequence[str], rows: Sequence[Row], *, threads: int, scratch: Path
) -> dict[str, Seen]:
    """The range of each value over the rows. `scratch` is a file path to write and remove.

    Over the rows several times when the samples of one would take more memory than `PASS_BYTES`.
    """
    tokens = max(SAMPLE_TOKENS, len(rows))
    result: dict[str, Seen] = {}
    try:
        save(_watched(model, values), scratch)
        running = open_session(scratch, threads)
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
