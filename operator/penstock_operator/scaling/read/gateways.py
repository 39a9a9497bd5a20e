"""What an endpoint's gateway tells of its load: requests as they come, also those that no replica has seen yet.

Behind a gateway the replicas are given only so much at a time, and the rest waits there: arrivals and what is under way
are the gateway's to tell, latency is the replicas'.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

import aiohttp

from penstock_operator.cluster.store import Key
from penstock_operator.scaling.decide.measurement import Idle, Metrics, Unknown, known
from penstock_operator.scaling.read.exposition import Reading, UnreadableMetrics
from penstock_operator.scaling.read.scraper import Pod

REQUESTS = "penstock_gateway_requests_total"
IN_FLIGHT = "penstock_gateway_in_flight_requests"
WAIT_SECONDS = 50
"""How long a gateway may think about whether anybody waits."""
PAUSE_SECONDS = 1.0
"""Between an answer and the next question, and after a failure."""

logger = logging.getLogger(__name__)


def read_gateway(text: str) -> Reading:
    """Of the text of a gateway's /metrics; UnreadableMetrics when it is none."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in {REQUESTS, IN_FLIGHT}:
            try:
                found[name] = float(value)
            except ValueError:
                raise UnreadableMetrics(f"it says {line[:80]!r}, which is no count") from None
    if len(found) < 2 or not all(math.isfinite(value) and value >= 0 for value in found.values()):
        raise UnreadableMetrics(f"it says nothing of {REQUESTS} and {IN_FLIGHT}")
    # A reading counts what has ended; what has not is counted beside it.
    ended = max(0.0, found[REQUESTS] - found[IN_FLIGHT])
    return Reading(ended, found[IN_FLIGHT], bounds=(math.inf,), counts=array("d", [0.0]))


def combined(gateway: Metrics, replicas: Metrics, *, ready: int, coverage_least: float) -> Metrics:
    """The load as the gateway counts it, with the latency of the replicas that are there."""
    good_share, p95 = replicas.good_share, replicas.p95_milliseconds
    if not ready:
        nobody = Idle() if known(gateway.arrivals_fast) == 0 else Unknown("no replica is ready")
        good_share = p95 = nobody
    elif replicas.coverage < coverage_least:
        good_share = p95 = Unknown(f"only {replicas.coverage:.0%} of the ready replicas were scraped")
    return replace(gateway, good_share=good_share, p95_milliseconds=p95)


class Waker:
    """Asks the gateways of endpoints that have no replica whether anybody waits, and is answered when somebody does.

    An async context manager. One open question for each gateway's pod, and an answer within milliseconds of a request.
    """

    def __init__(self, wake: Callable[[Key], Awaitable[None]], *, port: int) -> None:
        self._wake = wake
        self._port = port
        self._tasks: dict[tuple[Key, Pod], asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=WAIT_SECONDS + 10, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch({})
        if self._session is not None:
            await self._session.close()

    def watch(self, asleep: Mapping[Key, tuple[Pod, ...]]) -> None:
        """These endpoints have no replica; others are not asked about any more."""
        wanted = {(key, pod) for key, pods in asleep.items() for pod in pods}
        for place in self._tasks.keys() - wanted:
            self._tasks.pop(place).cancel()
        for place in wanted - self._tasks.keys():
            name = f"demand of {place[0]}"
            self._tasks[place] = asyncio.get_running_loop().create_task(self._listen(*place), name=name)

    async def _listen(self, key: Key, pod: Pod) -> None:
        while True:
            try:
                waiting = await self._ask(pod)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                # The look at its metrics says what is wrong, and wakes it as well, a little later.
                logger.debug("%s cannot be asked for demand: %s", pod.name, error)
                waiting = 0
            if waiting:
                await self._wake(key)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, pod: Pod) -> int:
        assert self._session is not None  # noqa: S101 - used as a context manager
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{self._port}/demand?seconds={WAIT_SECONDS}"
        async with self._session.get(url, allow_redirects=False) as response:
            response.raise_for_status()
            return int(await response.text())
