"""An HTTP server in place of an API server: a script states the answer to each request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kubernetes.aio.client import Configuration

from penstock_operator.cluster.errors import Backoff
from penstock_operator.cluster.kubernetes import KubernetesPort

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
QUICK = Backoff(first_seconds=0.001, limit_seconds=0.002, attempts=4)


@dataclass
class Seen:
    """A request that arrived."""

    method: str
    path: str
    query: dict[str, str]
    content_type: str
    accept: str
    body: Any


@dataclass
class ScriptedApi:
    """Gives the answers in their order; the last one repeatedly."""

    answers: list[Answer]
    seen: list[Seen] = field(default_factory=list)
    url: str = ""
    _asked: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def requests(self, count: int) -> None:
        """Wait until `count` requests have arrived."""
        async with self._asked:
            await self._asked.wait_for(lambda: len(self.seen) >= count)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.seen.append(
            Seen(
                request.method,
                request.path,
                dict(request.query),
                request.content_type,
                request.headers.get("Accept", ""),
                json.loads(text) if text else None,
            )
        )
        async with self._asked:
            self._asked.notify_all()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)

    def port(self, **more: Any) -> KubernetesPort:
        """A port to it that tries again quickly."""
        return KubernetesPort(Configuration(host=self.url), **{"retries": QUICK, "timeout_seconds": 2.0, **more})


@asynccontextmanager
async def scripted(*answers: Answer) -> AsyncIterator[ScriptedApi]:
    """The server, on a free loopback port."""
    api = ScriptedApi(list(answers))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        await runner.cleanup()


def answer(status: int, body: Any = None, **headers: str) -> Answer:
    """A JSON answer; `Retry_After` becomes Retry-After."""

    async def give(_: web.Request) -> web.StreamResponse:
        return web.json_response(
            body or {}, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    return give


def problem(status: int, message: str, **headers: str) -> Answer:
    """A Status object, as API servers send it."""
    return answer(status, {"kind": "Status", "status": "Failure", "message": message, "code": status}, **headers)


async def cut(request: web.Request) -> web.StreamResponse:
    """The server closes the connection in the middle of the answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def silence(_: web.Request) -> web.StreamResponse:
    """No answer at all."""
    await asyncio.Event().wait()
    return web.Response()


def stream(*lines: Any, end: str = "close") -> Answer:
    """A watch: objects as lines, text unchanged; then the end, or silence (`end="hang"`), or a broken connection."""

    async def give(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for line in lines:
            await response.write((line if isinstance(line, str) else json.dumps(line) + "\n").encode())
        if end == "hang":
            await asyncio.Event().wait()
        if end == "cut":
            assert request.transport is not None
            request.transport.abort()
        return response

    return give


def thing(name: str, version: int, **more: Any) -> dict[str, Any]:
    """An object of any kind."""
    return {"metadata": {"name": name, "namespace": "a", "resourceVersion": str(version), "uid": f"u-{name}", **more}}


def listing(version: int, *items: Any) -> Answer:
    """A whole list."""
    return answer(200, {"metadata": {"resourceVersion": str(version)}, "items": list(items)})
