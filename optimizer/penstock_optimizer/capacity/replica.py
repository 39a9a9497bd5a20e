"""A replica to measure: the real server with an artefact, on a free port of the loopback interface.

`serve_replica` is the parent's end. `python -m penstock_optimizer.capacity.replica ARTEFACT --cores 2 --cpus 0,1` is
the server: it prints one JSON line `{"port": ...}` when it is ready, and serves until its standard input ends or it
gets a signal. It imports little besides a server's modules: its memory is reported as the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from penstock.manifest import Manifest
from penstock.process import python_module
from penstock.tasks import TaskName
from penstock_optimizer.candidate.isolation import death_reason

LEAST_START_SECONDS = 2.0
"""A replica is not started with less time than this."""
NO_TIME = "the time budget was spent before the capacity could be measured"
STOP_SECONDS = 10.0


class CapacityFailed(PenstockError):
    """The replica was not measured: there was no time, or the load process failed."""


class ReplicaBroken(CapacityFailed):
    """The server ended before it was ready, or answered no request: its plan must not be served."""


@dataclass(frozen=True)
class ReplicaServer:
    """A running server."""

    url: str
    """Of the server, without a path."""
    pid: int


@contextmanager
def serve_replica(
    artefact: Path,
    *,
    cores: int,
    cpus: Sequence[int],
    log: Path,
    max_tokens: int | None = None,
    probes: Path | None = None,
    start_seconds: float,
) -> Iterator[ReplicaServer]:
    """Serve an artefact on these CPUs within the context; CapacityFailed when it does not start in time. `probes`: a
    file to write the vectors of the probe texts to, of a model that has such."""
    if start_seconds < LEAST_START_SECONDS:
        raise CapacityFailed(NO_TIME, remedy="Allow more time")
    command = [*python_module("penstock_optimizer.capacity.replica"), str(artefact), "--cores", str(cores)]
    if cpus:
        command += ["--cpus", ",".join(map(str, cpus))]
    if max_tokens is not None:
        command += ["--max-tokens", str(max_tokens)]
    if probes is not None:
        command += ["--probes", str(probes)]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
    assert process.stdout is not None  # noqa: S101 - both are pipes
    assert process.stdin is not None  # noqa: S101
    line = b""
    try:
        line = _read_first_line(process, start_seconds)
        if not line:
            code = process.poll()
            if code is None:
                raise CapacityFailed(f"the server was not ready after {start_seconds:.0f} s", remedy=f"See {log}")
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:].strip()
            raise ReplicaBroken(f"the server did not start: {death_reason(code, tail)}", remedy=f"See {log}")
        yield ReplicaServer(f"http://127.0.0.1:{json.loads(line)['port']}", process.pid)
    finally:
        process.stdin.close()
        try:
            # Not ready yet: it does not react to the end of its input.
            if not line:
                process.kill()
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _read_first_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The line that reports the server ready; empty when it ended or took too long."""
    assert process.stdout is not None  # noqa: S101 - a pipe
    end = time.monotonic() + seconds
    line = b""
    while not line and (left := end - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        line = process.stdout.readline()
        if not line:
            # Its output ends a moment before the process.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            break
    return line


async def serve(artefact: Path, *, cores: int, max_tokens: int | None, probes: Path | None) -> None:
    """Load the artefact, listen, print the port, and serve."""
    # Imported here: the process that measures needs none of it.
    import numpy as np

    from penstock_runtime.app.lifecycle import AnyModel, start_model
    from penstock_runtime.app.server import Server, request_limits
    from penstock_runtime.host import read_host
    from penstock_runtime.serving.generation_model import load_generation_artefact
    from penstock_runtime.serving.loaded_model import LoadedModel, load_artefact
    from penstock_runtime.serving.probes import probe_vectors
    from penstock_runtime.serving.status import ServerStatus
    from penstock_runtime.settings import Settings

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
    if probes is not None and isinstance(model, LoadedModel):
        vectors = await asyncio.to_thread(probe_vectors, model)
        if vectors is not None:
            np.save(probes, vectors, allow_pickle=False)
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
    import uvloop

    from penstock_runtime.host import pin_process

    parser = argparse.ArgumentParser()
    parser.add_argument("artefact", type=Path)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--cpus", default="")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--probes", type=Path)
    options = parser.parse_args()
    if options.cpus:
        pin_process(int(cpu) for cpu in options.cpus.split(","))
    uvloop.run(serve(options.artefact, cores=options.cores, max_tokens=options.max_tokens, probes=options.probes))


if __name__ == "__main__":
    main()
