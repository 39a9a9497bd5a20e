"""Sends one load over HTTP from a separate process, with precise timers, and records and summarises the latencies.

`run_load` starts `python -m penstock_optimizer.load.generator`: a LoadSpec as JSON on its standard input, a LoadResult
as JSON on its standard output. The process runs on uvloop with the garbage collector off, on CPUs that the measured
server does not use, so that measuring costs the server nothing.

Event loops round timers to milliseconds, as long as a short inference takes; `PreciseTimer` fires within some 50
microseconds (timerfd). A short time slice lets a thread run soon after it wakes: a client that waits for a core counts
that wait as the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import math
import os
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import psutil
from pydantic import Field

from penstock.errors import PenstockError
from penstock.manifest import Frozen
from penstock.process import python_module
from penstock_optimizer.load.client import SWEEP_SECONDS, UNREACHABLE, LoadClient, RequestSource, is_good, status_name

_CLOCK_MONOTONIC = 1  # the clock of time.perf_counter() on Linux
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class PreciseTimer:
    """Calls a function once, at a time of `time.perf_counter()`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = int(self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC))
        if self._descriptor < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"timerfd_create: {os.strerror(code)}")
        self._loop = loop
        self._callback = callback
        loop.add_reader(self._descriptor, self._fired)

    def set(self, at: float) -> None:
        """Fire at `at`, seconds of `time.perf_counter()`; at once when that has passed."""
        nanoseconds = max(1, round(at * 1e9))
        value = _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        request = _Itimerspec(_Timespec(0, 0), value)
        if self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(request), None) < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"timerfd_settime: {os.strerror(code)}")

    def close(self) -> None:
        """Cancel the timer and free it."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _fired(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return
        self._callback()


USUAL_NANOSECONDS = 0
"""The kernel's default, around 1 to 3 ms: it grows with the number of cores."""
SHORTEST_NANOSECONDS = 100_000
"""The shortest slice that the kernel accepts (sched_setattr(2), kernel/sched/syscalls.c)."""

_NUMBERS = {
    "x86_64": {"sched_setattr": 314, "sched_getattr": 315},
    "aarch64": {"sched_setattr": 274, "sched_getattr": 275},
}
"""Numbers of system calls that the C library does not have before glibc 2.41."""


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of linux/sched/types.h, first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def set_time_slice(nanoseconds: int) -> bool:
    """Set the time slice of the calling thread, from 0.1 to 100 ms, or 0 for the kernel's default. Linux 6.12 and
    later; no privilege is needed. False, and nothing changed, where it is not supported: an older kernel, a sandbox
    that forbids the call, another scheduling class than the usual one."""
    attributes = _read()
    if attributes is None or attributes.policy not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return False
    attributes.flags = 0
    attributes.runtime = nanoseconds
    if _call("sched_setattr", ctypes.byref(attributes), ctypes.c_long(0)) != 0:
        return False
    # An older kernel reports success, but returns no slice when it is read.
    kept = time_slice_nanoseconds()
    return kept is not None and nanoseconds in (kept, USUAL_NANOSECONDS)


def time_slice_nanoseconds() -> int | None:
    """The time slice of the calling thread; None where the kernel does not support it."""
    attributes = _read()
    return attributes.runtime or None if attributes is not None else None


def _read() -> _Attributes | None:
    size = ctypes.sizeof(_Attributes)
    attributes = _Attributes(size=size)
    failed = _call("sched_getattr", ctypes.byref(attributes), ctypes.c_long(size), ctypes.c_long(0))
    return None if failed else attributes


def _call(name: str, *arguments: object) -> int:
    """Make a system call on the calling thread; 0 for success."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return -1
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(numbers[name]), ctypes.c_long(0), *arguments))


@dataclass(frozen=True)
class ResourceUsage:
    """Usage of some processes together, without those that have ended."""

    seconds: float
    """CPU time, user and system."""
    resident_bytes: int

    @classmethod
    def of(cls, pids: Iterable[int]) -> ResourceUsage:
        """Read the current usage."""
        seconds, resident = 0.0, 0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                times = process.cpu_times()
                seconds += times.user + times.system
                resident += process.memory_info().rss
        return cls(seconds, resident)


def process_tree(pid: int) -> tuple[int, ...]:
    """A process and all its descendants; empty when there is no such process."""
    try:
        process = psutil.Process(pid)
        return (pid, *(child.pid for child in process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return ()


class LatencySummary(Frozen):
    """Latencies of successful requests, milliseconds."""

    count: int = Field(ge=1)
    mean: float
    minimum: float
    p50: float
    p90: float
    p95: float
    p99: float
    maximum: float
    p95_lower: float
    """Lower end of the 95 % confidence interval of p95 (order statistics; no distribution assumed)."""
    p95_upper: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LatencySummary | None:
        """Summarise latencies in seconds; None when there are none."""
        if not seconds:
            return None
        ordered = sorted(value * 1e3 for value in seconds)
        lower, upper = quantile_interval(ordered, 0.95)
        return cls(
            count=len(ordered),
            mean=math.fsum(ordered) / len(ordered),
            minimum=ordered[0],
            p50=quantile(ordered, 0.50),
            p90=quantile(ordered, 0.90),
            p95=quantile(ordered, 0.95),
            p99=quantile(ordered, 0.99),
            maximum=ordered[-1],
            p95_lower=lower,
            p95_upper=upper,
        )

    @property
    def columns(self) -> tuple[float, ...]:
        """Minimum, mean, p50, p90, p95, p99, maximum: as tables have them."""
        return (self.minimum, self.mean, self.p50, self.p90, self.p95, self.p99, self.maximum)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of a sorted, non-empty sequence, interpolated between neighbours."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def quantile_interval(ordered: Sequence[float], share: float) -> tuple[float, float]:
    """The 95 % confidence interval of a quantile: the order statistics with the ranks that the binomial law gives.

    With few samples the interval is clipped to the smallest and largest of them, and then covers less than 95 %.
    """
    count = len(ordered)
    reach = 1.96 * math.sqrt(count * share * (1 - share))
    lower = max(0, math.floor(count * share - reach) - 1)
    upper = min(count - 1, math.ceil(count * share + reach))
    return ordered[lower], ordered[upper]


def relative_spread(values: Sequence[float]) -> float:
    """Interquartile range over median: the noise of repeated measurements; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    ordered = sorted(values)
    middle = quantile(ordered, 0.5)
    return (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / middle if middle > 0 else 0.0


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
