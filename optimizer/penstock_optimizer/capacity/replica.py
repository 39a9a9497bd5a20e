"""Runs a replica to measure: the real server with an artefact, on a free port of the loopback interface.

`python -m penstock_optimizer.capacity.replica ARTEFACT --cores 2 --cpus 0,1` prints one JSON line `{"port": ...}` when
it is ready, and serves until its standard input ends or it gets a signal. It imports the modules of a server only: its
memory is reported as the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import uvloop

from penstock.manifest import Manifest
from penstock.tasks import TaskName
from penstock_runtime.app.lifecycle import AnyModel, start_model
from penstock_runtime.app.server import Server, request_limits
from penstock_runtime.host import pin_process, read_host
from penstock_runtime.serving.generation_model import load_generation_artefact
from penstock_runtime.serving.loaded_model import load_artefact
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings


async def serve(artefact: Path, *, cores: int, max_tokens: int | None) -> None:
    """Load the artefact, listen, print the port, and serve."""
    settings = Settings.model_validate({"http": {"host": "127.0.0.1", "port": 0}})
    model: AnyModel
    task = Manifest.load(artefact).task
    if task is TaskName.TEXT_GENERATION:
        model = load_generation_artefact(artefact, "chosen", read_host(), cores=cores)
        # Answers have the lengths of the workload, whatever the model would say.
        model.end_tokens = frozenset()
    else:
        model = load_artefact(
            artefact, "chosen", read_host(), cores=cores, max_tokens=max_tokens, limits=request_limits(settings)
        )
    server = Server(ServerStatus("capacity", task), settings)
    await server.start()
    await start_model(server, model)
    sys.stdout.write(json.dumps({"port": server.port}) + "\n")
    sys.stdout.flush()
    reader = asyncio.StreamReader()
    # The parent holds the other end: when it ends, the measurement has too.
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    ended = asyncio.create_task(reader.read())
    ended.add_done_callback(lambda _: server.stop())
    await server.serve()


def main() -> None:
    """Serve one artefact."""
    parser = argparse.ArgumentParser()
    parser.add_argument("artefact", type=Path)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--cpus", default="")
    parser.add_argument("--max-tokens", type=int)
    options = parser.parse_args()
    if options.cpus:
        pin_process(int(cpu) for cpu in options.cpus.split(","))
    uvloop.run(serve(options.artefact, cores=options.cores, max_tokens=options.max_tokens))


if __name__ == "__main__":
    main()
