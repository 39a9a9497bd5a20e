"""A cell is one server measured once, for a second or so: what to send, what came back, and whose turn is next.

A comparison is many short cells, taken in turn from the servers compared: one server at a time, the others stopped,
several rounds. `Client` sends them from a process with CPUs of its own (`sender`); `results` puts them together.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from pydantic import Field, model_validator

from penstock.errors import PenstockError
from penstock.manifest import Frozen
from penstock_optimizer.candidate.isolation import Worker, WorkerFailed
from penstock_optimizer.load.client import RequestBody


class CellSpec(Frozen):
    """What to send, and for how long."""

    url: str = Field(pattern=r"^http://")
    bodies: tuple[RequestBody, ...] = Field(min_length=1)
    """Sent in this order, over and over."""
    clients: int = Field(default=1, ge=1)
    """Each sends its next request when its last one was answered."""
    per_second: float | None = Field(default=None, gt=0)
    """Instead of clients: one request every 1/n seconds, whether or not earlier ones were answered."""
    warm_up_seconds: float = Field(default=0.1, ge=0)
    warm_up_requests: int = Field(default=1, ge=0)
    """Requests of both are sent and not recorded. A server that was stopped meanwhile has cold caches."""
    seconds: float = Field(default=1.0, gt=0)
    minimum_requests: int = Field(default=3, ge=1)
    """Continue beyond `seconds` until this many are answered: at 5 s a request, one second shows nothing."""
    maximum_seconds: float = Field(default=60.0, gt=0)
    """Stop by then, whatever was answered."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    headers: dict[str, str] = Field(default_factory=lambda: {"content-type": "application/json"})
    response_headers: tuple[str, ...] = ()
    """Names of numeric response headers whose means are reported, such as `x-inference-time`."""
    pids: tuple[int, ...] = ()
    """Processes of the server: their CPU time and memory are read at both ends of the recorded time."""
    cpus: tuple[int, ...] = ()
    """Logical CPUs of the server: the time that other processes spend on them is read as well."""

    @model_validator(mode="after")
    def _long_enough(self) -> Self:
        if self.maximum_seconds < self.seconds:
            raise ValueError(f"maximum_seconds {self.maximum_seconds:g} is under seconds {self.seconds:g}")
        return self


class CellResult(Frozen):
    """What was seen in the recorded time."""

    seconds: float
    """From the first recorded request to the last recorded answer (closed loop), or the time recorded (even rate)."""
    latencies_milliseconds: tuple[float, ...] = ()
    """Of the 2xx answers, in order of sending."""
    ended_seconds: tuple[float, ...] = ()
    """When each of them had come, on the clock of `perf_counter`, in the same order."""
    groups: tuple[int, ...] = ()
    """Their bodies' groups, in the same order."""
    completed_per_second: float = 0.0
    """2xx answers within the recorded time."""
    failures: dict[str, int] = Field(default_factory=dict)
    """Requests without a 2xx answer, by status; `timeout` and `disconnected` where none came."""
    first_failure: str = ""
    """Status and start of the body of the first of them."""
    server_cores: float | None = None
    """CPU seconds of the server's processes per second."""
    server_cpu_milliseconds: float | None = None
    """CPU time of the server's processes per answered request."""
    server_rss_bytes: int | None = None
    client_cores: float = 0.0
    foreign_cores: float | None = None
    """CPUs' worth of time that neither the server nor this client spent on the server's CPUs: other processes, and what
    the hypervisor took away. Noise."""
    client_goes_first: bool = False
    """Whether the client had priority over other programs on its CPUs: by a short time slice (`load.time_slice`), or
    because it was started with real-time priority."""
    send_lag_p99_milliseconds: float = 0.0
    """Even rate: how late the client itself was."""
    header_means: dict[str, float] = Field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Requests without a 2xx answer."""
        return sum(self.failures.values())


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
        self._worker = Worker("penstock_bench.sender:Cells", log=log, cpus=cpus)

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


FOREIGN_SHARE = 0.08
"""A cell in which others took more than this of the server's CPUs is measured again, once: the quieter one counts."""


class Measured(Protocol):
    """What `Server` is to this module."""

    @property
    def name(self) -> str:
        """In results."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """Its CPUs."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes."""

    def pause(self) -> None:
        """Stop it."""

    def resume(self) -> None:
        """Let it go on."""

    def confine(self) -> None:
        """Keep its threads on its CPUs."""


@dataclass(frozen=True)
class Turn:
    """A server and what to send it."""

    server: Measured
    spec: CellSpec
    """Without `pids` and `cpus`: they are the server's."""


def measure_in_turn(
    turns: Sequence[Turn],
    measure: Callable[[CellSpec], CellResult],
    *,
    rounds: int,
    patience_seconds: float = 120.0,
    clock: Callable[[], float] = time.monotonic,
) -> Mapping[str, tuple[CellResult, ...]]:
    """The cells of each server by name, in the order of the rounds. Servers are paused before and after.

    Every round measures every server, the even ones in reverse order, so that a drift of the machine meets all alike.
    No round is begun after `patience_seconds`. A server that answers nothing in a round is left out of the next ones.
    """
    results: dict[str, list[CellResult]] = {turn.server.name: [] for turn in turns}
    for turn in turns:
        turn.server.pause()
    begun = clock()
    for number in range(rounds):
        if number and clock() - begun > patience_seconds:
            break
        for turn in turns if number % 2 == 0 else reversed(turns):
            cells = results[turn.server.name]
            if cells and not cells[-1].latencies_milliseconds:
                continue
            cells.append(_measure(turn, measure))
    return {name: tuple(cells) for name, cells in results.items()}


def _measure(turn: Turn, measure: Callable[[CellSpec], CellResult]) -> CellResult:
    server = turn.server
    server.resume()
    try:
        server.confine()
        spec = turn.spec.model_copy(update={"pids": server.pids, "cpus": server.cpus})
        cell = measure(spec)
        if is_disturbed(cell, spec):
            again = measure(spec)
            if (again.foreign_cores or 0.0) < (cell.foreign_cores or 0.0):
                return again
        return cell
    finally:
        server.pause()


def is_disturbed(cell: CellResult, spec: CellSpec) -> bool:
    """Whether others took a noticeable part of the server's CPUs. False where that is not known."""
    if cell.foreign_cores is None or not spec.cpus:
        return False
    return cell.foreign_cores > FOREIGN_SHARE * len(spec.cpus)
