"""Starts a replica to measure (`replica`), and stops it."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from penstock.process import python_module
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
    start_seconds: float,
) -> Iterator[ReplicaServer]:
    """Serve an artefact on these CPUs within the context; CapacityFailed when it does not start in time."""
    if start_seconds < LEAST_START_SECONDS:
        raise CapacityFailed(NO_TIME, remedy="Allow more time")
    command = [*python_module("penstock_optimizer.capacity.replica"), str(artefact), "--cores", str(cores)]
    if cpus:
        command += ["--cpus", ",".join(map(str, cpus))]
    if max_tokens is not None:
        command += ["--max-tokens", str(max_tokens)]
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
