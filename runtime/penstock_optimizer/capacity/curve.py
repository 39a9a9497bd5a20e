"""The capacity curve of one replica: the real server in a process of its own, requests arriving at random over HTTP."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock.errors import PenstockError
from penstock_optimizer.candidate.isolation import death_reason
from penstock_optimizer.capacity.steps import CapacitySteps
from penstock_optimizer.job.budget import RAISE_BUDGET
from penstock_optimizer.load.process import LoadFailed, run_load
from penstock_optimizer.load.spec import ClosedLoop, LoadResult, LoadSpec, OpenLoop, RequestBody

CLIENTS = 32
SATURATION_SECONDS = 1.5
"""Of the first try; where nothing was answered in it, the next ones are longer."""
LEAST_SECONDS, MOST_SECONDS = 2.0, 6.0
WANTED_SAMPLES = 200
"""A point lasts until it has about this many requests, within its limits: p95 then has ten beyond it."""
FEWEST_SAMPLES, LONGEST_SECONDS = 40, 15.0
"""A slow model's point lasts longer, until it has at least so many."""
REQUEST_SECONDS = 5.0
"""Until a request counts as not answered, or four times the objective where that is longer."""
WARM_UP_SECONDS = 0.4
OVERHEAD_SECONDS = 1.0
"""Starting the load process and draining."""
LEAST_START_SECONDS = 2.0
"""With less time than this a replica is not started."""
NO_TIME = "the time budget was spent before the capacity could be measured"
STOP_SECONDS = 10.0


class CapacityFailed(PenstockError):
    """The replica was not measured: there was no time, or the load process failed."""


class ReplicaBroken(CapacityFailed):
    """The server ended before it was ready, or answered nobody: what it serves must not be served."""


@dataclass(frozen=True)
class Measured:
    """What was found."""

    curve: CapacityCurve
    saturation_per_second: float
    """Requests a second with 32 clients that never pause."""
    resident_bytes: int | None
    """Of the serving process under load."""
    finished: bool
    """False: the time was up before the knee was found."""


@dataclass(frozen=True)
class Replica:
    """A running server."""

    url: str
    pid: int


@contextmanager
def replica(
    artefact: Path,
    *,
    cores: int,
    cpus: Sequence[int],
    log: Path,
    max_tokens: int | None = None,
    start_seconds: float,
) -> Iterator[Replica]:
    """Serve an artefact on these CPUs while the context lasts; CapacityFailed when it does not start in time."""
    if start_seconds < LEAST_START_SECONDS:
        raise CapacityFailed(NO_TIME, remedy=RAISE_BUDGET)
    command = [sys.executable, "-m", "penstock_optimizer.capacity.replica", str(artefact), "--cores", str(cores)]
    if cpus:
        command += ["--cpus", ",".join(map(str, cpus))]
    if max_tokens is not None:
        command += ["--max-tokens", str(max_tokens)]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
    assert process.stdout is not None  # noqa: S101 - both are pipes
    assert process.stdin is not None  # noqa: S101
    line = b""
    try:
        line = _first_line(process, start_seconds)
        if not line:
            code = process.poll()
            if code is None:
                raise CapacityFailed(f"the server was not ready after {start_seconds:.0f} s", remedy=f"See {log}")
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
            raise ReplicaBroken(f"the server did not start: {death_reason(code, tail)}", remedy=f"See {log}")
        yield Replica(f"http://127.0.0.1:{json.loads(line)['port']}/predict", process.pid)
    finally:
        process.stdin.close()
        try:
            # Not ready: it does not listen to the end of its input yet.
            if not line:
                process.kill()
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def measure_capacity(
    server: Replica,
    bodies: Sequence[RequestBody],
    *,
    p95_objective: float | None,
    load_cpus: Sequence[int],
    seconds_left: Callable[[], float],
    on_point: Callable[[CapacityPoint], None] = lambda _: None,
) -> Measured:
    """Measure the curve, within `seconds_left`. CapacityFailed as soon as it is clear that there will be none."""
    request_seconds = max(REQUEST_SECONDS, 4e-3 * (p95_objective or 0.0))

    def load(pattern: OpenLoop | ClosedLoop, seconds: float, *, request_seconds: float, seed: int = 0) -> LoadResult:
        return run_load(
            LoadSpec(
                url=server.url,
                bodies=tuple(bodies),
                pattern=pattern,
                warm_up_seconds=WARM_UP_SECONDS,
                seconds=seconds,
                timeout_seconds=request_seconds,
                seed=seed,
                cpus=tuple(load_cpus),
                target_pid=server.pid,
            )
        )

    saturated = _saturated(
        # Whatever a try may last, so that no answer in it is refused for its length.
        lambda seconds: load(ClosedLoop(clients=CLIENTS), seconds, request_seconds=request_seconds + seconds),
        seconds_left,
    )
    steps = CapacitySteps(saturation=saturated.completed_per_second, p95_objective=p95_objective)
    resident = saturated.target_rss_bytes
    finished = True
    seed = 0
    while (rate := steps.next_rate()) is not None:
        seconds = point_seconds(rate)
        if seconds_left() < seconds + WARM_UP_SECONDS + OVERHEAD_SECONDS:
            finished = False
            break
        seed += 1
        try:
            result = load(OpenLoop(arrivals_per_second=rate), seconds, request_seconds=request_seconds, seed=seed)
        except LoadFailed:
            # The curve so far stands; its last point was complete.
            finished = False
            break
        point = to_point(rate, result)
        steps.record(point)
        on_point(point)
        resident = max(filter(None, (resident, result.target_rss_bytes)), default=None)
    return Measured(steps.curve(), saturated.completed_per_second, resident, finished)


def _saturated(load: Callable[[float], LoadResult], seconds_left: Callable[[], float]) -> LoadResult:
    """What clients that never pause get (`load`: for so many seconds), for as long as it takes until some are answered.

    A server whose every answer is an error is broken. One that only takes long is not: a large model's first answers
    come after seconds.
    """
    seconds = SATURATION_SECONDS
    while True:
        if seconds_left() < seconds + WARM_UP_SECONDS + OVERHEAD_SECONDS:
            raise CapacityFailed(NO_TIME, remedy=RAISE_BUDGET)
        try:
            result = load(seconds)
        except LoadFailed as error:
            raise CapacityFailed(error.message, remedy=error.remedy) from error
        if result.completed_per_second:
            return result
        if result.statuses and result.latency is None:
            raise ReplicaBroken(
                f"no request was answered: {result.statuses}, first: {result.first_failure or 'nothing'}",
                remedy="See the server's log",
            )
        if seconds >= LONGEST_SECONDS:
            raise CapacityFailed(
                f"none of {CLIENTS} clients had an answer within {seconds:.0f} s",
                remedy="Give the endpoint more cores, or lower spec.serving.maxInputTokens",
            )
        seconds = min(2 * seconds, LONGEST_SECONDS)


def point_seconds(rate: float) -> float:
    """How long a point at this rate (requests/s) is measured."""
    usual = min(max(WANTED_SAMPLES / rate, LEAST_SECONDS), MOST_SECONDS)
    return max(usual, min(FEWEST_SAMPLES / rate, LONGEST_SECONDS))


def to_point(rate: float, result: LoadResult) -> CapacityPoint:
    """A measurement as a point of the curve. Without a single answer its latency is the whole time."""
    latency = result.latency
    nothing = result.seconds * 1e3
    return CapacityPoint(
        arrivals_per_second=rate,
        completed_per_second=result.completed_per_second,
        p50_milliseconds=latency.p50 if latency else nothing,
        p95_milliseconds=latency.p95 if latency else nothing,
        p99_milliseconds=latency.p99 if latency else nothing,
        refused_share=result.refused_share,
        samples=latency.count if latency else 0,
    )


def _first_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The line that says that it is ready; empty when it ended or took too long."""
    assert process.stdout is not None  # noqa: S101 - a pipe
    end = time.monotonic() + seconds
    line = b""
    while not line and (left := end - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        line = process.stdout.readline()
        if not line:
            # The end of its output comes a moment before its own.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            break
    return line
