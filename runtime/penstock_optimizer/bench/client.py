"""The client of a comparison: starts the sending process, gives it one cell after the other."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from penstock.errors import PenstockError
from penstock_optimizer.bench.cell import CellResult, CellSpec

SPARE_SECONDS = 60.0
"""Beyond a cell's own limits: starting, reading a long specification, a busy machine."""


class MeasurementFailed(PenstockError):
    """Nothing was measured: the client or the server gave up."""


class Client:
    """The sending process. A context manager; not for several threads."""

    def __init__(self, cpus: Iterable[int] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock_optimizer.bench.sender", *map(str, sorted(cpus))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def measure(self, spec: CellSpec) -> CellResult:
        """Send one cell and wait for it; MeasurementFailed when the client itself fails or does not answer in time."""
        process = self._process
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        limit = spec.maximum_seconds + 3 * spec.timeout_seconds + spec.warm_up_seconds + SPARE_SECONDS
        try:
            process.stdin.write(spec.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise MeasurementFailed(f"the measuring client ended early (status {process.poll()})") from error
        if not select.select([process.stdout], [], [], limit)[0]:
            raise MeasurementFailed(f"the measuring client did not answer within {limit:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise MeasurementFailed(f"the measuring client ended early (status {process.wait(timeout=10)})")
        return CellResult.model_validate_json(line)
