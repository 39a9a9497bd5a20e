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

from penstock_runtime.rows import StepRow
from penstock_runtime.serving.generation_model import read_generation_model
from penstock_runtime.settings import Settings
from tests.runtime.generation.paged_engine import PagedEngine
from tests.runtime.generation.small_model import generation_server, write_generation_folder


class SlowEngine(PagedEngine):
    """Each step takes some time, as that of a model does."""

    def __init__(self, seconds: float) -> None:
        super().__init__(vocabulary=258, context=2048, block_size=16, blocks=1024)
        self._seconds = seconds

    def step(self, rows: Sequence[StepRow]) -> NDArray[np.float32]:
        time.sleep(self._seconds)
        return super().step(rows)


async def serve(seconds: float, flags: dict[str, Any], port_pipe: Connection, folder: Path) -> None:
    settings = Settings.load({}, {"port": 0, "drain_idle_seconds": 0.1, "drain_limit_seconds": 60.0, **flags})
    model = read_generation_model(write_generation_folder(folder), SlowEngine(seconds))
    server, _ = generation_server(model, settings, "chat")
    await server.start()
    port_pipe.send(server.port)
    await server.serve()


def main(seconds: float, flags: dict[str, Any], port_pipe: Connection) -> None:
    """Sends its port, and ends on SIGTERM as the real server does. `seconds`: of a step."""
    with tempfile.TemporaryDirectory(prefix="text-") as folder:
        uvloop.run(serve(seconds, flags, port_pipe, Path(folder) / "model"))
