"""An HTTP server that records what it is sent, in the place of a Prometheus or of a server that is attacked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

SUCCESS = '{"status": "success", "data": {"resultType": "scalar", "result": [1, "1"]}}'


@dataclass
class RecordingServer:
    """A server on loopback."""

    status: int = 200
    body: str = SUCCESS
    location: str = ""
    """Of a redirect."""
    port: int = 0
    paths: list[str] = field(default_factory=list)
    """Of all requests, with the query."""
    credentials: list[str] = field(default_factory=list)
    """Authorization headers."""
    queries: list[str] = field(default_factory=list)
    """PromQL."""

    def answer(self, _query: str) -> str:
        """The body of an answer."""
        return self.body

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        self.credentials.append(request.headers.get("authorization", ""))
        query = str((await request.post()).get("query", ""))
        self.queries.append(query)
        headers = {"location": self.location} if self.location else {}
        return web.Response(
            status=self.status, text=self.answer(query), headers=headers, content_type="application/json"
        )


@asynccontextmanager
async def recording(server: RecordingServer) -> AsyncIterator[RecordingServer]:
    """The server while the block runs."""
    runner = web.ServerRunner(web.Server(server.handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()
