"""Queries a Prometheus over its HTTP API: instant queries, all of a round at one time of Prometheus' own clock."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from penstock.resources.scaling import PrometheusQueries
from penstock_operator.metrics import PROMETHEUS_QUERIES
from penstock_operator.scaling.decide.interpret import Answer, QueryFailure, Vector
from penstock_operator.scaling.decide.measurement import Metrics
from penstock_operator.scaling.read.queries import EndpointPods, Windows, error_message, judged, queries, read

MAX_BYTES = 4_194_304


@dataclass(frozen=True)
class PrometheusAccess:
    """Credentials and CA. No secret appears in messages or repr."""

    token: str = field(default="", repr=False)
    username: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""
    """Certificates (PEM) to trust instead of the system's."""

    @classmethod
    def from_secret(cls, data: Mapping[str, str]) -> PrometheusAccess:
        """From the `data` of a Secret: `token`, or `username` and `password`; `ca.crt`. ValueError with a clause."""
        text: dict[str, str] = {}
        for key in ("token", "username", "password", "ca.crt"):
            try:
                text[key] = base64.b64decode(data.get(key) or "", validate=True).decode().strip()
            except (binascii.Error, UnicodeDecodeError):
                raise ValueError(f"its key {key} is no text") from None
        if bool(text["username"]) != bool(text["password"]):
            raise ValueError("it has one of username and password: it takes both")
        if not any(text.values()):
            raise ValueError("it has none of the keys token, username and password, ca.crt")
        return cls(text["token"], text["username"], text["password"], text["ca.crt"])

    def headers(self) -> dict[str, str]:
        """HTTP headers for every request."""
        if self.token:
            return {"Authorization": f"Bearer {self.token}"}
        if self.username:
            both = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
            return {"Authorization": f"Basic {both}"}
        return {}

    def trust(self) -> ssl.SSLContext | bool:
        """The TLS context. ValueError with a clause when the certificates cannot be parsed."""
        if not self.ca:
            return True
        try:
            return ssl.create_default_context(cadata=self.ca)
        except ssl.SSLError:
            raise ValueError("its ca.crt holds no certificate in PEM form") from None


@dataclass(frozen=True)
class PrometheusSource:
    """A Prometheus and the queries for it."""

    url: str
    access: PrometheusAccess = PrometheusAccess()
    queries: PrometheusQueries = field(default_factory=PrometheusQueries)


class OwnPrometheus:
    """The installation's Prometheus, for endpoints that name none. Its token is read again for each round: projected
    tokens are renewed in place."""

    def __init__(self, url: str, *, token_file: str = "", ca_file: str = "") -> None:
        self.url = url
        self._token_file = token_file
        self._ca_file = ca_file

    def source(self, queries: PrometheusQueries) -> PrometheusSource | str:
        """The source for these queries; a clause where a file cannot be read."""
        texts = []
        for file in (self._token_file, self._ca_file):
            try:
                texts.append(Path(file).read_text(encoding="utf-8").strip() if file else "")
            except (OSError, UnicodeDecodeError) as error:
                return f"the file {file} of the operator's settings cannot be read: {error}"
        return PrometheusSource(self.url, PrometheusAccess(token=texts[0], ca=texts[1]), queries)


class PrometheusClient:
    """An async context manager: it keeps connections."""

    def __init__(self, *, timeout_seconds: float, concurrency: int) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._slots = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._trust: dict[str, ssl.SSLContext | bool] = {}

    async def __aenter__(self) -> Self:
        # Without decompression the size of a body is what arrives.
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            headers={"Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def metrics(
        self, source: PrometheusSource, place: EndpointPods, windows: Windows, *, objective_seconds: float
    ) -> Metrics:
        """The metrics of an endpoint's load from this Prometheus."""
        clock = await self._ask(source, "time()", None)
        if isinstance(clock, QueryFailure):
            return Metrics.unknown(clock.reason)
        now = clock.elements[0].value if clock.elements else float("nan")
        asked = queries(place, windows, source.queries)
        answers = await asyncio.gather(*(self._ask(source, query, now) for query in asked.values()))
        return judged(
            dict(zip(asked, answers, strict=True)),
            place,
            windows,
            source.queries,
            evaluated_at=now,
            objective_seconds=objective_seconds,
        )

    async def _ask(self, source: PrometheusSource, query: str, at: float | None) -> Answer:
        async with self._slots:
            answer = await self._post(source, query, at)
        PROMETHEUS_QUERIES.labels("ok" if isinstance(answer, Vector) else "failed").inc()
        return answer

    async def _post(self, source: PrometheusSource, query: str, at: float | None) -> Answer:
        assert self._session is not None  # noqa: S101 - used as a context manager
        form = {"query": query, "timeout": f"{self._timeout.total:g}s"}
        if at is not None:
            form["time"] = f"{at:.3f}"
        try:
            trust = self._trusted(source.access)
            async with self._session.post(
                f"{source.url.rstrip('/')}/api/v1/query",
                data=form,
                headers=source.access.headers(),
                ssl=trust,
                # A redirect would send the token to another server.
                allow_redirects=False,
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        return QueryFailure(f"prometheus gave more than {MAX_BYTES} bytes")
                if response.status == 200:
                    return read(bytes(body))
                detail = error_message(bytes(body)) if response.status in {400, 422, 503} else ""
                return QueryFailure(f"prometheus at {source.url} answered {response.status}{detail and f': {detail}'}")
        except TimeoutError:
            return QueryFailure(f"prometheus at {source.url} does not answer within {self._timeout.total:g} s")
        except aiohttp.ClientError as error:
            return QueryFailure(f"prometheus at {source.url} cannot be reached: {error}")
        except ValueError as error:
            return QueryFailure(f"prometheus at {source.url} cannot be asked: {error}")

    def _trusted(self, access: PrometheusAccess) -> ssl.SSLContext | bool:
        key = hashlib.sha256(access.ca.encode()).hexdigest()
        if key not in self._trust:
            self._trust[key] = access.trust()
        return self._trust[key]
