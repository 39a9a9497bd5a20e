"""Measures the capacity curve of one replica: the real server in a separate process, requests arriving at random.

`serve_replica` starts `python -m penstock_optimizer.capacity.curve ARTEFACT --cores 2 --cpus 0,1`, the server, on a
free port of the loopback interface: it prints one JSON line `{"port": ...}` when it is ready, and serves until its
standard input ends or it gets a signal. It imports little that a server does not, as its memory is reported as the
server's.

The arrival rate rises geometrically until the latency objective is missed; then the interval between the last good and
the first bad rate is halved (`CapacitySteps`, pure). A miss counts only when most of up to three measurements at a rate
miss: one burst of other work on the machine must not end the curve.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import random
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock.errors import PenstockError
from penstock.manifest import Manifest
from penstock.process import python_module
from penstock.tasks import TaskName
from penstock_optimizer.candidate.isolation import death_reason
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.generator import ClosedLoop, LoadFailed, LoadResult, LoadSpec, OpenLoop, run_load

LEAST_START_SECONDS = 2.0
"""A replica is not started with less time than this."""
NO_TIME = "the time budget was spent before the capacity could be measured"
STOP_SECONDS = 10.0
LIMITS_ROWS, LIMITS_SECONDS, LIMITS_SEED = 1000, 10.0, 20261128
"""For the limits of the guard of live traffic, with parts of the judging texts: none of 1,000 answers damaged proves a
share of at most 0.4 %."""
LIMITS_PROCESS_SECONDS = 30.0
"""After which it is given up, with loading."""


class CapacityFailed(PenstockError):
    """The replica was not measured: there was no time, or the load process failed."""


class ReplicaBroken(CapacityFailed):
    """The server ended before it was ready, or answered no request: its plan must not be served."""

    @property
    def outcome(self) -> str:
        """A clause about the candidate."""
        return f"{self.message} while it served"


class OutsideIndex(ReplicaBroken):
    """The vectors of the plan do not fit the index of the endpoint."""

    @property
    def outcome(self) -> str:
        """See `ReplicaBroken`."""
        return self.message


@dataclass(frozen=True)
class ReplicaServer:
    """A running server."""

    url: str
    """Of the server, without a path."""
    pid: int


@contextmanager
def serve_replica(
    artefact: Path,
    *,
    cores: int,
    cpus: Sequence[int],
    log: Path,
    max_tokens: int | None = None,
    probes: Path | None = None,
    start_seconds: float,
) -> Iterator[ReplicaServer]:
    """Serve an artefact on these CPUs within the context; CapacityFailed when it does not start in time. `probes`: a
    file to write the vectors of the probe texts to, of a model that has such."""
    if start_seconds < LEAST_START_SECONDS:
        raise CapacityFailed(NO_TIME, remedy="Allow more time")
    command = [*python_module("penstock_optimizer.capacity.curve"), str(artefact), "--cores", str(cores)]
    if cpus:
        command += ["--cpus", ",".join(map(str, cpus))]
    if max_tokens is not None:
        command += ["--max-tokens", str(max_tokens)]
    if probes is not None:
        command += ["--probes", str(probes)]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
    assert process.stdout is not None  # noqa: S101 - both are pipes
    assert process.stdin is not None  # noqa: S101
    line = b""
    try:
        line = _read_first_line(process, start_seconds)
        if not line:
            code = process.poll()
            if code is None:
                raise CapacityFailed(f"the server was not ready after {start_seconds:.0f} s", remedy=f"See {log}")
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
            raise ReplicaBroken(f"the server did not start: {death_reason(code, tail)}", remedy=f"See {log}")
        yield ReplicaServer(f"http://127.0.0.1:{json.loads(line)['port']}", process.pid)
    finally:
        process.stdin.close()
        try:
            # Not ready yet: it does not react to the end of its input.
            if not line:
                process.kill()
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _read_first_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The line that reports the server ready; empty when it ended or took too long."""
    assert process.stdout is not None  # noqa: S101 - a pipe
    end = time.monotonic() + seconds
    line = b""
    while not line and (left := end - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        line = process.stdout.readline()
        if not line:
            # Its output ends a moment before the process.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            break
    return line


async def serve(artefact: Path, *, cores: int, max_tokens: int | None, probes: Path | None) -> None:
    """Load the artefact, listen, print the port, and serve."""
    # Imported here: the process that measures needs none of it.
    import numpy as np

    from penstock_runtime.app.lifecycle import AnyModel, start_model
    from penstock_runtime.app.server import Server, request_limits
    from penstock_runtime.host import read_host
    from penstock_runtime.serving.generation_model import load_generation_artefact
    from penstock_runtime.serving.loaded_model import LoadedModel, load_artefact
    from penstock_runtime.serving.probes import probe_vectors
    from penstock_runtime.serving.status import ServerStatus
    from penstock_runtime.settings import Settings

    settings = Settings.model_validate({"http": {"host": "127.0.0.1", "port": 0}})
    model: AnyModel
    task = Manifest.load(artefact).task
    if task is TaskName.TEXT_GENERATION:
        model = load_generation_artefact(artefact, "chosen", read_host(), cores=cores)
        # Answers have the lengths of the workload, whatever the model would say.
        model.end_tokens = frozenset()
    else:
        model = load_artefact(
            artefact, "chosen", read_host(), cores=cores, max_tokens=max_tokens, limits=request_limits(settings)
        )
    server = Server(ServerStatus("capacity", task), settings)
    await server.start()
    await start_model(server, model)
    if probes is not None and isinstance(model, LoadedModel):
        vectors = await asyncio.to_thread(probe_vectors, model)
        if vectors is not None:
            np.save(probes, vectors, allow_pickle=False)
    sys.stdout.write(json.dumps({"port": server.port}) + "\n")
    sys.stdout.flush()
    reader = asyncio.StreamReader()
    # The parent holds the other end: when it ends, the measurement has too.
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    ended = asyncio.create_task(reader.read())
    ended.add_done_callback(lambda _: server.stop())
    await server.serve()


def measure_limits(artefact: Path, limits: Path, *, cpus: Sequence[int], log: Path, max_tokens: int | None) -> None:
    """Write what the guard of live traffic tests against to the file `limits`, unless fp32 serves, or the texts are too
    few. In another process, so that the memory of fp32 is not reported as the server's."""
    command = [*python_module("penstock_optimizer.capacity.curve"), str(artefact), "--limits", str(limits)]
    if cpus:
        command += ["--cpus", ",".join(map(str, cpus))]
    if max_tokens is not None:
        command += ["--max-tokens", str(max_tokens)]
    with log.open("ab") as file, contextlib.suppress(subprocess.TimeoutExpired):
        # Without the file, the guard of live traffic is off for this artefact; its log has the error.
        subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=LIMITS_PROCESS_SECONDS,
        )


def write_limits(artefact: Path, limits: Path, *, max_tokens: int | None) -> None:
    """See `measure_limits`."""
    from penstock_optimizer.guard.gate import own_corpus, prepare, samples, split
    from penstock_runtime.host import read_host
    from penstock_runtime.serving.loaded_model import is_on_device, load_artefact, load_reference
    from penstock_runtime.serving.shadow import measured_limits

    manifest = Manifest.load(artefact)
    if manifest.serves_fp32 or is_on_device(manifest.chosen.plan):
        return
    model = load_artefact(artefact, "chosen", read_host(), cores=1, max_tokens=max_tokens)
    mask = model.task.tokenizer.mask_token or "[MASK]"
    requests = [*samples(manifest.task, split(own_corpus(), ())[1], mask=mask)]
    dice = random.Random(LIMITS_SEED)  # noqa: S311 - reproducible, not secret
    texts = [one for one in requests if isinstance(one.inputs, str) and " " in one.inputs and mask not in one.inputs]
    while texts and len(requests) < LIMITS_ROWS:
        one = dice.choice(texts)
        words = one.inputs.split(" ")
        first, last = sorted(dice.sample(range(len(words) + 1), 2))
        requests.append(replace(one, inputs=" ".join(words[first:last]) or one.inputs))
    rows = [row for prepared in prepare(model.task, requests) for row in prepared.rows]
    dice.shuffle(rows)
    reference = load_reference(artefact, manifest, model.max_tokens)
    found = measured_limits(model, reference, rows[:LIMITS_ROWS], LIMITS_SECONDS)
    if found is not None:
        limits.write_text(found.model_dump_json(), encoding="utf-8")


def main() -> None:
    """Serve one artefact, or compare its answers with fp32's."""
    import uvloop

    from penstock_runtime.host import pin_process

    parser = argparse.ArgumentParser()
    parser.add_argument("artefact", type=Path)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--cpus", default="")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--probes", type=Path)
    parser.add_argument("--limits", type=Path)
    options = parser.parse_args()
    if options.cpus:
        pin_process(int(cpu) for cpu in options.cpus.split(","))
    if options.limits is not None:
        write_limits(options.artefact, options.limits, max_tokens=options.max_tokens)
        return
    uvloop.run(serve(options.artefact, cores=options.cores, max_tokens=options.max_tokens, probes=options.probes))


if __name__ == "__main__":
    main()


FIRST_SHARE = 0.15
"""The first rate, as a share of the throughput at saturation: low enough to be idle."""
GROWTH = 1.6
REFINEMENTS = 4
CLOSE = 1.06
"""Good and bad rates within this factor of each other need no further halving."""
VOTES = 3
LOWEST_SHARE = 0.02
"""Below this share of saturation an objective is out of reach: it is shorter than the time of a lone request."""
UNSTATED_FACTOR = 3.0
"""Without a latency objective, the limit is this many times the p95 of a nearly idle replica."""
CLIENTS = 32
SATURATION_SECONDS = 1.5
"""Of the first attempt; when no request is answered, the next ones are longer."""
LEAST_SECONDS, MOST_SECONDS = 2.0, 6.0
WANTED_SAMPLES = 200
"""A point lasts until it has about this many requests, within its limits: ten are then beyond p95."""
FEWEST_SAMPLES, LONGEST_SECONDS = 40, 15.0
"""A slow model's point lasts longer, until it has at least this many."""
REQUEST_SECONDS = 5.0
"""Time until a request counts as not answered, or four times the objective where that is longer."""
WARM_UP_SECONDS = 0.4
OVERHEAD_SECONDS = 1.0
"""Starting the load process and draining."""
TOKENS, ANSWERED = "penstock_tokens_total", "penstock_request_seconds_count"
"""Counters of the server."""


@dataclass
class CapacitySteps:
    """The state of one curve."""

    saturation: float
    """Requests a second of a closed loop with many clients."""
    p95_objective: float | None
    """Milliseconds; None: set by the first point."""
    measured: dict[float, list[CapacityPoint]] = field(default_factory=dict)
    refinements: int = 0

    @property
    def limit(self) -> float | None:
        """The p95 limit of a good point in milliseconds; None before the first point where no objective is stated."""
        if self.p95_objective is not None:
            return self.p95_objective
        if not self.measured:
            return None
        idle = self.measured[min(self.measured)]
        return UNSTATED_FACTOR * _middle(idle).p95_milliseconds

    def record(self, point: CapacityPoint) -> None:
        """Add a measurement at the rate that `next_rate` returned."""
        self.measured.setdefault(point.arrivals_per_second, []).append(point)

    def next_rate(self) -> float | None:
        """The rate to measure next, requests/s; None when the knee is known well enough."""
        if not self.measured:
            return self.saturation * FIRST_SHARE
        for rate, points in self.measured.items():
            if self._undecided(points):
                return rate
        good = [rate for rate, points in self.measured.items() if self._keeps(points)]
        bad = [rate for rate, points in self.measured.items() if not self._keeps(points)]
        if not bad:
            return max(good) * GROWTH
        below = [rate for rate in good if rate < min(bad)]
        if not below:
            lower = min(bad) / (GROWTH * GROWTH)
            return lower if lower >= self.saturation * LOWEST_SHARE else None
        if self.refinements >= REFINEMENTS or min(bad) / max(below) <= CLOSE:
            return None
        self.refinements += 1
        return math.sqrt(min(bad) * max(below))

    def curve(self) -> CapacityCurve:
        """The points by rising rate, one for each rate."""
        points = tuple(_middle(self.measured[rate]) for rate in sorted(self.measured))
        return CapacityCurve(points=points, p95_objective_milliseconds=self.limit)

    def _meets(self, point: CapacityPoint) -> bool:
        # Before the first point there is no limit; the first point sets it.
        return point.meets(self.limit if self.limit is not None else math.inf)

    def _undecided(self, points: Sequence[CapacityPoint]) -> bool:
        """True when a rate needs another measurement: a first miss needs a second one, a tie a third."""
        votes = [self._meets(point) for point in points]
        if votes == [True]:
            return False
        return len(votes) < VOTES and abs(sum(votes) * 2 - len(votes)) < 2

    def _keeps(self, points: Sequence[CapacityPoint]) -> bool:
        votes = sum(self._meets(point) for point in points)
        return votes * 2 > len(points)


def _middle(points: Sequence[CapacityPoint]) -> CapacityPoint:
    """The point with the median p95 (the better one of two)."""
    ordered = sorted(points, key=lambda point: (point.refused_share, point.p95_milliseconds))
    return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True)
class CapacityMeasurement:
    """The result of measuring the capacity."""

    curve: CapacityCurve
    saturation_per_second: float
    """Requests a second with 32 clients in a closed loop."""
    resident_bytes: int | None
    """Of the serving process under load."""
    finished: bool
    """False: the time ended before the knee was found."""


def measure_capacity(
    server: ReplicaServer,
    bodies: Sequence[RequestBody],
    *,
    p95_objective: float | None,
    load_cpus: Sequence[int],
    seconds_left: Callable[[], float],
    on_point: Callable[[CapacityPoint], None] = lambda _: None,
) -> CapacityMeasurement:
    """Measure the curve within `seconds_left`. CapacityFailed as soon as it is clear that there will be none."""
    request_seconds = max(REQUEST_SECONDS, 4e-3 * (p95_objective or 0.0))

    def load(pattern: OpenLoop | ClosedLoop, seconds: float, *, request_seconds: float, seed: int = 0) -> LoadResult:
        return run_load(
            LoadSpec(
                url=f"{server.url}/predict",
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

    saturated = _measure_saturation(
        # The time limit of a request covers the whole attempt, so that no late answer is refused.
        lambda seconds: load(ClosedLoop(clients=CLIENTS), seconds, request_seconds=request_seconds + seconds),
        seconds_left,
    )
    tokens = tokens_per_request(server.url)
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
            # The curve so far is kept; its last point was complete.
            finished = False
            break
        point = to_point(rate, result)
        steps.record(point)
        on_point(point)
        resident = max(filter(None, (resident, result.target_rss_bytes)), default=None)
    curve = steps.curve().model_copy(update={"tokens_per_request": tokens})
    return CapacityMeasurement(curve, saturated.completed_per_second, resident, finished)


def tokens_per_request(url: str) -> float | None:
    """The mean of the tokens computed for a request, from the metrics of the server with this URL; None where it has
    none."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=REQUEST_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        counts = dict(line.split(" ")[:2] for line in lines if line.startswith((TOKENS, ANSWERED)))
        return float(counts[TOKENS]) / float(counts[ANSWERED]) or None
    except (OSError, http.client.HTTPException, ValueError, KeyError, ZeroDivisionError):
        return None


def _measure_saturation(load: Callable[[float], LoadResult], seconds_left: Callable[[], float]) -> LoadResult:
    """Measure the rate of clients in a closed loop, for longer until some requests are answered. `load` takes the
    seconds.

    A server that answers every request with an error is broken. A slow one is not: a large model's first answers come
    after seconds.
    """
    seconds = SATURATION_SECONDS
    while True:
        if seconds_left() < seconds + WARM_UP_SECONDS + OVERHEAD_SECONDS:
            raise CapacityFailed(NO_TIME, remedy="Allow more time")
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
    """Seconds to measure a point at this rate (requests/s)."""
    usual = min(max(WANTED_SAMPLES / rate, LEAST_SECONDS), MOST_SECONDS)
    return max(usual, min(FEWEST_SAMPLES / rate, LONGEST_SECONDS))


def to_point(rate: float, result: LoadResult) -> CapacityPoint:
    """Convert a measurement to a point of the curve. Without an answer the latency is the whole time."""
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
