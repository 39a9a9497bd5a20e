"""Gateways: their metrics, and whether a request waits for the first replica of an endpoint.

Behind a gateway the replicas get a limited number of requests and the rest waits in the gateway. Arrivals and requests
in flight come from the gateway then, the latency from the replicas.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import aiohttp

from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.pod_reports import pod_session
from penstock_operator.decide.measurement import Idle, Metrics, PodReading, Unknown, known
from penstock_operator.facts.pod_data import DEMAND_MAX_BYTES, Unreadable, read_body
from penstock_operator.scaling.read.scrape import PodAddress, UnreadableMetrics, count_of
from penstock_operator.supervision import supervised

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
            found[name] = count_of(value, line)
    if len(found) < 2:
        raise UnreadableMetrics(f"it lacks one of {GATEWAY_REQUESTS} and {GATEWAY_IN_FLIGHT}")
    # A reading counts ended requests; the rest is in flight.
    ended = max(0.0, found[GATEWAY_REQUESTS] - found[GATEWAY_IN_FLIGHT])
    return PodReading(ended, found[GATEWAY_IN_FLIGHT], bounds=(math.inf,), counts=array("d", [0.0]))


def parse_demand(body: bytes) -> int:
    """Parse a gateway's answer to `/demand`: the number of waiting requests. Unreadable when it is another text."""
    digits = body.strip()
    if not digits.isdigit() or len(digits) > 15:
        raise Unreadable("it answers no number of requests")
    return int(digits)


def combined(load: Metrics, replicas: Metrics, *, ready: int, coverage_least: float) -> Metrics:
    """The load as a gateway counts it (or the operator, in the pods), with the latency of the replicas."""
    good_share, p95 = replicas.good_share, replicas.p95_milliseconds
    if not ready:
        empty = Idle() if known(load.arrivals_fast) == 0 else Unknown("no replica is ready")
        good_share = p95 = empty
    elif replicas.coverage < coverage_least:
        good_share = p95 = Unknown(f"only {replicas.coverage:.0%} of the ready replicas were scraped")
    tokens = replicas.tokens_per_request
    return replace(load, good_share=good_share, p95_milliseconds=p95, tokens_per_request=tokens)


class DemandWatcher:
    """Queries the gateways of endpoints without replicas for waiting requests, by long polling.

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
        """Query the gateways of these endpoints only."""
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
