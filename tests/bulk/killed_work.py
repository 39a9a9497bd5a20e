"""A program for tests: does bulk work in child processes that kill themselves at given points, until it is complete.

    python -m tests.bulk.killed_work SOURCE FOLDER SEED KILLS

A point is the number of a call of one of our functions, or of an operation on files (an audit event), of the child's
main thread: uniform over all of them in undisturbed work. A killed child is followed by one that goes on with its
output, which is killed too, or completes it. It prints one JSON object: the number of outputs, and where each kill was.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import onnxruntime  # noqa: F401 - imported once, for all children
import pyarrow.compute
import pyarrow.parquet  # noqa: F401

import penstock_optimizer.optimise  # noqa: F401
from tests.bulk.corpora import load, planned

FILES = ("open", "os.", "shutil.", "fcntl.")
"""Beginnings of the names of audit events about files."""


class Points:
    """Counts calls and operations on files of the main thread, and kills the process at one of them."""

    def __init__(self, kind: str, last: int) -> None:
        self.kind, self.last, self.count, self.name = kind, last, 0, ""

    def install(self) -> None:
        """Begin to count."""
        if self.kind == "files":
            sys.addaudithook(self._audit)
        else:
            sys.setprofile(self._call)

    def _call(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "penstock" in frame.f_code.co_filename:
            self._next(frame.f_code.co_qualname)

    def _audit(self, event: str, _: Any) -> None:
        if event.startswith(FILES):
            self._next(event)

    def _next(self, name: str) -> None:
        self.count += 1
        if self.count == self.last:
            os.write(3, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)


def child(source: Path, folder: Path, output: Path, points: Points) -> tuple[int, str]:
    """Do the work in a child process: its status, and the name of the point or, at the end, the number of points."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 3)
        with load(folder) as model:
            _, _, work = planned(source, output, model)
            _ = work.calculation  # the model is loaded before
            points.install()
            work.run()
            sys.setprofile(None)
        os.write(3, str(points.count).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as pipe:
        return status, pipe.read().decode()


def main() -> None:
    """Entry point."""
    source, folder = map(Path, sys.argv[1:3])
    seed, kills = map(int, sys.argv[3:])
    draw = random.Random(seed)
    of = {kind: int(child(source, folder, folder / f"whole-{kind}", Points(kind, 0))[1]) for kind in ("files", "calls")}
    killed: list[str] = []
    outputs, complete = 0, False
    while len(killed) < kills or not complete:
        kind = draw.choice(("files", "calls"))
        # Work that goes on has fewer points, and may be complete before.
        last = draw.randint(1, of[kind]) if len(killed) < kills else 0
        status, name = child(source, folder, folder / f"out-{outputs}", Points(kind, last))
        assert status in {0, signal.SIGKILL}, (status, name)
        complete = status == 0
        outputs += complete
        killed += [] if complete else [name]
    print(json.dumps({"killed": killed, "points": of, "outputs": outputs}))


if __name__ == "__main__":
    main()
