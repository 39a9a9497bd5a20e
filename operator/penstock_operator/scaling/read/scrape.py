"""Scrapes /metrics of runtime pods and gateways without a Prometheus: many at once, each with a time and size limit.

The text format is parsed here and not by the Prometheus client library, which creates objects for all hundred and fifty
lines: a thousand pods are scraped every few seconds.

Behind a gateway the replicas get a limited number of requests and the rest waits in the gateway. Arrivals and requests
in flight come from the gateway then, the latency from the replicas.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Self

import aiohttp

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.pod_reports import pod_session
from penstock_operator.decide.measurement import Idle, Metrics, PodReading, Unknown, known
from penstock_operator.facts.findings import unprintable_as_spaces
from penstock_operator.facts.names import INTERNAL_PORT
from penstock_operator.facts.pod_data import (
    DEMAND_MAX_BYTES,
    METRICS_MAX_BYTES,
    Unreadable,
    read_body,
)
from penstock_operator.facts.pods import PodFacts
from penstock_operator.metrics import SCRAPES
from penstock_operator.supervision import supervised

ANSWERED = "penstock_request_seconds_count"
BUCKET = "penstock_request_seconds_bucket"
REQUESTS = "penstock_requests_total"
IN_FLIGHT = "penstock_in_flight_requests"
FIRST_TOKEN_BUCKET = "penstock_first_token_seconds_bucket"  # noqa: S105 - not a password
"""Only of text generation, whose latency objective is on the time to the first token."""
TOKENS = "penstock_tokens_total"
"""Computed for answered requests."""
GENERATION_TOKENS = "penstock_generation_tokens_total"
GENERATED = 'kind="generated"'
UNANSWERED_CODES = frozenset({"429", "499"})
"""Refused, or aborted by the client: they count as demand and are not in the histogram."""
NOT_READY_CODE = "503"
"""Of a server that is not ready; such requests are not in the histogram either, and a gateway sends them again."""
_CODE = re.compile(r'[{,]code="([^"]*)"')
_BOUND = re.compile(r'[{,]le="([^"]*)"')
MAX_BUCKETS = 128
MAX_COUNT = 2.0**53
"""Larger counts are not exact as floating-point numbers."""
MAX_PER_SECOND = 1e7
"""Requests, or tokens, that no pod processes in a second."""
CLOCK_SECONDS = 3600.0
"""The clocks of the API server and of the operator may differ by this much."""


class UnreadableMetrics(Unreadable):
    """The text is not a runtime's metrics."""


def parse_metrics(text: str) -> PodReading:
    """Parse a runtime's /metrics. UnreadableMetrics when a series is missing or a value is not a count."""
    answered: float | None = None
    in_flight: float | None = None
    unanswered = errors = 0.0
    tokens: float | None = None
    generated: float | None = None
    buckets: list[tuple[float, float]] = []
    first_tokens: list[tuple[float, float]] = []
    for line in text.splitlines():
        if not line.startswith("penstock_"):
            continue
        series, _, rest = line.rpartition("} ") if "} " in line else line.partition(" ")
        name = series.partition("{")[0]
        if name in {BUCKET, FIRST_TOKEN_BUCKET}:
            histogram = buckets if name == BUCKET else first_tokens
            found = _BOUND.search(series)
            if found is None:
                raise UnreadableMetrics("its latency histogram has a series without a bound (le)")
            bound = _number(found.group(1), line)
            if math.isnan(bound) or len(histogram) == MAX_BUCKETS:
                raise UnreadableMetrics(f"its latency histogram has more than {MAX_BUCKETS} bounds, or one is NaN")
            histogram.append((bound, _count(rest, line)))
        elif name == REQUESTS:
            code = _CODE.search(series)
            if code is not None and code.group(1) in UNANSWERED_CODES:
                unanswered += _count(rest, line)
            elif code is not None and code.group(1).startswith("5") and code.group(1) != NOT_READY_CODE:
                errors += _count(rest, line)
        elif name == ANSWERED:
            answered = _count(rest, line)
        elif name == IN_FLIGHT:
            in_flight = _count(rest, line)
        elif name == TOKENS:
            tokens = _count(rest, line)
        elif name == GENERATION_TOKENS and GENERATED in series:
            generated = _count(rest, line)
    if answered is None or in_flight is None or not buckets:
        raise UnreadableMetrics(f"it lacks one of {ANSWERED}, {BUCKET} and {IN_FLIGHT}")
    buckets = sorted(first_tokens or buckets)
    if buckets[-1][0] != math.inf:
        raise UnreadableMetrics("its latency histogram has no infinite bound")
    return PodReading(
        arrivals=answered + unanswered,
        # The scrape itself is in flight while it is counted.
        in_flight=max(0.0, in_flight - 1),
        bounds=tuple(bound for bound, _ in buckets),
        counts=array("d", (count for _, count in buckets)),
        errors=errors,
        answered=answered,
        tokens=tokens if generated is None else generated,
    )


def _number(text: str, line: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UnreadableMetrics(f"it has {line[:80]!r}, which is not a number") from None


def _count(rest: str, line: str) -> float:
    # A timestamp may follow the value.
    value = _number(rest.split(" ", 1)[0], line)
    if not 0 <= value <= MAX_COUNT:
        raise UnreadableMetrics(f"it has {line[:80]!r}, which is not a count")
    return value


def _reachable(reading: PodReading, seconds: float) -> PodReading:
    """The same reading. UnreadableMetrics when a count is more than a pod can reach within `seconds` of its
    creation."""
    limit = MAX_PER_SECOND * (max(0.0, seconds) + CLOCK_SECONDS)
    tokens = reading.tokens or 0.0
    counts = (reading.arrivals, reading.in_flight, reading.errors, reading.answered, tokens, max(reading.counts))
    if max(counts) > limit:
        raise UnreadableMetrics(f"it counts {max(counts):.3g}, more than a pod reaches in {seconds:.0f} s")
    return reading


@dataclass(frozen=True, slots=True, order=True)
class PodAddress:
    """Name and IP address of a pod."""

    name: str
    ip: str
    created: float = field(default=0.0, compare=False)
    """Seconds since the epoch, by the API server's clock; 0: not known."""


def address_of(pod: PodFacts) -> PodAddress:
    """The address of a pod as the caches have it."""
    return PodAddress(pod.name, pod.ip, 0.0 if pod.created is None else pod.created.timestamp())


class PodScraper:
    """An async context manager: it keeps connections."""

    def __init__(
        self,
        *,
        timeout_seconds: float,
        concurrency: int,
        port: int = INTERNAL_PORT,
        reader: Callable[[str], PodReading] = parse_metrics,
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._slots = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._port = port
        self._reader = reader
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = pod_session(self._timeout, limit=self._concurrency)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def scrape(self, pods: Iterable[PodAddress]) -> dict[str, PodReading | str]:
        """The reading of each pod, or why it cannot be read, as a clause."""
        asked = list(pods)
        answers = await asyncio.gather(*(self._ask(pod) for pod in asked))
        return {pod.name: answer for pod, answer in zip(asked, answers, strict=True)}

    async def _ask(self, pod: PodAddress) -> PodReading | str:
        async with self._slots:
            answer = await self._get(pod)
        SCRAPES.labels("failed" if isinstance(answer, str) else "ok").inc()
        return answer

    async def _get(self, pod: PodAddress) -> PodReading | str:
        assert self._session is not None  # noqa: S101 - used as a context manager
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{self._port}/metrics"
        try:
            async with self._session.get(url, allow_redirects=False, headers={"Accept": "text/plain"}) as response:
                if response.status != 200:
                    return f"{pod.name} answers {response.status} to {url}"
                body = await read_body(response.content.iter_any(), max_bytes=METRICS_MAX_BYTES)
            return _reachable(self._reader(body.decode(errors="replace")), time.time() - pod.created)
        except TimeoutError:
            return f"{pod.name} does not answer within {self._timeout.total:g} s on {url}"
        except aiohttp.ClientError as error:
            return unprintable_as_spaces(f"{pod.name} cannot be reached on {url}: {error}")
        except Unreadable as error:
            return f"{pod.name} gives no metrics that can be read on {url}: {error}"


GATEWAY_REQUESTS = "penstock_gateway_requests_total"
GATEWAY_IN_FLIGHT = "penstock_gateway_in_flight_requests"
WAIT_SECONDS = 50
"""Time that a gateway may take to answer a question for waiting requests."""
PAUSE_SECONDS = 1.0
"""Between an answer and the next question, and after a failure."""
logger = logging.getLogger(__name__)


def parse_gateway_metrics(text: str) -> PodReading:
    """Parse a gateway's /metrics. UnreadableMetrics when a series is missing or a value is not a count."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in {GATEWAY_REQUESTS, GATEWAY_IN_FLIGHT}:
            found[name] = _count(value, line)
    if len(found) < 2:
        raise UnreadableMetrics(f"it lacks one of {GATEWAY_REQUESTS} and {GATEWAY_IN_FLIGHT}")
    # A reading counts ended requests; the others are in flight.
    ended = max(0.0, found[GATEWAY_REQUESTS] - found[GATEWAY_IN_FLIGHT])
    return PodReading(ended, found[GATEWAY_IN_FLIGHT], bounds=(math.inf,), counts=array("d", [0.0]))


def parse_demand(body: bytes) -> int:
    """Parse a gateway's answer to `/demand`: the number of waiting requests. Unreadable when it is another text."""
    digits = body.strip()
    if not digits.isdigit() or len(digits) > 15:
        raise Unreadable("it answers no number of requests")
    return int(digits)


def combined(gateway: Metrics, replicas: Metrics, *, ready: int, coverage_least: float) -> Metrics:
    """The load as the gateway counts it, with the latency of the replicas."""
    good_share, p95 = replicas.good_share, replicas.p95_milliseconds
    if not ready:
        empty = Idle() if known(gateway.arrivals_fast) == 0 else Unknown("no replica is ready")
        good_share = p95 = empty
    elif replicas.coverage < coverage_least:
        good_share = p95 = Unknown(f"only {replicas.coverage:.0%} of the ready replicas were scraped")
    tokens = replicas.tokens_per_request
    return replace(gateway, good_share=good_share, p95_milliseconds=p95, tokens_per_request=tokens)


class DemandWatcher:
    """Asks the gateways of endpoints without replicas whether a request waits, by long polling.

    An async context manager. One open question for each gateway pod; the answer comes within milliseconds of a request.
    """

    def __init__(self, wake: Callable[[ObjectKey], Awaitable[None]], *, port: int) -> None:
        self._wake = wake
        self._port = port
        self._tasks: dict[tuple[ObjectKey, PodAddress], asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=WAIT_SECONDS + 10, sock_connect=5)
        self._session = pod_session(timeout, limit=0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch({})
        if self._session is not None:
            await self._session.close()

    def watch(self, asleep: Mapping[ObjectKey, tuple[PodAddress, ...]]) -> None:
        """Ask for these endpoints, and no others."""
        wanted = {(key, pod) for key, pods in asleep.items() for pod in pods}
        for place in self._tasks.keys() - wanted:
            self._tasks.pop(place).cancel()
        for place in wanted - self._tasks.keys():
            listen = supervised("the questions for demand", partial(self._listen, *place))
            self._tasks[place] = asyncio.create_task(listen, name=f"demand of {place[0]}")

    async def _listen(self, key: ObjectKey, pod: PodAddress) -> None:
        while True:
            try:
                waiting = await self._ask(pod)
            except (aiohttp.ClientError, TimeoutError, Unreadable) as error:
                # The next scrape of its metrics reports the problem and detects demand as well, slightly later.
                logger.debug("%s cannot be asked for demand: %s", pod.name, error)
                waiting = 0
            if waiting:
                await self._wake(key)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, pod: PodAddress) -> int:
        assert self._session is not None  # noqa: S101 - used as a context manager
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{self._port}/demand?seconds={WAIT_SECONDS}"
        async with self._session.get(url, allow_redirects=False) as response:
            response.raise_for_status()
            return parse_demand(await read_body(response.content.iter_any(), max_bytes=DEMAND_MAX_BYTES))
