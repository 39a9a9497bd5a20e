"""The child's side of `isolation`: an object whose methods are called from another process.

`python -m penstock_optimizer.candidate.worker package.module:Class --cpus 0,1` makes one object and serves calls, one
JSON line each, until its input ends. Standard output belongs to the protocol: whatever libraries print goes to the log.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import queue
import threading
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel

from penstock.errors import OutOfDisk, PenstockError
from penstock_runtime.host.disk import FULL

PARENT_GONE = 3
"""Exit code when the parent died in the middle of a call."""


def to_json(value: Any) -> Any:
    """Values of calls as JSON: pydantic models as objects; the rest must be JSON already."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} does not go through JSON")


def failed(error: Exception) -> dict[str, str]:
    """What a call that raised is answered with: `kind` is the class of a PenstockError, else empty."""
    if isinstance(error, PenstockError):
        return {"error": error.message, "remedy": error.remedy, "kind": type(error).__name__}
    if isinstance(error, OSError) and error.errno in FULL:
        return {"error": os.strerror(error.errno), "remedy": "", "kind": OutOfDisk.__name__}
    text = " ".join(str(error).split()) or "no message"
    return {"error": f"{type(error).__name__}: {text}", "remedy": "", "kind": ""}


def serve(target: object, calls: queue.SimpleQueue[bytes | None], busy: threading.Event, output: BinaryIO) -> None:
    """Answer calls until None comes; `busy` is cleared after each."""
    while (line := calls.get()) is not None:
        call = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"value": getattr(target, call["method"])(**call["arguments"])}
            encoded = json.dumps(answer, default=to_json)
        except Exception as error:  # whatever a candidate does is its outcome, not our end
            # The log may be on the very disk that is full.
            with contextlib.suppress(OSError):
                traceback.print_exc()
            encoded = json.dumps(failed(error))
        busy.clear()
        output.write(encoded.encode() + b"\n")
        output.flush()


def _read(calls: queue.SimpleQueue[bytes | None], busy: threading.Event) -> None:
    """Queue what comes in. When the input ends during a call, nobody wants its result: end at once.

    Reads the descriptor: `sys.stdin` holds a lock while it waits, on which the interpreter aborts when it ends.
    """
    pending = b""
    while piece := os.read(0, 1 << 16):
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            # Here and not where it is answered: the input may end before that has begun.
            busy.set()
            calls.put(line)
    if busy.is_set():
        os._exit(PARENT_GONE)
    calls.put(None)


def main() -> None:
    """Serve one object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--cpus", default="")
    options = parser.parse_args()
    # The first to go when memory runs out is this process, not the one that keeps the results.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if options.cpus:
        # Before the imports: thread pools size and place themselves by the affinity that they find.
        os.sched_setaffinity(0, [int(cpu) for cpu in options.cpus.split(",")])
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module, _, name = options.target.partition(":")
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_read, args=(calls, busy), daemon=True).start()
    serve(getattr(importlib.import_module(module), name)(), calls, busy, output)


if __name__ == "__main__":
    main()
