"""A server as a separate process, around a slow model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROCESS = """
import asyncio, os, sys
import uvloop
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.app.server import Server
from penstock_runtime.settings import Settings
from penstock.tasks import TaskName
from tests.runtime.http.serving import TIMINGS, Answer

class Slow:
    async def predict(self, inputs, parameters, **options):
        await asyncio.sleep(float(sys.argv[1]))
        return Answer([[1.0]], TIMINGS, 1, 0)
    async def drain(self):
        pass
    def queue_depth(self):
        return 0, 0
    def facts(self):
        return {}

async def main():
    server = Server(ServerStatus("emotion", TaskName.FEATURE_EXTRACTION), Settings.load(os.environ), Slow())
    await server.start()
    print(server.port, flush=True)
    return await server.serve()

sys.exit(min(1, uvloop.run(main())))
"""


@dataclass
class Process:
    """A serving process."""

    popen: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)


@contextmanager
def process(seconds_per_request: float, *, ulimit: str = "", **settings: object) -> Iterator[Process]:
    """A server whose model takes this long; `ulimit`: the argument of the shell's command of that name before it
    starts."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "runtime"))),
        "PENSTOCK_PORT": "0",
        **{f"PENSTOCK_{name.upper()}": str(value) for name, value in settings.items()},
    }
    command = [sys.executable, "-c", PROCESS, str(seconds_per_request)]
    if ulimit:
        command = ["sh", "-c", f'ulimit {ulimit} && exec "$@"', "sh", *command]
    popen = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert popen.stdout is not None
        yield Process(popen, int(popen.stdout.readline()))
    finally:
        popen.kill()
        popen.wait()
        if popen.stdout is not None:
            popen.stdout.close()
