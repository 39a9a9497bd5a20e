"""Connections without sockets: a test feeds pieces of input, and a sink collects the answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.app.server import Server
from penstock_runtime.errors import RequestError
from penstock_runtime.http.transport.connection import Connection
from penstock_runtime.http.transport.listener import Listener
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.http.transport.pool import PendingResponse, RequestHandler
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from tests.runtime.http.serving import Gate


class Sink:
    """A transport that records what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 50_000) if name == "peername" else None

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@dataclass
class Noted:
    """An application that records each request or refusal as it was parsed."""

    inner: RequestHandler
    requests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def body_limit(self) -> int:
        return self.inner.body_limit

    @property
    def admission_version(self) -> int:
        return self.inner.admission_version

    def admit(self, request: Request, body_bytes: int | None) -> None:
        self.inner.admit(request, body_bytes)

    def answer(self, request: Request) -> Response | PendingResponse:
        self._note(request, refusal=None)
        return self.inner.answer(request)

    def refuse(self, request: Request | None, error: RequestError) -> Response:
        self._note(request, refusal=error.message)
        return self.inner.refuse(request, error)

    def _note(self, request: Request | None, refusal: str | None) -> None:
        if request is None:
            self.requests.append({"refusal": refusal})
            return
        read = {name: getattr(request, name) for name in Request.__slots__ if name != "received"}  # a time
        label = None if request.route is None else request.route.label
        self.requests.append({**read, "headers": dict(request.headers), "route": label, "refusal": refusal})


@dataclass
class Fed:
    """The outcome of the pieces."""

    connection: Connection
    written: bytes
    requests: list[dict[str, Any]]
    held_bytes: int
    """Of bodies, before the client left."""


async def feed(pieces: list[bytes], *, opens_at: int = 0, **flags: Any) -> Fed:
    """What a connection does with these pieces, until nothing is under way any more.

    The model answers from the piece of that index on. The same pieces have the same answers, to the byte.
    """
    gate = Gate()
    server = Server(ServerStatus("emotion", TaskName.FEATURE_EXTRACTION), Settings.load({}, flags), gate)
    application = Noted(server.application)
    listener = Listener(application, server.settings.http)
    listener._identifier_prefix = b"fed"
    connection = Connection(listener)
    connection.number = 7
    sink: Any = Sink()
    connection.connection_made(sink)
    for index, piece in enumerate(pieces):
        if index == opens_at:
            gate.open()
        # A real transport gives no data to a connection that has paused it until its turn, as a slow machine makes it.
        while connection._reader.is_waiting:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
        connection.data_received(piece)
        await asyncio.sleep(0)
    gate.open()
    while connection.active is not None or connection._reader.is_waiting:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0)
    held_bytes = listener.held_bytes
    connection.connection_lost(None)
    return Fed(connection, sink.written, application.requests, held_bytes)
