"""Reads /metrics of pods, so that scaling needs no Prometheus: many at once, none for long or without end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp

from penstock_operator.metrics import SCRAPES
from penstock_operator.plan.names import HTTP_PORT
from penstock_operator.scaling.read.exposition import Reading, UnreadableMetrics, read

MAX_BYTES = 1_048_576


@dataclass(frozen=True, slots=True, order=True)
class Pod:
    """Where to ask."""

    name: str
    ip: str


class Scraper:
    """An async context manager: it keeps connections."""

    def __init__(
        self,
        *,
        timeout_seconds: float,
        concurrency: int,
        port: int = HTTP_PORT,
        reader: Callable[[str], Reading] = read,
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._turns = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._port = port
        self._reader = reader
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=self._concurrency, keepalive_timeout=60.0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def scrape(self, pods: Iterable[Pod]) -> dict[str, Reading | str]:
        """What each pod says, or why it cannot be read, as a clause."""
        asked = list(pods)
        answers = await asyncio.gather(*(self._ask(pod) for pod in asked))
        return {pod.name: answer for pod, answer in zip(asked, answers, strict=True)}

    async def _ask(self, pod: Pod) -> Reading | str:
        async with self._turns:
            answer = await self._get(pod)
        SCRAPES.labels("failed" if isinstance(answer, str) else "ok").inc()
        return answer

    async def _get(self, pod: Pod) -> Reading | str:
        assert self._session is not None  # noqa: S101 - used as a context manager
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{self._port}/metrics"
        try:
            async with self._session.get(url, allow_redirects=False, headers={"Accept": "text/plain"}) as response:
                if response.status != 200:
                    return f"{pod.name} answers {response.status} to {url}"
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        return f"{pod.name} says more than {MAX_BYTES} bytes on {url}"
            return self._reader(body.decode(errors="replace"))
        except TimeoutError:
            return f"{pod.name} does not answer within {self._timeout.total:g} s on {url}"
        except aiohttp.ClientError as error:
            return f"{pod.name} cannot be reached on {url}: {error}"
        except UnreadableMetrics as error:
            return f"{pod.name} gives no metrics that can be read on {url}: {error}"
