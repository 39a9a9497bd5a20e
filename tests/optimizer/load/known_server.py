"""A real HTTP server whose behaviour a test sets, answer by answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Answer = Callable[[int, float], tuple[float, bytes]]
"""Number of the request and time since the first one -> seconds to wait, raw answer (empty: close)."""


def ok(extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + extra + b"\r\n[]"


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server on its own thread; yields its URL."""
    loop = asyncio.new_event_loop()
    port = 0
    state = {"count": 0, "first": 0.0}
    started, stop = threading.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                now = loop.time()
                state["first"] = state["first"] or now
                state["count"] += 1
                wait, reply = answer(int(state["count"]), now - state["first"])
                await asyncio.sleep(wait)
                if not reply:
                    break
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        nonlocal port
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port}/predict?x=1"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
