"""The listening socket: accepts connections, checks their deadlines, and closes them in order at the end."""

from __future__ import annotations

import asyncio
import logging
import socket
from email.utils import formatdate

from penstock.errors import HostError
from penstock.logs import log_event
from penstock_runtime.http.transport.connection import Connection
from penstock_runtime.http.transport.pool import ConnectionPool, PooledConnection, RequestHandler
from penstock_runtime.http.transport.tls import TlsFiles, TlsLayer
from penstock_runtime.settings import HttpSettings

logger = logging.getLogger("penstock.server")

SWEEP_SECONDS = 0.5
"""Between two checks of the deadlines of all connections."""
SWEEP_CONNECTIONS = 64
"""Connections that are checked at a time, before requests are answered again."""


class Listener(ConnectionPool):
    """Accepts connections and closes them."""

    def __init__(self, application: RequestHandler, settings: HttpSettings, tls: TlsFiles | None = None) -> None:
        """`tls`: certificate and key; None: plain HTTP."""
        super().__init__(application, settings)
        self._tls = tls
        self.port = 0
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._late: set[asyncio.Task[object]] = set()
        """Connections that the kernel had completed when accepting stopped."""

    async def listen(self) -> None:
        """Bind and accept; HostError when the address is not available. Sets `port`."""
        self._socket = _bind(self.settings)
        self.port = self._socket.getsockname()[1]
        # create_server calls listen() again: without the argument its backlog would replace ours.
        self._server = await self.loop.create_server(
            self._new_connection, sock=self._socket, backlog=self.settings.backlog
        )
        if self.max_connections < self.settings.max_connections:
            logger.warning(
                "connections over %d are refused, or replace idle ones, instead of over --max-connections (%d): this "
                "process may not open more files. Raise the limit (ulimit -n)",
                self.max_connections,
                self.settings.max_connections,
                extra=log_event("ConnectionLimitLowered", reason="OpenFiles"),
            )
        self._sweep()

    def _new_connection(self) -> asyncio.Protocol:
        return Connection(self) if self._tls is None else TlsLayer(self._tls.context, Connection(self))

    def stop_accepting(self) -> None:
        """Close the listening socket after accepting every connection that the kernel has already completed."""
        if self._server is None or self._socket is None:
            return
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:  # BlockingIOError: no more connections; any other: it was closed already
                break
            client.setblocking(False)
            task = self.loop.create_task(self.loop.connect_accepted_socket(self._new_connection, client))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        self._server.close()
        self._server = None

    async def close(self, *, idle_seconds: float, limit_seconds: float) -> int:
        """Close every connection: idle ones after `idle_seconds`, busy ones after their response.

        Returns how many were aborted because `limit_seconds` had passed.
        """
        self.draining = True
        self.stop_accepting()
        if self._late:
            await asyncio.wait(tuple(self._late))
        self._empty = asyncio.Event()
        if not self.connections:
            self._empty.set()
        end = self.loop.time() + limit_seconds
        idle_end = min(end, self.loop.time() + idle_seconds)
        await _wait_for(self._empty, idle_end - self.loop.time())
        while self.connections and self.loop.time() < end:
            for connection in tuple(self.connections):
                connection.close_if_idle()
            await _wait_for(self._empty, min(0.05, end - self.loop.time()))
        cut = tuple(self.connections)
        for connection in cut:
            if connection.transport is not None:
                connection.transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        return len(cut)

    def _sweep(self) -> None:
        self._timer = self.loop.call_later(SWEEP_SECONDS, self._sweep)
        self.date = formatdate(usegmt=True).encode()
        self._sweep_slice(tuple(self.connections), 0)

    def _sweep_slice(self, connections: tuple[PooledConnection, ...], start: int) -> None:
        # In slices: refusing thousands of connections that are too slow takes a quarter of a second.
        end = start + SWEEP_CONNECTIONS
        now = self.loop.time()
        for connection in connections[start:end]:
            connection.sweep(now)
        if end < len(connections):
            self.loop.call_soon(self._sweep_slice, connections, end)


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        pass


def _bind(settings: HttpSettings) -> socket.socket:
    address_text = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setblocking(False)
            listening.bind(address)
            listening.listen(settings.backlog)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise HostError(
            f"cannot listen on {address_text}: {error.strerror or error}",
            remedy="Choose another --port or --host (PENSTOCK_PORT, PENSTOCK_HOST)",
        ) from error
    return listening
