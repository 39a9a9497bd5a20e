"""Measures the capacity curve of a replica that generates text: clients that read streams of the real server.

The number of clients is doubled until a time objective is missed or more clients bring no more tokens per second; then
numbers between the last good and the first bad one are tried (`ClientSteps`, pure).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from penstock.capacity import TokenCurve, TokenPoint
from penstock.errors import UnsupportedModel
from penstock.resources.endpoint import Objective, Workload
from penstock_optimizer.capacity.curve import CapacityFailed, ReplicaBroken, ReplicaServer
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.generator import LoadFailed
from penstock_optimizer.load.streams import StreamSpec, run_streams
from penstock_optimizer.load.workload import TextMaker

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
BODIES = 200
"""Different requests of a point: none is repeated while the server still has its prompt in the cache."""
OVERHEAD_SECONDS = 1.0
"""Starting the load process."""


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
    """The curve of a replica within `seconds_left`; without points where there was no time for one. `measure`: the
    point with a number of clients, within some seconds, as `StreamingClients.measure`. `lengths`: tokens of prompts and
    answers."""
    steps = ClientSteps(objective, lengths=lengths)
    while (count := steps.next_clients()) is not None and seconds_left() > LEAST_SECONDS + OVERHEAD_SECONDS:
        point = measure(count, seconds_left() - OVERHEAD_SECONDS)
        if point is None:
            break
        steps.points.append(point)
        on_point(point)
    return steps.curve


@dataclass
class StreamingClients:
    """Clients of a server that each send a request, read the whole answer, and send the next one."""

    server: ReplicaServer
    tokenizer: Tokenizer
    lengths: Sequence[tuple[int, int]]
    """Tokens of prompts and answers, which fit into the context."""
    cpus: Sequence[int] = ()
    """Logical CPUs of the load process."""

    def __post_init__(self) -> None:
        self._random = random.Random(0)  # noqa: S311 - reproducible, not secret
        self._texts: TextMaker | None = TextMaker(self.tokenizer)

    def measure(self, count: int, seconds: float) -> TokenPoint | None:
        """A point with this number of clients; None if there is none within `seconds`. CapacityFailed when requests are
        refused or the load process fails; ReplicaBroken when one client alone gets no answer."""
        spec = StreamSpec(
            url=f"{self.server.url}/v1/completions",
            bodies=self._bodies(count),
            timeout_seconds=seconds,
            clients=count,
            answers=ANSWERS + 2 * count,
            start_seconds=min(START_SECONDS, seconds / 2),
            least_seconds=LEAST_SECONDS,
            most_seconds=min(MOST_SECONDS, seconds / 2),
            cpus=tuple(self.cpus),
        )
        try:
            found = run_streams(spec)
        except LoadFailed as error:
            raise CapacityFailed(error.message, remedy=error.remedy) from error
        if found.failed:
            kind = ReplicaBroken if count == 1 else CapacityFailed
            raise kind(f"no answer to {found.failed} of {count} clients: {found.first_failure or 'disconnected'}")
        first, following = found.first_token_p95_milliseconds, found.next_token_p95_milliseconds
        if not found.answers or first is None or following is None:
            return None
        return TokenPoint(
            clients=count,
            requests_per_second=found.answers / found.seconds,
            tokens_per_second=found.tokens / found.seconds,
            first_token_p95_milliseconds=first,
            next_token_p95_milliseconds=following,
            samples=found.answers,
        )

    def _bodies(self, count: int) -> tuple[RequestBody, ...]:
        """Requests of the workload. The first answers are shorter by chance, so that later ones do not begin and end
        together."""
        bodies = []
        for number in range(count + BODIES):
            prompt, output = self._random.choice(list(self.lengths))
            share = self._random.uniform(0.1, 1) if number < count else 1.0
            body = {
                "prompt": self._prompt(prompt),
                "max_tokens": max(round(share * output), 2),
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            bodies.append(RequestBody(body=json.dumps(body, ensure_ascii=False)))
        return tuple(bodies)

    def _prompt(self, tokens: int) -> str | list[int]:
        """A text of this number of tokens that begins as no other one, since the server caches the beginnings of
        prompts; token ids where the vocabulary allows no such texts."""
        if self._texts is not None:
            try:
                return self._texts.text(tokens)
            except UnsupportedModel:
                self._texts = None
        return [self._random.randrange(self.tokenizer.get_vocab_size()) for _ in range(tokens)]
