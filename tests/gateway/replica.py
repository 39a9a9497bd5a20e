"""A replica as a separate process, which a test can kill: the real server around a slow model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from penstock.tasks import TaskName
from penstock_runtime.app.server import Server
from penstock_runtime.serving.predictor import Answer, Timings
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings


class Slow:
    """Answers each request, after some seconds, with the length of its text and the number of concurrent requests."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._busy = 0

    async def predict(
        self,
        inputs: Any,
        parameters: Mapping[str, Any],
        *,
        deadline_seconds: float | None = None,
        caller: int = 0,
        client: str = "",
        tenant: str = "",
        is_bulk: bool = False,
    ) -> Answer:
        self._busy += 1
        busy = self._busy
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self._busy -= 1
        return Answer([[float(len(inputs)), float(busy)]], Timings(0, 0, 0, 0), tokens=3, truncated=0)

    async def with_tokenizer(self, work: Callable[[Any], Any], size: int, client: str) -> Any:
        raise NotImplementedError

    async def drain(self) -> None:
        return

    def queue_depth(self) -> tuple[int, int]:
        return 0, 0

    def facts(self) -> dict[str, Any]:
        return {}


async def serve(seconds: float, flags: dict[str, Any], port_pipe: Connection) -> None:
    settings = Settings.load({}, {"port": 0, "drain_idle_seconds": 0.1, "drain_limit_seconds": 10.0, **flags})
    server = Server(ServerStatus("emotion", TaskName.FEATURE_EXTRACTION), settings, Slow(seconds))
    await server.start()
    port_pipe.send(server.port)
    await server.serve()


def main(seconds: float, flags: dict[str, Any], port_pipe: Connection) -> None:
    """Prints its port, and ends on SIGTERM as the real server does."""
    uvloop.run(serve(seconds, flags, port_pipe))
