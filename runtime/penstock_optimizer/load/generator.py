"""Sends a load and records what came back. Runs in its own process, on uvloop, with the collector off.

Pools connections last-in-first-out, so that a low rate uses few of them; drops those idle for longer than servers
commonly keep them, so that a request is not lost to a connection that the server is just closing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from array import array
from collections import deque
from urllib.parse import urlsplit

import psutil

from penstock_optimizer.load.arrivals import poisson_arrivals
from penstock_optimizer.load.connection import Connection, request_bytes
from penstock_optimizer.load.spec import ClosedLoop, LoadResult, LoadSpec, OpenLoop
from penstock_optimizer.load.summary import LatencySummary, quantile
from penstock_optimizer.load.timer import PreciseTimer

IDLE_SECONDS = 2.0
"""Connections idle for longer are not used again (uvicorn closes them after 5 s)."""
SWEEP_SECONDS = 0.1
"""How often requests are checked against their time limit."""
MAX_GROUPS = 64
"""More groups than this are not reported one by one."""

PENDING = -1
LOST = 0
TIMED_OUT = -2
UNREACHABLE = -3
_NAMES = {LOST: "disconnected", TIMED_OUT: "timeout", UNREACHABLE: "unreachable"}


class Recording:
    """Times and outcomes of every request, by number. Seconds of `time.perf_counter()`."""

    def __init__(self) -> None:
        self.due = array("d")
        self.sent = array("d")
        self.done = array("d")
        self.status = array("h")
        self.header_sums: dict[str, float] = {}
        self.header_counts: dict[str, int] = {}
        self.first_failure = ""

    def add(self, due: float) -> int:
        """A request that is due at `due`; returns its number."""
        self.due.append(due)
        self.sent.append(0.0)
        self.done.append(0.0)
        self.status.append(PENDING)
        return len(self.due) - 1


class Generator:
    """One run of one spec."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._payloads = request_bytes(spec)
        self._recording = Recording()
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}
        self._waiting: deque[int] = deque()
        self._connecting = 0
        self._open = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()
        self._over = asyncio.Event()
        self._start = 0.0
        self._stopped_at: float | None = None
        self._begin = 0.0
        self._in_time = 0

    async def run(self) -> LoadResult:
        """Send everything, wait for the answers, and say what was seen."""
        spec = self._spec
        loop = asyncio.get_running_loop()
        sweeper = loop.create_task(self._sweep())
        first = spec.pattern.clients if isinstance(spec.pattern, ClosedLoop) else 4
        await asyncio.gather(*(self._connect_idle() for _ in range(min(first, spec.max_connections))))
        target_before = _usage(spec.target_pid)
        self._start = time.perf_counter() + 0.01
        self._begin = self._start + spec.warm_up_seconds
        generator_before = time.process_time()
        if isinstance(spec.pattern, OpenLoop):
            await self._run_open(spec.pattern)
        else:
            await self._run_closed(spec.pattern)
        elapsed = max(time.perf_counter() - self._start, 1e-9)
        generator_cores = (time.process_time() - generator_before) / elapsed
        target_after = _usage(spec.target_pid)
        await self._drain()
        sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeper
        for connection in [*self._idle, *self._busy]:
            connection.abort()
        return self._result(
            target_cores=(target_after[0] - target_before[0]) / elapsed if target_before and target_after else None,
            target_rss_bytes=target_after[1] if target_after else None,
            generator_cores=generator_cores,
        )

    # sending

    async def _run_open(self, pattern: OpenLoop) -> None:
        """Send each request at its time, however the earlier ones fare."""
        rate, warm_up, seed = pattern.arrivals_per_second, self._spec.warm_up_seconds, self._spec.seed
        total = warm_up + self._spec.seconds
        # Apart, so that the recorded time has exactly the requests that its rate promises.
        before = poisson_arrivals(rate, warm_up, seed=seed + 1) if warm_up else []
        during = [warm_up + at for at in poisson_arrivals(rate, self._spec.seconds, seed=seed)]
        arrivals = [self._start + at for at in before + during]
        position = 0

        def fire() -> None:
            nonlocal position
            now = time.perf_counter()
            while position < len(arrivals) and arrivals[position] <= now:
                self._launch(self._recording.add(arrivals[position]))
                position += 1
            if position < len(arrivals):
                timer.set(arrivals[position])
            else:
                timer.set(self._start + total)
                if now >= self._start + total:
                    self._over.set()

        timer = PreciseTimer(asyncio.get_running_loop(), fire)
        timer.set(arrivals[0])
        try:
            await self._over.wait()
        finally:
            timer.close()

    async def _run_closed(self, pattern: ClosedLoop) -> None:
        """Start every client; each answer starts the next request until the time is up."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._spec.warm_up_seconds + self._spec.seconds, self._over.set)
        for _ in range(pattern.clients):
            self._launch(self._recording.add(time.perf_counter()))
        await self._over.wait()
        self._stopped_at = time.perf_counter()

    def _launch(self, request: int) -> None:
        """Send on an idle connection; else on a new one; else as soon as one is free."""
        now = time.perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and now - connection.idle_since < IDLE_SECONDS:
                self._send(connection, request)
                return
            connection.abort()
        self._waiting.append(request)
        if self._open + self._connecting < self._spec.max_connections:
            self._spawn_connection()

    def _spawn_connection(self) -> None:
        task = asyncio.get_running_loop().create_task(self._connect_idle())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect_idle(self) -> None:
        """Open a connection and give it the longest waiting request, or keep it for the next."""
        parts = urlsplit(self._spec.url)
        self._connecting += 1
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._answered, self._lost, self._spec.response_headers),
                parts.hostname or "",
                parts.port or 80,
            )
        except OSError:
            # Nobody listens: the request that wanted this connection has failed.
            if self._waiting:
                self._settle(self._waiting.popleft(), UNREACHABLE, time.perf_counter())
            return
        finally:
            self._connecting -= 1
        self._open += 1
        self._offer(connection)

    def _offer(self, connection: Connection) -> None:
        if self._waiting:
            self._send(connection, self._waiting.popleft())
        else:
            self._idle.append(connection)

    def _send(self, connection: Connection, request: int) -> None:
        self._busy[connection] = request
        connection.send(request, self._payloads[request % len(self._payloads)])
        self._recording.sent[request] = connection.sent_at
        if isinstance(self._spec.pattern, ClosedLoop):
            self._recording.due[request] = connection.sent_at

    # answers

    def _answered(self, connection: Connection, request: int, status: int, at: float) -> None:
        self._busy.pop(connection, None)
        recording = self._recording
        for name, value in connection.numbers.items() if recording.due[request] >= self._begin else ():
            recording.header_sums[name] = recording.header_sums.get(name, 0.0) + value
            recording.header_counts[name] = recording.header_counts.get(name, 0) + 1
        if status >= 300 and not recording.first_failure:
            recording.first_failure = f"{status} {connection.failure.decode(errors='replace')}".strip()
        if not connection.closed:
            self._offer(connection)
        self._settle(request, status, at)

    def _settle(self, request: int, status: int, at: float) -> None:
        """Record an outcome; in a closed loop the client goes on with its next request."""
        self._recording.done[request] = at
        self._recording.status[request] = status
        pattern = self._spec.pattern
        self._in_time += self._recording.due[request] >= self._begin
        if isinstance(pattern, ClosedLoop) and not self._over.is_set():
            if pattern.requests is not None and self._in_time >= pattern.requests:
                self._over.set()
            elif status == UNREACHABLE:
                # Nobody listens: trying again at once would spin. One sweep later is soon enough.
                asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._launch_next)
            else:
                self._launch_next()
        if self._over.is_set() and self._is_quiet():
            self._quiet.set()

    def _launch_next(self) -> None:
        if not self._over.is_set():
            self._launch(self._recording.add(time.perf_counter()))

    def _lost(self, connection: Connection) -> None:
        self._open -= 1
        self._busy.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._waiting and self._open + self._connecting < self._spec.max_connections:
            self._spawn_connection()

    def _is_quiet(self) -> bool:
        return not self._busy and not self._waiting

    async def _sweep(self) -> None:
        """Give up on requests over their time limit."""
        limit = self._spec.timeout_seconds
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.perf_counter()
            for connection, request in list(self._busy.items()):
                if now - self._recording.due[request] > limit:
                    self._busy.pop(connection, None)
                    connection.abort()
                    self._settle(request, TIMED_OUT, now)
            while self._waiting and now - self._recording.due[self._waiting[0]] > limit:
                self._settle(self._waiting.popleft(), TIMED_OUT, now)

    async def _drain(self) -> None:
        """Wait for the answers that are still out; the sweep ends those that take too long."""
        if not self._is_quiet():
            await self._quiet.wait()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # results

    def _result(
        self, *, target_cores: float | None, target_rss_bytes: int | None, generator_cores: float
    ) -> LoadResult:
        recording = self._recording
        begin = self._begin
        end = begin + self._spec.seconds
        if self._stopped_at is not None:
            end = min(end, self._stopped_at)
        seconds = max(end - begin, 1e-9)
        chosen = [number for number, due in enumerate(recording.due) if begin <= due < end]
        statuses: dict[str, int] = {}
        latencies: list[float] = []
        groups: dict[int, list[float]] = {}
        lags: list[float] = []
        for number in chosen:
            status = recording.status[number]
            name = _NAMES.get(status, str(status))
            statuses[name] = statuses.get(name, 0) + 1
            if recording.sent[number]:
                lags.append(recording.sent[number] - recording.due[number])
            if 200 <= status < 300:
                latency = recording.done[number] - recording.due[number]
                latencies.append(latency)
                group = self._spec.bodies[number % len(self._spec.bodies)].group
                groups.setdefault(group, []).append(latency)
        completed = sum(
            1
            for number, done in enumerate(recording.done)
            if begin <= done < end and 200 <= recording.status[number] < 300
        )
        by_group = {
            group: summary for group in sorted(groups) if (summary := LatencySummary.of(groups[group])) is not None
        }
        return LoadResult(
            seconds=seconds,
            offered_per_second=len(chosen) / seconds,
            completed_per_second=completed / seconds,
            scheduled=len(chosen),
            statuses=dict(sorted(statuses.items())),
            latency=LatencySummary.of(latencies),
            by_group=by_group if len(by_group) <= MAX_GROUPS else {},
            send_lag_p99_milliseconds=quantile(sorted(lags), 0.99) * 1e3 if lags else 0.0,
            target_cores=target_cores,
            target_rss_bytes=target_rss_bytes,
            generator_cores=generator_cores,
            header_means={name: total / recording.header_counts[name] for name, total in recording.header_sums.items()},
            first_failure=recording.first_failure,
        )


def _usage(pid: int | None) -> tuple[float, int] | None:
    """CPU seconds so far and resident bytes of a process and its children; None when there is no such process."""
    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    seconds, resident = 0.0, 0
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            seconds += times.user + times.system
            resident += member.memory_info().rss
    return seconds, resident


def generate(spec: LoadSpec) -> LoadResult:
    """Run one load in this process, on the CPUs that the spec names."""
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)
    import uvloop

    return uvloop.run(_generate(spec))  # type: ignore[no-any-return]


async def _generate(spec: LoadSpec) -> LoadResult:
    return await Generator(spec).run()
