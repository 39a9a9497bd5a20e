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
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from penstock_bench.cell import CellResult, CellSpec
from penstock_optimizer.load.client import SWEEP_SECONDS, LoadClient, is_good, status_name
from penstock_optimizer.load.summary import quantile
from penstock_optimizer.load.timing import (
    SHORTEST_NANOSECONDS,
    USUAL_NANOSECONDS,
    PreciseTimer,
    ResourceUsage,
    set_time_slice,
)

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
        """Give up on a cell whose server answers nothing."""
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
        # With several clients, answers to requests of the warm-up count too: they are what the server did meanwhile.
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
        """What others took of the server's CPUs. This process counts as ours when it runs on them."""
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
    """Where this process has CPUs of its own, other programs there should not make the server look slow. Where it
    shares the server's, it waits its turn like any client."""
    apart = bool(spec.cpus) and not os.sched_getaffinity(0) & set(spec.cpus)
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        return apart
    return set_time_slice(SHORTEST_NANOSECONDS if apart else USUAL_NANOSECONDS) and apart
