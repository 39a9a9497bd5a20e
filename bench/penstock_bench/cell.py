"""Cells: one server measured once, for a second or so: the requests, the answers, and the order of measuring.

A comparison is many short cells, alternating between the servers: one server at a time, the other ones stopped,
several rounds; `results` puts them together. `Client` has them sent by a separate process on separate CPUs
(`Cells`), one for a whole comparison. Every latency goes back, so that percentiles can be taken over all rounds of a
setting. (`penstock_optimizer.load` sends one load for longer, with arrivals at random, for the capacity curve.)
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import psutil
from pydantic import Field, model_validator

from penstock.errors import PenstockError
from penstock.manifest import Frozen
from penstock_optimizer.candidate.isolation import Worker, WorkerFailed
from penstock_optimizer.load.client import SWEEP_SECONDS, LoadClient, RequestSource, is_good, status_name
from penstock_optimizer.load.generator import (
    SHORTEST_NANOSECONDS,
    USUAL_NANOSECONDS,
    PreciseTimer,
    ResourceUsage,
    quantile,
    set_time_slice,
)


class CellSpec(RequestSource):
    """What to send, and for how long."""

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
    response_headers: tuple[str, ...] = ()
    """Names of numeric response headers with means in the results, such as `x-inference-time`."""
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
    """Counts and times of the recorded interval."""

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
    """The sending process (`Cells`). A context manager; not for several threads."""

    def __init__(self, cpus: Sequence[int] = ()) -> None:
        """`cpus`: keep to these; none: wherever the system puts it."""
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-bench-")
        log = Path(self._scratch.name) / "client.log"
        self._worker = Worker("penstock_bench.cell:Cells", log=log, cpus=cpus)

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
"""A cell in which other processes took more of the server's CPUs is measured again, once: the quieter one counts."""


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
    """Whether other processes took a noticeable part of the server's CPUs. False where that is not known."""
    if cell.foreign_cores is None or not spec.cpus:
        return False
    return cell.foreign_cores > FOREIGN_SHARE * len(spec.cpus)


MOST_FAILURES = 100
"""Requests in a row without a 2xx answer that end a cell: the rest would measure nothing."""


class UsageSnapshot:
    """Processor time so far: of the server's processes, of this one, of whole CPUs."""

    def __init__(self, pids: Iterable[int], cpus: Iterable[int], *, at: float | None = None) -> None:
        self.client = time.process_time()
        self.server = ResourceUsage.of(pids)
        wanted = list(cpus)
        everything = psutil.cpu_times(percpu=True) if wanted else []
        self.busy = sum(_busy(everything[cpu]) for cpu in wanted if cpu < len(everything))
        # UsageSnapshot takes a millisecond, which must not count as the server's.
        self.at = time.perf_counter() if at is None else at


def _busy(times: object) -> float:
    """Seconds that a CPU was used, and seconds that the hypervisor withheld while it was wanted."""
    return sum(float(getattr(times, name, 0.0)) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


class Sender:
    """Sends one cell."""

    def __init__(self, spec: CellSpec) -> None:
        self._spec = spec
        self._exchanges = LoadClient(spec, self._settled, response_headers=spec.response_headers)
        self._recording_from: int | None = None
        self._before: UsageSnapshot | None = None
        self._after: UsageSnapshot | None = None
        self._over = asyncio.Event()
        self._headers: dict[str, list[float]] = {}
        self._answers = 0
        self._ok = 0
        self._failed_in_a_row = 0
        self._begin = 0.0

    async def run(self) -> CellResult:
        """Send, wait for outstanding answers, and return the measurements. OSError when the port is closed."""
        spec = self._spec
        await self._exchanges.start(spec.clients if spec.per_second is None else 1)
        self._begin = time.perf_counter()
        watch = asyncio.create_task(self._watch())
        if spec.per_second is None:
            for _ in range(spec.clients):
                self._exchanges.launch(time.perf_counter())
            await self._over.wait()
        else:
            await self._send_evenly(spec.per_second)
        await self._exchanges.drain()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await self._exchanges.close()
        return self._result()

    async def _send_evenly(self, per_second: float) -> None:
        """One request every 1/n seconds until the cell is over."""
        due = time.perf_counter()
        fired = asyncio.Event()
        timer = PreciseTimer(asyncio.get_running_loop(), fired.set)
        try:
            while not self._over.is_set():
                fired.clear()
                timer.set(due)
                await fired.wait()
                if not self._over.is_set():
                    self._exchanges.launch(due)
                due += 1 / per_second
        finally:
            timer.close()

    async def _watch(self) -> None:
        """Give up on a cell if its server answers nothing."""
        limit = self._begin + self._spec.maximum_seconds + 2 * self._spec.timeout_seconds
        while not self._over.is_set():
            await asyncio.sleep(SWEEP_SECONDS)
            if time.perf_counter() > limit:
                self._stop(time.perf_counter())

    def _settled(self, request: int, status: int, at: float, numbers: Mapping[str, float]) -> None:
        """Note an outcome, and go on."""
        spec = self._spec
        self._answers += 1
        good = is_good(status)
        self._failed_in_a_row = 0 if good else self._failed_in_a_row + 1
        if self._recording_from is not None and request >= self._recording_from:
            for name, value in numbers.items():
                self._headers.setdefault(name, []).append(value)
        if self._over.is_set():
            return
        if self._recording_from is None:
            if at - self._begin >= spec.warm_up_seconds and self._answers >= spec.warm_up_requests:
                self._recording_from = len(self._exchanges.due)
                self._before = UsageSnapshot(spec.pids, spec.cpus)
        elif request >= self._recording_from:
            self._ok += good
            if self._is_enough(at):
                self._stop(at)
                return
        if self._failed_in_a_row >= MOST_FAILURES:
            self._stop(at)
        elif spec.per_second is None:
            self._exchanges.launch(at)

    def _stop(self, at: float) -> None:
        self._after = UsageSnapshot(self._spec.pids, self._spec.cpus, at=at)
        self._over.set()

    def _is_enough(self, at: float) -> bool:
        assert self._before is not None  # noqa: S101 - set with _recording_from
        elapsed = at - self._before.at
        spec = self._spec
        return elapsed >= spec.maximum_seconds or (elapsed >= spec.seconds and self._ok >= spec.minimum_requests)

    # results

    def _result(self) -> CellResult:
        spec = self._spec
        after = self._after
        assert after is not None  # noqa: S101 - set before `_over`
        before = self._before or after
        # Nothing but failures: then the warm-up never ended, and its failures are all there is to tell.
        seen = self._exchanges
        first = self._recording_from if self._recording_from is not None else 0
        numbers = range(first, len(seen.due))
        within = [number for number in numbers if seen.done[number] <= after.at]
        good = [number for number in numbers if is_good(seen.status[number])]
        failures = Counter(status_name(seen.status[number]) for number in numbers if not is_good(seen.status[number]))
        # With several clients, answers to requests of the warm-up count too: the server computed them in this time.
        completed = sum(
            1
            for done, status in zip(seen.done, seen.status, strict=True)
            if before.at < done <= after.at and is_good(status)
        )
        elapsed = max(after.at - before.at, 1e-9)
        server = after.server.seconds - before.server.seconds if spec.pids else None
        client = after.client - before.client
        even = spec.per_second is not None
        origin = seen.due if even else seen.sent
        lags = sorted(seen.sent[number] - seen.due[number] for number in within if seen.sent[number]) if even else []
        return CellResult(
            seconds=elapsed,
            latencies_milliseconds=tuple((seen.done[number] - origin[number]) * 1e3 for number in good),
            ended_seconds=tuple(seen.done[number] for number in good),
            groups=tuple(spec.bodies[number % len(spec.bodies)].group for number in good),
            completed_per_second=completed / elapsed,
            failures=dict(sorted(failures.items())),
            first_failure=seen.first_failure,
            server_cores=None if server is None else server / elapsed,
            server_cpu_milliseconds=None if server is None or not completed else server / completed * 1e3,
            server_rss_bytes=after.server.resident_bytes or None,
            client_cores=client / elapsed,
            foreign_cores=self._foreign(before, after, elapsed),
            send_lag_p99_milliseconds=quantile(lags, 0.99) * 1e3 if lags else 0.0,
            header_means={name: sum(values) / len(values) for name, values in self._headers.items()},
        )

    def _foreign(self, before: UsageSnapshot, after: UsageSnapshot, elapsed: float) -> float | None:
        """The share of the server's CPUs that other processes took. This process is not one of them."""
        if not self._spec.cpus or not self._spec.pids:
            return None
        ours = after.server.seconds - before.server.seconds
        if os.sched_getaffinity(0) & set(self._spec.cpus):
            ours += after.client - before.client
        return max(0.0, (after.busy - before.busy - ours) / elapsed)


async def send_cell(spec: CellSpec) -> CellResult:
    """Send one cell from this process."""
    return await Sender(spec).run()


class Cells:
    """Sends cells, one at a time: the object in the client's process."""

    def __init__(self) -> None:
        # A collection pauses for milliseconds; memory is given back between cells.
        gc.disable()

    def measure(self, spec: dict[str, Any]) -> CellResult:
        """Send one cell; `spec` is a CellSpec as JSON."""
        import uvloop

        cell = CellSpec.model_validate(spec)
        goes_first = _go_first(cell)
        try:
            result: CellResult = uvloop.run(send_cell(cell))
        except OSError as error:
            # The port is closed: a result, which the caller reports with the server's name.
            return CellResult(seconds=0.0, failures={"unreachable": 1}, first_failure=str(error))
        finally:
            gc.collect()
        return result.model_copy(update={"client_goes_first": goes_first})


def _go_first(spec: CellSpec) -> bool:
    """Where this process has separate CPUs, other programs there should not make the server look slow. Where it
    shares the server's, it waits like any client."""
    apart = bool(spec.cpus) and not os.sched_getaffinity(0) & set(spec.cpus)
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        return apart
    return set_time_slice(SHORTEST_NANOSECONDS if apart else USUAL_NANOSECONDS) and apart
