"""Collates rows into a padded batch, and splits the outputs of a batch by rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.manifest import Axes, GraphIO
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import POOLED, Batch, Float, Int, Masked, Outputs, Row

# Shared, since making arrays of ones and zeros costs more than the rest of collating a short row.
_LONGEST_SHARED = 4096
_ONES = np.ones((1, _LONGEST_SHARED), dtype=np.int64)
_ZEROS = np.zeros((1, _LONGEST_SHARED), dtype=np.int64)
for _shared in (_ONES, _ZEROS):
    _shared.setflags(write=False)


def collate(rows: Sequence[Row]) -> Batch:
    """A batch of rows, the shorter ones padded on the right with zeros (masked, so the value does not matter).

    Mask and types may be views of shared read-only memory.
    """
    if len(rows) == 1:
        row = rows[0]
        width = row.length
        ids = np.array([row.ids], dtype=np.int64)
        types = _part(_ZEROS, width) if row.type_ids is None else np.array([row.type_ids], dtype=np.int64)
        mask = _part(_ONES, width)
        if row.attended is not None:
            mask = mask.copy()
            mask[:, row.attended :] = 0
        return Batch(ids, mask, types, pooling=row.pooling)
    width = max(row.length for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    types = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : row.length] = row.ids
        mask[index, : row.length if row.attended is None else row.attended] = 1
        if row.type_ids is not None:
            types[index, : row.length] = row.type_ids
    (pooling, *others) = {row.pooling for row in rows}
    return Batch(ids, mask, types, pooling=None if others else pooling)


def split(outputs: Outputs, rows: Sequence[Row], io: GraphIO) -> list[Outputs]:
    """Each row's part of every output, without padding: views of the batch's arrays. Only `POOLED` if that is present.

    InferenceFailed if the shapes differ from `io`.
    """
    if POOLED in outputs:
        vectors = outputs[POOLED]
        _expect(POOLED, vectors, 0, len(rows))
        return [{POOLED: vector} for vector in vectors]
    divided = {name: _divide(name, outputs[name], rows, axes) for name, axes in io.outputs.items()}
    if len(rows) == 1:
        return [{name: parts[0] for name, parts in divided.items()}]
    return [{name: parts[index] for name, parts in divided.items()} for index in range(len(rows))]


def run_rows(run: Callable[[Batch], Outputs], io: GraphIO, rows: Sequence[Row]) -> list[Outputs]:
    """Run `rows` as one batch, padded to the longest; each row's outputs. `run`: such as `Engine.run`."""
    return split(run(collate(rows)), rows, io)


def _part(shared: Int, width: int) -> Int:
    return shared[:, :width] if width <= _LONGEST_SHARED else np.full((1, width), shared[0, 0], dtype=np.int64)


def _divide(name: str, values: Float, rows: Sequence[Row], axes: Axes) -> list[Float]:
    if axes is Axes.MASKS:
        counts = [len(row.masks) if isinstance(row, Masked) else 0 for row in rows]
        _expect(name, values, 0, sum(counts))
        ends = np.cumsum(counts).tolist()
        return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]
    _expect(name, values, 0, len(rows))
    if axes is Axes.ROW:
        return list(values)
    _expect(name, values, 1, max(row.length for row in rows))
    return [values[index, : row.length] for index, row in enumerate(rows)]


def _expect(name: str, values: Float, axis: int, wanted: int) -> None:
    if values.ndim <= axis or values.shape[axis] != wanted:
        raise InferenceFailed(
            f"output {name} has shape {list(values.shape)}: {wanted} was expected on axis {axis}",
            remedy="The artefact's manifest describes another graph: run penstock optimize again",
        )
