"""Measures an engine and a plan in process: single runs by length, lone requests, requests at saturation.

The measured code is the code that serves: tokenising, batching, forward pass and assembling; only HTTP is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from penstock_optimizer.load.generator import poisson_arrivals
from penstock_optimizer.load.summary import quantile
from penstock_optimizer.search.goal import PlanSample
from penstock_runtime.errors import DeadlineExceeded, Overloaded

LEAST_RUNS = 3
MOST_RUNS = 60
LONE_SECONDS = 0.4
SHORT_SECONDS = 0.15
"""For each of the shortest lengths."""
MOST_LONE_SECONDS = 6.0
SATURATION_SECONDS = 0.7
MOST_SATURATION_SECONDS = 6.0
LOADED_SECONDS = 2.0
DRAIN_SECONDS = 10.0
"""For requests in progress when the last one of the wanted rate was due. No longer: a slow model at too high a rate
would count as hanging."""
MOST_RATE = 20_000.0
"""Requests a second: more than this process can send, and more than any model answers."""
OUTSTANDING = 32
"""Requests in progress at saturation: as many clients as the mixed-traffic benchmark has."""


def resident_bytes() -> int:
    """Resident memory of this process, after freed memory is returned to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # C libraries other than glibc
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


class Predicting(Protocol):
    """The part of the predictor that is measured."""

    async def predict(self, inputs: Any, parameters: Mapping[str, Any]) -> Any:
        """Return the answer."""


@dataclass(frozen=True)
class PredictRequest:
    """A request as the predictor takes it."""

    inputs: Any
    parameters: Mapping[str, Any]


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of timed code."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def time_runs(
    run: Callable[[], object], seconds: float, *, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Milliseconds of single runs: after one that does not count, for about `seconds`, at least three of them."""
    run()
    times: list[float] = []
    with no_collection():
        end = clock() + seconds
        while len(times) < MOST_RUNS and (len(times) < LEAST_RUNS or clock() < end):
            begin = clock()
            run()
            times.append((clock() - begin) * 1e3)
    return times


async def sample_plan(
    predictor: Predicting,
    requests: Sequence[PredictRequest],
    *,
    short: Mapping[int, Sequence[PredictRequest]] | None = None,
    rate: float | None = None,
) -> PlanSample:
    """Measure a plan with requests of the workload's mix: one at a time, also requests of the shortest lengths
    (`short`, by tokens) too, then many at once, and with `rate` (requests/s) arriving at random at that rate."""
    for request in requests[:4]:
        await predictor.predict(request.inputs, request.parameters)
    with no_collection():
        p50, p95, mean = await lone_latency(predictor, requests)
        shortest = {
            tokens: (await lone_latency(predictor, some, seconds=SHORT_SECONDS))[0]
            for tokens, some in (short or {}).items()
        }
        rows = await saturation(predictor, requests, expected_seconds=mean)
        loaded = await loaded_p95(predictor, requests, rate) if rate is not None else None
    return PlanSample(
        p50_milliseconds=p50,
        p95_milliseconds=p95,
        requests_per_second=rows,
        loaded_p95_milliseconds=loaded,
        short_milliseconds=shortest,
    )


async def lone_latency(
    predictor: Predicting, requests: Sequence[PredictRequest], *, seconds: float = LONE_SECONDS
) -> tuple[float, float, float]:
    """p50 and p95 in milliseconds over the mix, and the mean in seconds, one request at a time, for about `seconds`.

    Whole rounds over the mix, so that every measurement has the same lengths; each request counts with its median over
    the rounds, so that one disturbance does not become the tail.
    """
    times: list[list[float]] = [[] for _ in requests]
    begin = time.perf_counter()
    rounds = 0
    while rounds == 0 or (time.perf_counter() - begin < seconds and rounds < MOST_RUNS):
        for index, request in enumerate(requests):
            start = time.perf_counter()
            await predictor.predict(request.inputs, request.parameters)
            times[index].append(time.perf_counter() - start)
            if rounds == 0 and time.perf_counter() - begin > MOST_LONE_SECONDS:
                break
        rounds += 1
        if time.perf_counter() - begin > MOST_LONE_SECONDS:
            break
    medians = sorted(median(values) for values in times if values)
    return quantile(medians, 0.5) * 1e3, quantile(medians, 0.95) * 1e3, sum(medians) / len(medians)


async def saturation(predictor: Predicting, requests: Sequence[PredictRequest], *, expected_seconds: float) -> float:
    """Requests a second with many in progress at all times: a fixed amount of work, whole rounds over the mix.

    `expected_seconds`: time of a lone request, to choose the amount.
    """
    round_seconds = max(expected_seconds * len(requests), 1e-6)
    rounds = max(1, min(round(SATURATION_SECONDS / round_seconds), 50))
    share = min(1.0, MOST_SATURATION_SECONDS / (round_seconds * rounds))
    todo = [request for _ in range(rounds) for request in requests][
        : max(OUTSTANDING, round(len(requests) * rounds * share))
    ]
    waiting = iter(todo)

    async def client() -> None:
        for request in waiting:
            await predictor.predict(request.inputs, request.parameters)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(OUTSTANDING):
            group.create_task(client())
    return len(todo) / (time.perf_counter() - begin)


async def loaded_p95(predictor: Predicting, requests: Sequence[PredictRequest], rate: float) -> float:
    """p95 in milliseconds with requests arriving at random at `rate` a second, counted from when each was due.

    A request that is refused, or has no answer DRAIN_SECONDS after the last was due, counts as waiting until then: a
    plan that the rate is too high for is slow, not broken.
    """
    rate = min(rate, MOST_RATE)
    seconds = max(LOADED_SECONDS, min(40 / rate, 3 * LOADED_SECONDS))
    arrivals = poisson_arrivals(rate, seconds, seed=0)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    end = begin + seconds + DRAIN_SECONDS
    latencies = [seconds + DRAIN_SECONDS - at for at in arrivals]

    async def one(index: int) -> None:
        request = requests[index % len(requests)]
        with suppress(Overloaded, DeadlineExceeded):
            await predictor.predict(request.inputs, request.parameters)
            latencies[index] = loop.time() - begin - arrivals[index]

    tasks: list[asyncio.Task[None]] = []
    for index, at in enumerate(arrivals):
        delay = begin + at - loop.time()
        if delay > 0:
            await asyncio.sleep(delay)
        elif index % OUTSTANDING == OUTSTANDING - 1:
            # More are due than can be sent: the answers need the event loop too, and a request not sent in time is a
            # miss.
            await asyncio.sleep(0)
            if loop.time() - begin > seconds:
                break
        tasks.append(loop.create_task(one(index)))
    done, late = await asyncio.wait(tasks, timeout=end - loop.time(), return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()
    return quantile(sorted(latencies), 0.95) * 1e3
