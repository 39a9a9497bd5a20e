"""Sends one load over HTTP from a separate process, and records the answers.

`run_load` starts `python -m penstock_optimizer.load.generator`: a LoadSpec as JSON on its standard input, a LoadResult
as JSON on its standard output. The process runs on uvloop with the garbage collector off, on CPUs that the measured
server does not use, so that measuring costs the server nothing.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from penstock.errors import PenstockError
from penstock.manifest import Frozen
from penstock.process import python_module
from penstock_optimizer.load.client import SWEEP_SECONDS, UNREACHABLE, LoadClient, RequestBody, is_good, status_name
from penstock_optimizer.load.summary import LatencySummary, quantile
from penstock_optimizer.load.timing import PreciseTimer, ResourceUsage, process_tree


class OpenLoop(Frozen):
    """Requests arrive at random at a fixed mean rate, whether or not earlier ones were answered.

    Latency counts from the scheduled arrival: a server that stalls cannot make the load wait with it.
    """

    kind: Literal["open"] = "open"
    arrivals_per_second: float = Field(gt=0)


class ClosedLoop(Frozen):
    """Each client sends its next request when its last one was answered. Latency counts from sending."""

    kind: Literal["closed"] = "closed"
    clients: int = Field(ge=1)
    requests: int | None = Field(default=None, ge=1)
    """Stop after this many recorded requests, even if time is left."""


class LoadSpec(Frozen):
    """One measurement."""

    url: str = Field(pattern=r"^http://")
    """Plain HTTP: measurements go to a server on this machine or in this network."""
    bodies: tuple[RequestBody, ...] = Field(min_length=1)
    """Sent in this order, repeatedly."""
    pattern: Annotated[OpenLoop | ClosedLoop, Field(discriminator="kind")]
    headers: dict[str, str] = Field(default_factory=lambda: {"content-type": "application/json"})
    warm_up_seconds: float = Field(default=0.5, ge=0)
    """Requests of this time are sent and not recorded."""
    seconds: float = Field(default=3.0, gt=0)
    timeout_seconds: float = Field(default=10.0, gt=0)
    max_connections: int = Field(default=512, ge=1)
    """An open loop's request that finds all connections busy waits here; its latency includes that."""
    seed: int = 0
    cpus: tuple[int, ...] = ()
    """Logical CPUs of the load process; empty: not pinned."""
    target_pid: int | None = None
    """Process whose CPU time and memory are reported, children included."""
    response_headers: tuple[str, ...] = ()
    """Names of numeric response headers whose means are reported, such as `x-compute-time`."""


class LoadResult(Frozen):
    """The measurements of the recorded time."""

    seconds: float
    offered_per_second: float
    """Open loop: scheduled arrivals; closed loop: sent requests."""
    completed_per_second: float
    """Answers with a 2xx status that came within the recorded time."""
    scheduled: int
    statuses: dict[str, int]
    """By HTTP status; `timeout`, `disconnected` and `unreachable` where no answer came."""
    latency: LatencySummary | None
    """Of 2xx answers."""
    by_group: dict[int, LatencySummary] = Field(default_factory=dict)
    send_lag_p99_milliseconds: float = 0.0
    """Open loop: how late this client was. With large values the client was measured, not the server."""
    target_cores: float | None = None
    """CPU seconds of the target per second."""
    target_rss_bytes: int | None = None
    generator_cores: float = 0.0
    header_means: dict[str, float] = Field(default_factory=dict)
    first_failure: str = ""
    """Status and start of the body of the first answer that was not 2xx."""

    @property
    def failed(self) -> int:
        """Requests without a 2xx answer."""
        return sum(count for status, count in self.statuses.items() if not status.startswith("2"))

    @property
    def refused_share(self) -> float:
        """The share of requests without a 2xx answer."""
        total = sum(self.statuses.values())
        return self.failed / total if total else 0.0


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> list[float]:
    """Arrival times in seconds from 0 to below `seconds`, at a mean of `rate` a second; the same for the same seed.

    Given their number, the arrivals of a Poisson process are independent and uniform over the interval. The number is
    fixed at its mean, so that the offered rate is exact and only the spacing is random.
    """
    if rate <= 0 or seconds <= 0:
        raise ValueError(f"rate ({rate}) and seconds ({seconds}) must be positive")
    generator = random.Random(seed)  # noqa: S311 - reproducible, not secret
    return sorted(generator.random() * seconds for _ in range(max(1, round(rate * seconds))))


START_UP_SECONDS = 30.0
"""Time limit for importing and connecting, generous for a busy machine."""


class LoadFailed(PenstockError):
    """The load process itself failed: nothing was measured."""


def run_load(spec: LoadSpec) -> LoadResult:
    """Run one load in a separate process, and wait for it; LoadFailed with the end of its log when it fails."""
    limit = START_UP_SECONDS + spec.warm_up_seconds + spec.seconds + 2 * spec.timeout_seconds
    try:
        done = subprocess.run(
            python_module("penstock_optimizer.load.generator"),
            input=spec.model_dump_json().encode(),
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LoadFailed(f"the load process did not end within {limit:.0f} s", remedy="Is the machine idle?") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise LoadFailed(f"the load process failed ({done.returncode}): {' | '.join(lines)}")
    return LoadResult.model_validate_json(done.stdout)


IDLE_SECONDS = 2.0
"""Connections idle for longer are not used again (uvicorn closes them after 5 s): a request must not be lost on a
connection that the server is closing."""
FIRST_CONNECTIONS = 4
"""Of an open loop; more are opened on demand."""
MAX_GROUPS = 64
"""With more groups than this, none is reported separately."""


class LoadRun:
    """One run of one spec."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._client = LoadClient(spec, self._settled, max_connections=spec.max_connections, idle_seconds=IDLE_SECONDS)
        self._header_sums: dict[str, float] = {}
        self._header_counts: dict[str, int] = {}
        self._over = asyncio.Event()
        self._start = 0.0
        self._stopped_at: float | None = None
        self._begin = 0.0
        self._in_time = 0

    async def run(self) -> LoadResult:
        """Send everything, wait for the answers, and return the result."""
        spec = self._spec
        try:
            await self._client.start(
                spec.pattern.clients if isinstance(spec.pattern, ClosedLoop) else FIRST_CONNECTIONS
            )
        except OSError:
            # The server does not listen yet: counted, request by request.
            await self._client.start(0)
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
        await self._client.drain()
        await self._client.close()
        used = target_after.seconds - target_before.seconds if target_before and target_after else None
        return self._result(
            target_cores=None if used is None else used / elapsed,
            target_rss_bytes=target_after.resident_bytes if target_after else None,
            generator_cores=generator_cores,
        )

    async def _run_open(self, pattern: OpenLoop) -> None:
        """Send each request at its time, whether or not earlier ones are answered."""
        rate, warm_up, seed = pattern.arrivals_per_second, self._spec.warm_up_seconds, self._spec.seed
        total = warm_up + self._spec.seconds
        # Separate draws, so that the recorded time has exactly the requests of its rate.
        before = poisson_arrivals(rate, warm_up, seed=seed + 1) if warm_up else []
        during = [warm_up + at for at in poisson_arrivals(rate, self._spec.seconds, seed=seed)]
        arrivals = [self._start + at for at in before + during]
        position = 0

        def fire() -> None:
            nonlocal position
            now = time.perf_counter()
            while position < len(arrivals) and arrivals[position] <= now:
                self._client.launch(arrivals[position])
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
        """Start every client; each answer starts the next request until the time ends."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._spec.warm_up_seconds + self._spec.seconds, self._over.set)
        for _ in range(pattern.clients):
            self._launch_next()
        await self._over.wait()
        self._stopped_at = time.perf_counter()

    def _settled(self, request: int, status: int, _at: float, numbers: Mapping[str, float]) -> None:
        """Record an answer; in a closed loop, send the client's next request."""
        is_recorded = self._origin(request) >= self._begin
        for name, value in numbers.items() if is_recorded else ():
            self._header_sums[name] = self._header_sums.get(name, 0.0) + value
            self._header_counts[name] = self._header_counts.get(name, 0) + 1
        pattern = self._spec.pattern
        self._in_time += is_recorded
        if isinstance(pattern, ClosedLoop) and not self._over.is_set():
            if pattern.requests is not None and self._in_time >= pattern.requests:
                self._over.set()
            elif status == UNREACHABLE:
                # The server does not listen: an immediate retry would spin. Retry after one sweep.
                asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._launch_next)
            else:
                self._launch_next()

    def _launch_next(self) -> None:
        if not self._over.is_set():
            self._client.launch(time.perf_counter())

    def _origin(self, request: int) -> float:
        """The start of a request's latency: its scheduled time, or when a client sent it (or wanted to)."""
        sent = self._client.sent[request]
        return sent if sent and isinstance(self._spec.pattern, ClosedLoop) else self._client.due[request]

    # results

    def _result(
        self, *, target_cores: float | None, target_rss_bytes: int | None, generator_cores: float
    ) -> LoadResult:
        seen = self._client
        begin = self._begin
        end = begin + self._spec.seconds
        if self._stopped_at is not None:
            end = min(end, self._stopped_at)
        seconds = max(end - begin, 1e-9)
        origins = [self._origin(number) for number in range(len(seen.due))]
        chosen = [number for number, origin in enumerate(origins) if begin <= origin < end]
        statuses: dict[str, int] = {}
        latencies: list[float] = []
        groups: dict[int, list[float]] = {}
        lags: list[float] = []
        for number in chosen:
            status = seen.status[number]
            name = status_name(status)
            statuses[name] = statuses.get(name, 0) + 1
            if seen.sent[number]:
                lags.append(seen.sent[number] - origins[number])
            if is_good(status):
                latency = seen.done[number] - origins[number]
                latencies.append(latency)
                group = self._spec.bodies[number % len(self._spec.bodies)].group
                groups.setdefault(group, []).append(latency)
        completed = sum(
            1 for number, done in enumerate(seen.done) if begin <= done < end and is_good(seen.status[number])
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
            header_means={name: total / self._header_counts[name] for name, total in self._header_sums.items()},
            first_failure=seen.first_failure,
        )


def _usage(pid: int | None) -> ResourceUsage | None:
    """The usage of a process and its children; None when there is no such process."""
    members = process_tree(pid) if pid is not None else ()
    return ResourceUsage.of(members) if members else None


def generate(spec: LoadSpec) -> LoadResult:
    """Run one load in this process, on the CPUs of the spec."""
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)
    import uvloop

    return uvloop.run(_generate(spec))  # type: ignore[no-any-return]


async def _generate(spec: LoadSpec) -> LoadResult:
    return await LoadRun(spec).run()


def main() -> None:
    """Read the spec, run it, write the result."""
    spec = LoadSpec.model_validate_json(sys.stdin.buffer.read())
    # A collection pauses for milliseconds, and the recording grows for only seconds.
    gc.disable()
    result = generate(spec)
    sys.stdout.write(result.model_dump_json())


if __name__ == "__main__":
    main()
