"""Scrapes /metrics of runtime pods and gateways without a Prometheus: many at once, each with a time and size limit.

The text format is parsed here and not by the Prometheus client library, which creates objects for all hundred and fifty
lines: a thousand pods are scraped every few seconds.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

from penstock_operator.control.pod_reports import pod_session
from penstock_operator.decide.measurement import PodReading
from penstock_operator.facts.findings import unprintable_as_spaces
from penstock_operator.facts.names import INTERNAL_PORT
from penstock_operator.facts.pod_data import METRICS_MAX_BYTES, Unreadable, read_body
from penstock_operator.facts.pods import PodFacts
from penstock_operator.metrics import SCRAPES

ANSWERED = "penstock_request_seconds_count"
BUCKET = "penstock_request_seconds_bucket"
REQUESTS = "penstock_requests_total"
IN_FLIGHT = "penstock_in_flight_requests"
FIRST_TOKEN_BUCKET = "penstock_first_token_seconds_bucket"  # noqa: S105 - not a password
"""Only of text generation: its latency objective is on the time to the first token."""
TOKENS = "penstock_tokens_total"
"""Computed for answered requests."""
GENERATION_TOKENS = "penstock_generation_tokens_total"
GENERATED = 'kind="generated"'
UNANSWERED_CODES = frozenset({"429", "499"})
"""Refused, or aborted by the client: they count as demand and are not in the histogram."""
REJECTED, UNAVAILABLE, FAILED = "penstock_rejected_total", 'reason="unavailable"', 'reason="classifier_failed"'
"""Requests of gateways of language models, which get 503 for a full queue and for a failure: demand as well."""
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
            histogram.append((bound, count_of(rest, line)))
        elif name == REQUESTS:
            code = _CODE.search(series)
            if code is not None and code.group(1) in UNANSWERED_CODES:
                unanswered += count_of(rest, line)
            elif code is not None and code.group(1).startswith("5") and code.group(1) != NOT_READY_CODE:
                errors += count_of(rest, line)
        elif name == REJECTED and (UNAVAILABLE in series or FAILED in series):
            unanswered += count_of(rest, line)
            errors += count_of(rest, line) if FAILED in series else 0.0
        elif name == ANSWERED:
            answered = count_of(rest, line)
        elif name == IN_FLIGHT:
            in_flight = count_of(rest, line)
        elif name == TOKENS:
            tokens = count_of(rest, line)
        elif name == GENERATION_TOKENS and GENERATED in series:
            generated = count_of(rest, line)
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


def count_of(rest: str, line: str) -> float:
    """The count at the beginning of the rest of a line. UnreadableMetrics when it is none."""
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
