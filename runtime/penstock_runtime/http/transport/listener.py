"""All connections of a server: the listening socket, the sweep of deadlines, the end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import secrets
import socket
from email.utils import formatdate

from penstock.errors import HostError
from penstock_runtime.http.transport.connection import Connection
from penstock_runtime.http.transport.head_checks import Answers
from penstock_runtime.http.transport.memory_quota import Memory
from penstock_runtime.http.transport.open_files import room_for
from penstock_runtime.settings import HttpSettings

logger = logging.getLogger("penstock.server")

SWEEP_SECONDS = 0.5


class Acceptor:
    """Accepts connections and ends them in order."""

    def __init__(self, application: Answers, settings: HttpSettings) -> None:
        self.application = application
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.max_connections = room_for(settings.max_connections)
        self.draining = False
        """Every answer closes its connection from now on."""
        self.memory = Memory()
        self.date = b""
        self.port = 0
        self._prefix = secrets.token_hex(4).encode()
        self._count = itertools.count(1)
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._late: set[asyncio.Task[object]] = set()
        self._empty: asyncio.Event | None = None

    async def listen(self) -> None:
        """Bind and accept; HostError when the address cannot be had. Sets `port`."""
        self._socket = _bind(self.settings)
        self.port = self._socket.getsockname()[1]
        # It listens once more, so that the backlog of the first time would not hold.
        self._server = await self.loop.create_server(
            lambda: Connection(self), sock=self._socket, backlog=self.settings.backlog
        )
        if self.max_connections < self.settings.max_connections:
            logger.warning(
                "more than %d connections are answered with 503, and not only more than --max-connections (%d): this "
                "process may not open more files. Raise the limit (ulimit -n)",
                self.max_connections,
                self.settings.max_connections,
            )
        self._sweep()

    def admit(self, connection: Connection) -> bool:
        """Count a new connection; false when there are too many."""
        self.connections.add(connection)
        return len(self.connections) <= self.max_connections

    def expiry(self, now: float) -> float:
        """When a connection that begins now is to end: at its full age or up to a quarter sooner."""
        age = self.settings.connection_age_seconds
        return now + age * random.uniform(0.75, 1.0) if age else math.inf  # noqa: S311 - spreads reconnects

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        if not self.connections and self._empty is not None:
            self._empty.set()

    def new_identifier(self) -> bytes:
        """For requests that bring none."""
        return b"%b-%x" % (self._prefix, next(self._count))

    def stop_accepting(self) -> None:
        """Close the listening socket, after taking in every connection that the kernel has already completed."""
        if self._server is None or self._socket is None:
            return
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:  # BlockingIOError: none waits; others: it is gone already
                break
            client.setblocking(False)
            task = self.loop.create_task(self.loop.connect_accepted_socket(lambda: Connection(self), client))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        self._server.close()
        self._server = None

    async def close(self, *, idle_seconds: float, limit_seconds: float) -> int:
        """End every connection: idle ones after `idle_seconds`, busy ones after their answer.

        Returns how many were cut off because `limit_seconds` had passed.
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
        await _within(self._empty, idle_end - self.loop.time())
        while self.connections and self.loop.time() < end:
            for connection in tuple(self.connections):
                connection.close_if_idle()
            await _within(self._empty, min(0.05, end - self.loop.time()))
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
        now = self.loop.time()
        for connection in tuple(self.connections):
            connection.sweep(now)


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        pass


def _bind(settings: HttpSettings) -> socket.socket:
    where = f"{settings.host}:{settings.port}"
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
            f"cannot listen on {where}: {error.strerror or error}",
            remedy="Choose another --port or --host (PENSTOCK_PORT, PENSTOCK_HOST)",
        ) from error
    return listening
