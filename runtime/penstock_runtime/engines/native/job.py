"""One batch on its way through the library, with all the memory that it needs there."""

from __future__ import annotations

import ctypes

import numpy as np

from penstock_runtime.engines.native.graph_file import Output
from penstock_runtime.engines.native.library import CJob, PoolingKind, Status
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import POOLED, Batch, Float, Int, Outputs, Pooling

_POOLINGS = {Pooling.MEAN: PoolingKind.MEAN, Pooling.CLS: PoolingKind.CLS}
"""What the library does; other poolings are done elsewhere."""
_Start = ctypes.c_char * 0
"""Of an array of any size, also of none."""


class NativeJob:
    """Keep it until it has run: the library reads and writes what it holds."""

    __slots__ = ("_inputs", "_output", "_pooling", "_values", "record")

    def __init__(self, model: int, batch: Batch, output: Output, width: int, *, threads: int, company: bool) -> None:
        """`width`: of the output's buffer, floats a line; `threads` and `company` as in native.h."""
        ids, mask, types = map(_numbers, (batch.input_ids, batch.attention_mask, batch.token_type_ids))
        rows, tokens = ids.shape
        pooling = pooling_of(batch.pooling, output)
        lines = (rows,) if pooling or output.per_row else (rows, tokens)
        if output.chosen_id >= 0:
            lines = (int(np.count_nonzero(ids == output.chosen_id)),)
        self._inputs = ids, mask, types
        self._output = output
        self._pooling = pooling
        self._values: Float = np.empty((*lines, width), np.float32)
        self.record = CJob(
            model=model,
            ids=_address(ids),
            mask=_address(mask),
            types=_address(types),
            result=_address(self._values),
            floats=self._values.size,
            rows=rows,
            tokens=tokens,
            threads=threads,
            company=company,
            pooling=pooling,
        )

    @property
    def outputs(self) -> Outputs:
        """What came of it, once it has run: each array its own memory. InferenceFailed when it could not."""
        status = self.record.status
        if status != Status.OK:
            raise failure_of(status, f"{self.record.rows} x {self.record.tokens} tokens", self._output.name)
        values, output = self._values, self._output
        if self._pooling:
            return {POOLED: values[:, : output.width]}
        if output.columns:
            return {name: np.ascontiguousarray(values[..., at]) for at, name in enumerate(output.columns)}
        return {output.name: values[..., : output.width]}


def failure_of(status: int, size: str, output: str) -> InferenceFailed:
    """Why a run of that size gave nothing; `output` is the name of the graph's."""
    match status:
        case Status.NO_MEMORY:
            return InferenceFailed(f"native: no memory for {size}", remedy="Allow the pod more memory")
        case Status.BAD_MODEL:
            return InferenceFailed(
                f"native: the graph's output {output} has not as many lines as its file says",
                remedy="Run penstock optimize again",
            )
        case _:
            return InferenceFailed(
                f"native: {size} hold an id that the model has no vector for, or are too many",
                remedy="Send ids of the model's own tokenizer, and rows within its length",
            )


def pooling_of(wanted: Pooling | None, output: Output) -> PoolingKind:
    """What the library is asked for. `EVERY` where it does not do what is wanted, or nothing is."""
    if wanted is None or output.per_row or output.columns or output.chosen_id >= 0:
        return PoolingKind.EVERY
    return _POOLINGS.get(wanted, PoolingKind.EVERY)


def _numbers(values: Int) -> Int:
    # A copy, since `_address` takes only what may be written, and what is shared may not.
    return np.array(values, np.int64, order="C")


def _address(array: Int | Float) -> int:
    # Not `array.ctypes`, which is Python: a tenth of all that is around the run of a short row.
    return ctypes.addressof(_Start.from_buffer(array.data))
