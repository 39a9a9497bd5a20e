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
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from penstock.errors import PenstockError
from penstock.manifest import Frozen
from penstock.process import python_module
from penstock_optimizer.load.client import SWEEP_SECONDS, UNREACHABLE, LoadClient, RequestSource, is_good, status_name
from penstock_optimizer.load.summary import LatencySummary, quantile
from penstock_optimizer.load.timing import PreciseTimer, ResourceUsage, process_tree

T = TypeVar("T")


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


class LoadSpec(RequestSource):
    """One measurement."""

    pattern: Annotated[OpenLoop | ClosedLoop, Field(discriminator="kind")]
    warm_up_seconds: float = Field(default=0.5, ge=0)
    """Requests of this time are sent and not recorded."""
    seconds: float = Field(default=3.0, gt=0)
    max_connections: int = Field(default=512, ge=1)
    """An open loop's request that finds all connections busy waits here; its latency includes that."""
    seed: int = 0
    cpus: tuple[int, ...] = ()
    """Logical CPUs of the load process; empty: not pinned."""
    target_pid: int | None = None
    """Process of which the memory is reported, children included."""


class LoadResult(Frozen):
    """The measurements of the recorded time."""

    seconds: float
    completed_per_second: float
    """Answers with a 2xx status that came within the recorded time."""
    scheduled: int
    """Open loop: arrivals; closed loop: sent requests."""
    statuses: dict[str, int]
    """By HTTP status; `timeout`, `disconnected` and `unreachable` where no answer came."""
    latency: LatencySummary | None
    """Of 2xx answers."""
    send_lag_p99_milliseconds: float = 0.0
    """Open loop: how late this client was. With large values the client was measured, not the server."""
    target_rss_bytes: int | None = None
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


START_UP_SECONDS = 120.0
"""Limit for importing and connecting: seconds, or a minute on busy cores. It only ends a process that hangs."""


class LoadFailed(PenstockError):
    """The load process itself failed: nothing was measured."""


def run_load(spec: LoadSpec) -> LoadResult:
    """Run one load in a separate process, and wait for it; LoadFailed with the end of its log when it fails."""
    seconds = spec.warm_up_seconds + spec.seconds + 2 * spec.timeout_seconds
    return LoadResult.model_validate_json(run_in_process("penstock_optimizer.load.generator", spec, seconds))


def run_in_process(module: str, spec: RequestSource, seconds: float) -> bytes:
    """Run a module as a program that reads the spec as JSON and takes this time after its start. Returns its output."""
    limit = START_UP_SECONDS + seconds
    try:
        done = subprocess.run(
            python_module(module),
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
    return done.stdout


IDLE_SECONDS = 2.0
"""Connections idle for longer are not used again (uvicorn closes them after 5 s): a request must not be lost on a
connection that the server is closing."""
FIRST_CONNECTIONS = 4
"""Of an open loop; more are opened on demand."""


class LoadRun:
    """One run of one spec."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._client = LoadClient(spec, self._settled, max_connections=spec.max_connections, idle_seconds=IDLE_SECONDS)
        self._over = asyncio.Event()
        self._start = 0.0
        self._stopped_at: float | None = None
        self._begin = 0.0

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
        self._start = time.perf_counter() + 0.01
        self._begin = self._start + spec.warm_up_seconds
        if isinstance(spec.pattern, OpenLoop):
            await self._run_open(spec.pattern)
        else:
            await self._run_closed(spec.pattern)
        members = process_tree(spec.target_pid) if spec.target_pid is not None else ()
        resident = ResourceUsage.of(members).resident_bytes if members else None
        await self._client.drain()
        await self._client.close()
        return self._result(resident)

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

    def _settled(self, _request: int, status: int, _at: float, _numbers: Mapping[str, float]) -> None:
        """In a closed loop, send the client's next request."""
        if isinstance(self._spec.pattern, ClosedLoop) and not self._over.is_set():
            if status == UNREACHABLE:
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

    def _result(self, target_rss_bytes: int | None) -> LoadResult:
        seen = self._client
        begin = self._begin
        end = begin + self._spec.seconds
        if self._stopped_at is not None:
            end = min(end, self._stopped_at)
        seconds = max(end - begin, 1e-9)
        origins = [self._origin(number) for number in range(len(seen.due))]
        chosen = [number for number, origin in enumerate(origins) if begin <= origin < end]
        statuses = Counter(status_name(seen.status[number]) for number in chosen)
        latencies = [seen.done[number] - origins[number] for number in chosen if is_good(seen.status[number])]
        lags = sorted(seen.sent[number] - origins[number] for number in chosen if seen.sent[number])
        completed = sum(
            1 for number, done in enumerate(seen.done) if begin <= done < end and is_good(seen.status[number])
        )
        return LoadResult(
            seconds=seconds,
            completed_per_second=completed / seconds,
            scheduled=len(chosen),
            statuses=dict(sorted(statuses.items())),
            latency=LatencySummary.of(latencies),
            send_lag_p99_milliseconds=quantile(lags, 0.99) * 1e3 if lags else 0.0,
            target_rss_bytes=target_rss_bytes,
            first_failure=seen.first_failure,
        )


async def _generate(spec: LoadSpec) -> LoadResult:
    return await LoadRun(spec).run()


def on_uvloop(run: Coroutine[Any, Any, T], cpus: Sequence[int]) -> T:
    """Run a coroutine on these CPUs; empty: not pinned."""
    if cpus:
        os.sched_setaffinity(0, cpus)
    import uvloop

    return uvloop.run(run)  # type: ignore[no-any-return]


def main() -> None:
    """Read the spec, run it, write the result."""
    spec = LoadSpec.model_validate_json(sys.stdin.buffer.read())
    # A collection pauses for milliseconds, and the recording grows for only seconds.
    gc.disable()
    result = on_uvloop(_generate(spec), spec.cpus)
    sys.stdout.write(result.model_dump_json())


if __name__ == "__main__":
    main()
