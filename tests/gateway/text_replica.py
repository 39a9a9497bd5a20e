"""A replica of text generation as a separate process: the real server and scheduler around a slow small model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from penstock.tasks import TaskName
from penstock_runtime.generation.engine import Row
from penstock_runtime.serving.generation_model import read_generation_model
from penstock_runtime.serving.generator import Generator
from penstock_runtime.serving.server import Server, request_limits
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from tests.runtime.generation.paged_engine import PagedEngine
from tests.runtime.generation.small_model import write_generation_folder


class SlowEngine(PagedEngine):
    """Each step takes some time, as that of a model does."""

    def __init__(self, seconds: float) -> None:
        super().__init__(vocabulary=258, context=2048, block_size=16, blocks=1024)
        self._seconds = seconds

    def step(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        time.sleep(self._seconds)
        return super().step(rows)


async def serve(seconds: float, flags: dict[str, Any], port_pipe: Connection, folder: Path) -> None:
    settings = Settings.load({}, {"port": 0, "drain_idle_seconds": 0.1, "drain_limit_seconds": 60.0, **flags})
    model = read_generation_model(write_generation_folder(folder), SlowEngine(seconds))
    server = Server(ServerStatus("chat", TaskName.TEXT_GENERATION), settings)
    generator = Generator(
        model,
        server.metrics.generation,
        queue=settings.queue,
        settings=settings.generation,
        limits=request_limits(settings),
    )
    server.serve_with(generator)
    await server.start()
    port_pipe.send(server.port)
    await server.serve()


def main(seconds: float, flags: dict[str, Any], port_pipe: Connection) -> None:
    """Sends its port, and ends on SIGTERM as the real server does. `seconds`: of a step."""
    with tempfile.TemporaryDirectory(prefix="text-") as folder:
        uvloop.run(serve(seconds, flags, port_pipe, Path(folder) / "model"))
