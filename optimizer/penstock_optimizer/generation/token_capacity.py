"""Measures the capacity of a plan of text generation: clients in process, through the scheduler that serves.

The number of clients is doubled until a time objective is missed or more clients bring no more tokens per second; then
numbers between the last good and the first bad one are tried (`ClientSteps`, pure). HTTP is left out: a token's event
costs it microseconds.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.capacity import TokenCurve, TokenPoint
from penstock.resources.endpoint import Objective, Workload
from penstock_runtime.engines.base import StepEngine
from penstock_runtime.generation.loop import Delta, GenerationJob, GenerationLoop, JobRequest
from penstock_runtime.generation.sampling import SamplingParameters
from penstock_runtime.generation.scheduler import Step

DEFAULT_LENGTHS = ((64, 96), (128, 32), (128, 64), (512, 64))
"""Tokens of prompts and answers where the endpoint states none: questions, and a longer text among them."""
DEFAULT_OUTPUT = 64
"""Tokens of an answer where the endpoint states the lengths of prompts only."""
MOST_CLIENTS = 64
GAIN = 1.05
"""A larger number of clients is of use when it brings this many times the tokens per second."""
BETWEEN = 1
"""Numbers of clients that are tried between a good and a bad one."""
LEAST_SECONDS, MOST_SECONDS = 2.0, 10.0
"""A point lasts until it has enough answers, within these limits."""
ANSWERS = 16
"""Answers that are enough, and two for each client."""
START_SECONDS = 20.0
"""Time until each client has had its first answer; a point that takes longer is not measured."""


def request_lengths(workload: Workload, context: int) -> tuple[tuple[int, int], ...]:
    """Tokens of prompts and answers of an endpoint's workload, shortened to a context; each is as likely as it is
    listed."""
    stated = workload.request_lengths or tuple((prompt, DEFAULT_OUTPUT) for prompt in workload.sequence_lengths)
    fitted = []
    for prompt, output in stated or DEFAULT_LENGTHS:
        answer = max(min(output, context // 2), 2)
        fitted.append((max(min(prompt, context - answer), 1), answer))
    return tuple(fitted)


def lengths_text(lengths: Sequence[tuple[int, int]]) -> str:
    """Lengths of requests in one line, such as `prompts of 64 to 512 tokens, answers of 32 to 96`."""
    prompts, outputs = zip(*lengths, strict=True)
    return f"prompts of {_range(prompts)} tokens, answers of {_range(outputs)}"


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def capacity_findings(curve: TokenCurve, objective: Objective) -> list[str]:
    """Sentences about a capacity that was not measured, or that misses the objective."""
    if not curve.points:
        return ["The capacity of a replica was not measured: the time budget was too short."]
    if curve.within is None:
        return [f"{curve.summary[:1].upper()}{curve.summary[1:]}: give it more cores, or a smaller model."]
    asked, reached = objective.tokens_per_second, curve.within.tokens_per_second
    if asked is not None and reached < asked:
        return [f"The {asked:.4g} tokens/s of the objective are not reached: one replica takes {reached:.4g} of them."]
    return []


@dataclass
class ClientSteps:
    """The state of one curve."""

    objective: Objective
    points: list[TokenPoint] = field(default_factory=list)
    lengths: Sequence[tuple[int, int]] = ()
    """Tokens of prompts and answers."""

    @property
    def curve(self) -> TokenCurve:
        """The points so far."""
        first, following = self.objective.first_token_milliseconds, self.objective.next_token_milliseconds
        return TokenCurve.of(self.points, first_token=first, next_token=following, lengths=self.lengths)

    def next_clients(self) -> int | None:
        """The number of clients to measure next; None when the curve is complete."""
        curve = self.curve
        if not curve.points:
            return 1
        bad = min((point.clients for point in curve.points if not curve.meets(point)), default=None)
        good = max((point.clients for point in curve.points if bad is None or point.clients < bad), default=0)
        if bad is None:
            rates = [point.tokens_per_second for point in curve.points]
            grows = len(rates) < 2 or rates[-1] >= GAIN * max(rates[:-1])
            return 2 * good if grows and good < MOST_CLIENTS else None
        between = sum(point.clients.bit_count() > 1 for point in curve.points)
        middle = round(math.sqrt(good * bad)) if good else 0
        return middle if good < middle < bad and between < BETWEEN else None


def measure_tokens(
    measure: Callable[[int, float], TokenPoint | None],
    lengths: Sequence[tuple[int, int]],
    objective: Objective,
    *,
    seconds_left: Callable[[], float],
    on_point: Callable[[TokenPoint], None] = lambda _: None,
) -> TokenCurve:
    """The curve of an engine within `seconds_left`; without points where there was no time for one. `measure`: the
    point with a number of clients, within some seconds, as `CapacityClients.measure`. `lengths`: tokens of prompts and
    answers."""
    steps = ClientSteps(objective, lengths=lengths)
    while (count := steps.next_clients()) is not None and seconds_left() > LEAST_SECONDS:
        point = measure(count, seconds_left())
        if point is None:
            break
        steps.points.append(point)
        on_point(point)
    return steps.curve


class CapacityClients:
    """Clients of an engine that each send a request, wait for the whole answer, and send the next. A `LoopObserver`.

    All but `measure` runs in the loop's thread.
    """

    def __init__(
        self, engine: StepEngine, decode: Callable[[Sequence[int]], str], lengths: Sequence[tuple[int, int]]
    ) -> None:
        """`lengths`: tokens of prompts and answers, which fit into the engine's pool. `loop` closes the engine."""
        self._random = np.random.default_rng(0)
        self._vocabulary = engine.vocabulary
        self._lengths = lengths
        self._wanted = 0
        """Clients that send."""
        self._running: set[GenerationJob] = set()
        self._changed = threading.Condition()
        self._reset()
        self.loop = GenerationLoop(engine, decode, self.publish, self, max_sequences=MOST_CLIENTS)

    def _reset(self) -> None:
        self._began = time.perf_counter()
        self._first: list[float] = []
        self._next: list[float] = []
        self._tokens = self._answers = 0

    def measure(self, count: int, seconds: float) -> TokenPoint | None:
        """A point with this number of clients; None if there is none within `seconds`."""
        end = time.perf_counter() + seconds
        with self._changed:
            self._wanted = count
            # The first answers are shorter by chance, so that later ones do not begin and end together.
            self._starting = {self._send(share) for share in self._random.uniform(0.1, 1, count)}
            self._changed.wait_for(lambda: not self._starting, min(START_SECONDS, end - time.perf_counter()))
            started = not self._starting
            self._reset()
            if started:
                self._wait_for_answers(ANSWERS + 2 * count, end)
            taken = time.perf_counter() - self._began
            point = self._point(count, taken) if started else None
            self._wanted = 0
            for job in self._running:
                self.loop.cancel(job)
            self._running.clear()
            self._starting.clear()
        return point

    def _wait_for_answers(self, enough: int, end: float) -> None:
        least, most = self._began + LEAST_SECONDS, min(self._began + MOST_SECONDS, end)
        while (now := time.perf_counter()) < most:
            if self._answers >= enough and now >= least:
                return
            until = most if self._answers < enough else min(least, most)
            self._changed.wait(until - now)

    def _point(self, clients: int, seconds: float) -> TokenPoint | None:
        if not (self._answers and self._first and self._next):
            return None
        return TokenPoint(
            clients=clients,
            requests_per_second=self._answers / seconds,
            tokens_per_second=self._tokens / seconds,
            first_token_p95_milliseconds=1000 * float(np.quantile(self._first, 0.95)),
            next_token_p95_milliseconds=1000 * float(np.quantile(self._next, 0.95)),
            samples=self._answers,
        )

    def _send(self, share: float = 1.0) -> GenerationJob:
        prompt, output = self._lengths[int(self._random.integers(len(self._lengths)))]
        # Random tokens: prompts that begin alike would be found in the cache.
        tokens = self._random.integers(self._vocabulary, size=prompt).tolist()
        limit = max(round(share * output), 2)
        job = self.loop.submit(JobRequest(tokens, max_tokens=limit, sampling=SamplingParameters(temperature=0.0)))
        self._running.add(job)
        return job

    def publish(self, events: list[tuple[GenerationJob, Delta]]) -> None:
        """Count the tokens of a step, and send the next requests."""
        with self._changed:
            for job, delta in events:
                if job not in self._running:
                    continue
                self._tokens += delta.token is not None
                if delta.finish is None and delta.error is None:
                    continue
                self._running.remove(job)
                self._starting.discard(job)
                self._answers += delta.error is None
                if len(self._running) < self._wanted:
                    self._send()
            self._changed.notify_all()

    def first_token(self, seconds: float) -> None:
        """See `LoopObserver`."""
        with self._changed:
            self._first.append(seconds)

    def next_token(self, seconds: float) -> None:
        """See `LoopObserver`."""
        with self._changed:
            self._next.append(seconds)

    def step(self, step: Step, seconds: float) -> None:
        """See `LoopObserver`."""

    def reused(self, tokens: int) -> None:
        """See `LoopObserver`."""
