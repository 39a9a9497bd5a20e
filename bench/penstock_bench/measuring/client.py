"""The client of a comparison: a process that sends one cell after the other, on CPUs of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from penstock.errors import PenstockError
from penstock_bench.measuring.cell import CellResult, CellSpec
from penstock_optimizer.candidate.isolation import Worker, WorkerFailed

SPARE_SECONDS = 60.0
"""Beyond a cell's own limits: starting, reading a long specification, a busy machine."""


class MeasurementFailed(PenstockError):
    """Nothing was measured: the client or a server gave up."""


class Client:
    """The sending process (`sender`). A context manager; not for several threads."""

    def __init__(self, cpus: Sequence[int] = ()) -> None:
        """`cpus`: keep to these; none: wherever the system puts it."""
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-bench-")
        log = Path(self._scratch.name) / "client.log"
        self._worker = Worker("penstock_bench.measuring.sender:Cells", log=log, cpus=cpus)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._worker.pid

    def close(self) -> None:
        """End the process."""
        self._worker.close()
        self._scratch.cleanup()

    def measure(self, spec: CellSpec) -> CellResult:
        """Send one cell and wait for it; MeasurementFailed when the client itself fails or does not answer in time."""
        limit = spec.maximum_seconds + 3 * spec.timeout_seconds + spec.warm_up_seconds + SPARE_SECONDS
        try:
            value = self._worker.call("measure", spec=spec, timeout_seconds=limit)
        except WorkerFailed as error:
            raise MeasurementFailed(f"the measuring client failed: {error.reason}") from error
        return CellResult.model_validate(value)
