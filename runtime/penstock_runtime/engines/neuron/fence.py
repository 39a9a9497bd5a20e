"""The comparison with fp32 on the device, before a pod is ready: a few inputs with the answers of the fp32 model.

The guard of the optimisation compares a compiled model with fp32 where it was compiled, on a host without the device.
So the device's own answers are compared here, on each copy and in each shape.

The file has the int32 arrays `input_ids`, `attention_mask` and `token_type_ids` [rows, tokens], padded on the right,
and one float32 array `output:NAME` for each output: [rows, ...], [rows, tokens, ...] or [masks, ...].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import ArtefactError
from penstock.manifest import Axes, GraphIO
from penstock_runtime.rows import Batch, Float, Outputs

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_OUTPUT = "output:"


@dataclass(frozen=True)
class Fence:
    """Inputs and the fp32 model's answers."""

    batch: Batch
    outputs: Outputs


def write_fence(path: Path, batch: Batch, outputs: Outputs) -> None:
    """Write the file."""
    arrays: dict[str, np.ndarray] = {name: getattr(batch, name).astype(np.int32) for name in _INPUTS}
    arrays |= {f"{_OUTPUT}{name}": np.asarray(values, np.float32) for name, values in outputs.items()}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type] # the stubs take the names for options


def read_fence(path: Path, io: GraphIO) -> Fence:
    """Read the file; ArtefactError if it cannot be read, or has not the outputs of `io`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            batch = Batch(*(file[name].astype(np.int64) for name in _INPUTS))
            outputs = {name: file[f"{_OUTPUT}{name}"].astype(np.float32) for name in io.outputs}
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ArtefactError(f"{path} cannot be read: {error}", remedy="Run penstock optimize again") from error
    return Fence(batch, outputs)


def largest_error(fence: Fence, io: GraphIO, found: Mapping[str, Float]) -> float:
    """The largest relative error of an answer: norm of the difference by norm of the fp32 answer, over real tokens.

    Infinite for answers of another shape, or with values that are not finite.
    """
    lengths = fence.batch.attention_mask.sum(axis=1)
    worst = 0.0
    for name, axes in io.outputs.items():
        wanted, given = fence.outputs[name], found[name]
        if wanted.shape != given.shape or not np.isfinite(given).all():
            return float("inf")
        for row in range(wanted.shape[0]):
            end = int(lengths[row]) if axes is Axes.TOKENS else None
            expected, actual = wanted[row][:end], given[row][:end]
            norm = float(np.linalg.norm(expected))
            difference = float(np.linalg.norm(actual - expected))
            worst = max(worst, difference / norm if norm else difference)
    return worst
