"""A load at a rate that does not depend on the answers and can change while it runs.

Requests arrive at random, each on a new connection: kube-proxy chooses a pod for each connection.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MOST_AT_ONCE = 800
"""Descriptors are limited; more than a busy replica has waiting within its deadline."""
PATIENCE_SECONDS = 60
"""For an answer: longer than a replica lets a request wait."""
CONNECT_SECONDS = 20
"""How long a refused connection is tried again: nothing was sent, so that nothing can be done twice."""
RETRY_SECONDS = 0.1


@dataclass
class Request:
    """The outcome of one request. Times are those of `time.monotonic()`."""

    asked_at: float | None = None
    """When the connection was asked for that it went on, which the kernel may take for a process that ends before the
    request is written; None: no server accepted one."""
    done_at: float | None = None
    status: int = 0
    """0: no answer came."""
    refused: int = 0
    """Connections that were refused before one was accepted."""
    problem: str = ""
    """Why it failed; empty when it did not."""

    def under_way_during(self, begin: float, end: float) -> bool:
        """On a connection, and neither answered nor lost, at some moment between the two."""
        return self.asked_at is not None and self.asked_at <= end and (self.done_at is None or self.done_at >= begin)


class Stream:
    """Requests per second, sent by a separate thread."""

    def __init__(self, address: str, text: str, per_second: float) -> None:
        self.per_second = per_second
        self._address = address
        body = json.dumps({"inputs": text}).encode()
        head = f"POST /predict HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self._payload = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._requests: list[Request] = []
        self._over = threading.Event()
        self._random = random.Random(5)

    def mark(self) -> int:
        """A place in the stream, for `since`."""
        return len(self._requests)

    def since(self, mark: int = 0) -> list[Request]:
        """The requests that were sent after a mark and have ended."""
        return [one for one in self._requests[mark:] if one.done_at is not None]

    def all_ended(self, mark: int) -> bool:
        """Whether every request from before a mark has ended."""
        return all(one.done_at is not None for one in self._requests[:mark])

    def failed(self, mark: int = 0) -> list[Request]:
        """Those of them without a successful answer."""
        return [one for one in self.since(mark) if one.problem]

    def run(self) -> None:
        """Until `end`; the answers that are still out are waited for."""
        asyncio.run(self._run())

    def end(self) -> None:
        """Send no more requests."""
        self._over.set()

    async def _run(self) -> None:
        under_way: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while not self._over.is_set():
            due = max(due, time.monotonic() - 1) + self._random.expovariate(self.per_second)
            await asyncio.sleep(due - time.monotonic())
            request = Request()
            self._requests.append(request)
            if len(under_way) >= MOST_AT_ONCE:
                request.problem, request.done_at = f"{MOST_AT_ONCE} are under way already", time.monotonic()
                continue
            task = asyncio.create_task(self._exchange(request))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    async def _exchange(self, request: Request) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                reader, writer = await self._connected(request)
                try:
                    writer.write(self._payload)
                    answer = await reader.read()
                finally:
                    writer.close()
                words = answer.split(b" ", 2)
                request.status = int(words[1]) if len(words) == 3 else 0
                if request.status != 200:
                    request.problem = answer[-300:].decode(errors="replace") or "closed without an answer"
        except (OSError, TimeoutError, ValueError) as error:
            request.problem = repr(error)
        finally:
            request.done_at = time.monotonic()

    async def _connected(self, request: Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """On a connection that a server accepts."""
        began = time.monotonic()
        while True:
            asked_at = time.monotonic()
            try:
                connection = await asyncio.open_connection(self._address, 80)
            except ConnectionRefusedError:
                request.refused += 1
                if time.monotonic() - began > CONNECT_SECONDS:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            else:
                request.asked_at = asked_at
                return connection


@contextmanager
def streaming(address: str, text: str, *, per_second: float) -> Iterator[Stream]:
    """Requests while the block runs."""
    stream = Stream(address, text, per_second)
    thread = threading.Thread(target=stream.run)
    thread.start()
    try:
        yield stream
    finally:
        stream.end()
        thread.join()
