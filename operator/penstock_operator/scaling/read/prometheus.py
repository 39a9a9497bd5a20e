"""Queries a Prometheus over its HTTP API: instant queries, all of a round at one time of Prometheus' own clock."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import AddrInfoType

from penstock.logs import log_event
from penstock.resources.endpoint_parts.scaling import PrometheusQueries
from penstock_operator.decide.measurement import Metrics
from penstock_operator.endpoint.prometheus_urls import IpNetwork, address_allowed
from penstock_operator.facts.pod_data import read_body
from penstock_operator.metrics import PROMETHEUS_QUERIES
from penstock_operator.scaling.read.queries import (
    Answer,
    EndpointPods,
    QueryFailure,
    Vector,
    Windows,
    metrics_of,
    queries,
    read,
)

MAX_BYTES = 4_194_304
MAX_FAILURES = 1_000
"""URLs for which the last failure is kept."""
MAX_TRUST = 100
"""TLS contexts that are kept, by the CA certificates of a Secret, which its owner may change all the time."""
REFUSALS = {400: "check the queries", 401: "check the Secret", 403: "check the Secret", 422: "check the queries"}
"""Remedies by the statuses that Prometheus has for a mistake of the user."""

logger = logging.getLogger(__name__)


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
    own: bool = False
    """It is the installation's own: any address, since a user did not choose it."""


class OwnPrometheus:
    """The installation's Prometheus, for endpoints that name none. Its token is read again for each round: projected
    tokens are renewed in the same file."""

    def __init__(self, url: str, *, token_file: str = "", ca_file: str = "") -> None:
        self.url = url
        self._token_file = token_file
        self._ca_file = ca_file

    def source(self) -> PrometheusSource | str:
        """The source for the operator's own queries; a clause where a file cannot be read."""
        texts = []
        for file in (self._token_file, self._ca_file):
            try:
                texts.append(Path(file).read_text(encoding="utf-8").strip() if file else "")
            except (OSError, UnicodeDecodeError) as error:
                logger.warning(
                    "the file %s with the access to Prometheus cannot be read: %s",
                    file,
                    error,
                    extra=log_event("PrometheusFailed", object=self.url, reason=error),
                )
                return "a file with the operator's access to Prometheus cannot be read: its log has the reason"
        return PrometheusSource(self.url, PrometheusAccess(token=texts[0], ca=texts[1]), own=True)


class PrometheusClient:
    """An async context manager: it keeps connections.

    Endpoints get failures in general words: a user who chooses the URL must not learn from the operator which servers
    there are and how they answer. The log has the details.
    """

    def __init__(self, *, timeout_seconds: float, concurrency: int, networks: tuple[IpNetwork, ...] = ()) -> None:
        """`networks`: see `address_allowed`."""
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._slots = asyncio.Semaphore(concurrency)
        self._networks = networks
        self._own: aiohttp.ClientSession | None = None
        self._session: aiohttp.ClientSession | None = None
        self._failures: dict[str, str] = {}
        """The last logged failure by URL, so that each is logged once."""
        self._trust: dict[str, ssl.SSLContext | bool] = {}

    async def __aenter__(self) -> Self:
        # Without decompression the size of a body is what arrives.
        safe: dict[str, Any] = {
            "timeout": self._timeout,
            "headers": {"Accept-Encoding": "identity"},
            "auto_decompress": False,
            "trust_env": False,
        }
        self._own = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), **safe)
        connector = aiohttp.TCPConnector(socket_factory=self._socket, use_dns_cache=False)
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), **safe)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in (self._own, self._session):
            if session is not None:
                await session.close()

    def _socket(self, place: AddrInfoType) -> socket.socket:
        """A socket for the address that will be connected to: a name that resolves to another address at the next
        look-up does not help. OSError for an address that is not allowed."""
        address = str(place[4][0])
        if not address_allowed(address, self._networks):
            raise PermissionError(f"{address} is not allowed for the Prometheus of an endpoint")
        return socket.socket(place[0], place[1], place[2])

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
        return metrics_of(
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
        session = self._own if source.own else self._session
        assert session is not None  # noqa: S101 - used as a context manager
        form = {"query": query, "timeout": f"{self._timeout.total:g}s"}
        if at is not None:
            form["time"] = f"{at:.3f}"
        try:
            trust = self._trusted(source.access)
            async with session.post(
                f"{source.url.rstrip('/')}/api/v1/query",
                data=form,
                headers=source.access.headers(),
                ssl=trust,
                # A redirect would send the token to another server.
                allow_redirects=False,
            ) as response:
                body = await read_body(response.content.iter_any(), max_bytes=MAX_BYTES)
                if response.status != 200:
                    return self._failed(source, f"{response.status}: {body[:500]!r}", status=response.status)
                answer = read(body)
                if isinstance(answer, QueryFailure):
                    return self._failed(source, answer.reason)
                self._failures.pop(source.url, None)
                return answer
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            return self._failed(source, f"{type(error).__name__} {str(error)!r}")

    def _failed(self, source: PrometheusSource, detail: str, *, status: int = 0) -> QueryFailure:
        """The failure in general words; the details go to the log when they are new."""
        if self._failures.get(source.url) != detail:
            if len(self._failures) >= MAX_FAILURES:
                self._failures.clear()
            self._failures[source.url] = detail
            logger.warning(
                "a query to the Prometheus at %s failed: %s",
                source.url,
                detail,
                extra=log_event("PrometheusFailed", object=source.url),
            )
        if remedy := REFUSALS.get(status):
            return QueryFailure(f"prometheus at {source.url} answered {status}: {remedy}")
        return QueryFailure(
            f"prometheus at {source.url} cannot be reached, or does not answer as a Prometheus: the operator's log has "
            "the reason"
        )

    def _trusted(self, access: PrometheusAccess) -> ssl.SSLContext | bool:
        key = hashlib.sha256(access.ca.encode()).hexdigest()
        if key not in self._trust:
            if len(self._trust) >= MAX_TRUST:
                self._trust.clear()
            self._trust[key] = access.trust()
        return self._trust[key]
