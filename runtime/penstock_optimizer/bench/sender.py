"""Sends the requests of cells and times the answers; runs in the client's process.

One process serves a whole comparison, since a comparison is hundreds of cells of a second. Every latency goes back, so
that percentiles can be taken over all rounds of a setting.

(`penstock_optimizer.load` sends one load for longer, with arrivals at random: that is what capacity means.)
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import psutil

from penstock_optimizer.bench.cell import CellResult, CellSpec
from penstock_optimizer.load.connection import Connection, request_bytes
from penstock_optimizer.load.spec import ClosedLoop, LoadSpec
from penstock_optimizer.load.summary import quantile
from penstock_optimizer.load.timer import PreciseTimer

TIMED_OUT = -1
LOST = 0
HOPELESS = 100
"""So many requests in a row without a 2xx answer end a cell: nothing is measured any more."""


class Usage:
    """Processor time so far: of the server's processes, of this one, of whole CPUs."""

    def __init__(self, pids: Iterable[int], cpus: Iterable[int], *, at: float | None = None) -> None:
        self.client = time.process_time()
        self.server = 0.0
        self.resident = 0
        for pid in pids:
            try:
                process = psutil.Process(pid)
                times = process.cpu_times()
                self.server += times.user + times.system
                self.resident += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        wanted = list(cpus)
        everything = psutil.cpu_times(percpu=True) if wanted else []
        self.busy = sum(_busy(everything[cpu]) for cpu in wanted if cpu < len(everything))
        # Reading takes a millisecond, which must not count as the server's.
        self.at = time.perf_counter() if at is None else at


def _busy(times: object) -> float:
    """Seconds that a CPU was used, and seconds that the hypervisor withheld while it was wanted."""
    return sum(float(getattr(times, name, 0.0)) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


class Sender:
    """Sends one cell."""

    def __init__(self, spec: CellSpec) -> None:
        self._spec = spec
        request = LoadSpec(url=spec.url, bodies=spec.bodies, pattern=ClosedLoop(clients=1), headers=spec.headers)
        self._payloads = request_bytes(request)
        parts = urlsplit(spec.url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._sent: list[float] = []
        self._done: list[float] = []
        self._status: list[int] = []
        self._due: list[float] = []
        self._busy: dict[Connection, int] = {}
        self._idle: list[Connection] = []
        self._waiting: list[int] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._recording_from: int | None = None
        self._before: Usage | None = None
        self._after: Usage | None = None
        self._stopped = False
        self._over = asyncio.Event()
        self._quiet = asyncio.Event()
        self._headers: dict[str, list[float]] = {}
        self._first_failure = ""
        self._answers = 0
        self._ok = 0
        self._failed_in_a_row = 0
        self._begin = 0.0

    async def run(self) -> CellResult:
        """Send, wait for what is still out, and say what was seen."""
        spec = self._spec
        count = spec.clients if spec.per_second is None else 1
        self._idle = list(await asyncio.gather(*(self._connect() for _ in range(count))))
        self._begin = time.perf_counter()
        sweeper = asyncio.create_task(self._sweep())
        pace = asyncio.create_task(self._send_evenly(spec.per_second)) if spec.per_second else None
        if pace is None:
            for _ in range(spec.clients):
                self._send_next(time.perf_counter())
        await self._over.wait()
        if pace is not None:
            await pace
        if self._busy or self._waiting:
            await self._quiet.wait()
        sweeper.cancel()
        await asyncio.gather(sweeper, *self._opening, return_exceptions=True)
        for connection in [*self._idle, *self._busy]:
            connection.abort()
        return self._result()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._answered, self._lost, self._spec.response_headers), *self._address
        )
        return connection

    # sending

    def _send_next(self, due: float) -> None:
        """One more request, on an idle connection or, at an even rate, on a new one when none is idle."""
        request = len(self._sent)
        self._due.append(due)
        self._sent.append(0.0)
        self._done.append(0.0)
        self._status.append(LOST)
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                self._send(connection, request)
                return
        self._waiting.append(request)
        task = asyncio.get_running_loop().create_task(self._open())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        try:
            connection = await self._connect()
        except OSError:
            if self._waiting:
                self._settle(self._waiting.pop(0), LOST, time.perf_counter())
            return
        if self._waiting:
            self._send(connection, self._waiting.pop(0))
        else:
            self._idle.append(connection)

    def _send(self, connection: Connection, request: int) -> None:
        self._busy[connection] = request
        connection.send(request, self._payloads[request % len(self._payloads)])
        self._sent[request] = connection.sent_at

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
                if not self._stopped:
                    self._send_next(due)
                due += 1 / per_second
        finally:
            timer.close()

    # answers

    def _answered(self, connection: Connection, request: int, status: int, at: float) -> None:
        self._busy.pop(connection, None)
        if self._recording_from is not None and request >= self._recording_from:
            for name, value in connection.numbers.items():
                self._headers.setdefault(name, []).append(value)
        if status >= 300 and not self._first_failure:
            self._first_failure = f"{status} {connection.failure.decode(errors='replace')}".strip()
        if not connection.closed:
            self._idle.append(connection)
        self._settle(request, status, at)

    def _lost(self, connection: Connection) -> None:
        self._busy.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def _settle(self, request: int, status: int, at: float) -> None:
        """Record an outcome, and go on."""
        spec = self._spec
        self._done[request] = at
        self._status[request] = status
        self._answers += 1
        good = 200 <= status < 300
        self._failed_in_a_row = 0 if good else self._failed_in_a_row + 1
        if self._stopped:
            if not self._busy and not self._waiting:
                self._quiet.set()
            return
        if self._recording_from is None:
            if at - self._begin >= spec.warm_up_seconds and self._answers >= spec.warm_up_requests:
                self._recording_from = len(self._sent)
                self._before = Usage(spec.pids, spec.cpus)
        elif request >= self._recording_from:
            self._ok += good
            if self._is_enough(at):
                self._stop(at)
                return
        if self._failed_in_a_row >= HOPELESS:
            self._stop(at)
        elif spec.per_second is None:
            self._send_next(at)

    def _stop(self, at: float) -> None:
        self._stopped = True
        self._after = Usage(self._spec.pids, self._spec.cpus, at=at)
        self._over.set()

    def _is_enough(self, at: float) -> bool:
        assert self._before is not None  # noqa: S101 - set with _recording_from
        elapsed = at - self._before.at
        spec = self._spec
        return elapsed >= spec.maximum_seconds or (elapsed >= spec.seconds and self._ok >= spec.minimum_requests)

    async def _sweep(self) -> None:
        """Give up on requests over their time limit, and on cells whose server answers nothing."""
        while True:
            await asyncio.sleep(0.1)
            now = time.perf_counter()
            for connection, request in list(self._busy.items()):
                if now - self._due[request] > self._spec.timeout_seconds:
                    self._busy.pop(connection, None)
                    connection.abort()
                    self._settle(request, TIMED_OUT, now)
            if not self._stopped and now - self._begin > self._spec.maximum_seconds + 2 * self._spec.timeout_seconds:
                self._stop(now)

    # results

    def _result(self) -> CellResult:
        spec = self._spec
        after = self._after
        assert after is not None  # noqa: S101 - set before `_over`
        before = self._before or after
        # Nothing but failures: then the warm-up never ended, and its failures are all there is to tell.
        first = self._recording_from if self._recording_from is not None else 0
        within = [number for number in range(first, len(self._sent)) if self._done[number] <= after.at]
        good = [number for number in range(first, len(self._sent)) if 200 <= self._status[number] < 300]
        failures: dict[str, int] = {}
        for number in range(first, len(self._sent)):
            if not 200 <= self._status[number] < 300:
                name = {LOST: "disconnected", TIMED_OUT: "timeout"}.get(self._status[number], str(self._status[number]))
                failures[name] = failures.get(name, 0) + 1
        # With several clients, answers to requests of the warm-up count too: they are what the server did meanwhile.
        completed = sum(
            1
            for number in range(len(self._sent))
            if before.at < self._done[number] <= after.at and 200 <= self._status[number] < 300
        )
        elapsed = max(after.at - before.at, 1e-9)
        server = after.server - before.server if spec.pids else None
        client = after.client - before.client
        even = spec.per_second is not None
        origin = self._due if even else self._sent
        lags = sorted(self._sent[number] - self._due[number] for number in within) if even else []
        return CellResult(
            seconds=elapsed,
            latencies_milliseconds=tuple((self._done[number] - origin[number]) * 1e3 for number in good),
            groups=tuple(spec.bodies[number % len(spec.bodies)].group for number in good),
            completed_per_second=completed / elapsed,
            failures=dict(sorted(failures.items())),
            first_failure=self._first_failure,
            server_cores=None if server is None else server / elapsed,
            server_cpu_milliseconds=None if server is None or not completed else server / completed * 1e3,
            server_rss_bytes=after.resident or None,
            client_cores=client / elapsed,
            foreign_cores=self._foreign(before, after, elapsed),
            send_lag_p99_milliseconds=quantile(lags, 0.99) * 1e3 if lags else 0.0,
            header_means={name: sum(values) / len(values) for name, values in self._headers.items()},
        )

    def _foreign(self, before: Usage, after: Usage, elapsed: float) -> float | None:
        """What others took of the server's CPUs. This process counts as ours when it runs on them."""
        if not self._spec.cpus or not self._spec.pids:
            return None
        ours = after.server - before.server
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

        try:
            result: CellResult = uvloop.run(send_cell(CellSpec.model_validate(spec)))
        except OSError as error:
            # Nobody listens: a result, which the caller reports with the server's name.
            return CellResult(seconds=0.0, failures={"unreachable": 1}, first_failure=str(error))
        finally:
            gc.collect()
        return result
