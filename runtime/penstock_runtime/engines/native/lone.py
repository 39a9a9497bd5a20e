"""One row in the caller's thread, whose result is one line: with what a job needs made once, and without a batch.

A batch of one row makes six arrays and asks for the address of four, in code that has to be fetched anew, since the
last run's weights have pushed it out of the caches (docs/decisions/http-front-end.md).
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import numpy as np

from penstock_runtime.engines.native.graph_file import Output
from penstock_runtime.engines.native.job import failure_of, pooling_of
from penstock_runtime.engines.native.library import CJob, Status
from penstock_runtime.rows import POOLED, Float, Outputs, Row

LONGEST_TOKENS = 4096
"""Of a row that is for here."""
IDS = "q"
"""Array type of 64-bit whole numbers."""


class LoneRows:
    """For one thread at a time. Keeps the record of the last run; what that had is not read again."""

    def __init__(self, library: Any, model: int, output: Output, width: int) -> None:
        """`width`: of the output's buffer, floats a line."""
        self._run = library.penstock_run
        self._output = output
        self._is_line = output.per_row and not output.columns and output.chosen_id < 0
        self._mask = array(IDS, [1]) * LONGEST_TOKENS
        self._values: Float = np.empty(width, np.float32)
        self._line: Float = self._values[: output.width]
        self._record = CJob(
            model=model,
            mask=self._mask.buffer_info()[0],
            result=self._values.ctypes.data,
            floats=width,
            rows=1,
        )
        self._reference = ctypes.byref(self._record)

    def run(self, row: Row, *, threads: int, company: bool) -> Outputs | None:
        """Its outputs, without the batch's axis, in memory of their own. None for a row that is not for here.

        Raises InferenceFailed as a job does.
        """
        tokens = len(row.ids)
        pooling = pooling_of(row.pooling, self._output)
        if tokens > LONGEST_TOKENS or not (pooling or self._is_line):
            return None
        ids = array(IDS, row.ids)
        types = None if row.type_ids is None else array(IDS, row.type_ids)
        record = self._record
        record.ids = ids.buffer_info()[0]
        record.types = None if types is None else types.buffer_info()[0]
        record.tokens = tokens
        record.threads = threads
        record.company = company
        record.pooling = pooling
        self._run(self._reference)
        status = record.status
        if status != Status.OK:
            raise failure_of(status, f"1 x {tokens} tokens", self._output.name)
        return {POOLED if pooling else self._output.name: self._line.copy()}
