"""Failures that a candidate may cause in its process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from penstock.errors import ModelError
from penstock.manifest import Metric


class Misbehaviour:
    """Methods that fail in all ways."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        self.calls += 1
        return a + b

    def count(self) -> int:
        return self.calls

    def metric(self) -> Metric:
        return Metric(name="min_cosine", value=0.99, budget=0.985, passed=True)

    def chatter(self) -> str:
        print("a library prints\n" * 5000)
        os.write(1, b'{"value": "a lie"}\n')
        return "the truth"

    def big(self, size: int) -> str:
        return "x" * size

    def cpus(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def pid(self) -> int:
        return os.getpid()

    def raise_value_error(self) -> None:
        raise ValueError("two\nlines")

    def raise_ours(self) -> None:
        raise ModelError("the model has no head", remedy="Take one that has")

    def fill_the_disk(self) -> None:
        Path("/dev/full").write_text("x", encoding="ascii")

    def die(self, number: int) -> None:
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os.kill(os.getpid(), number)

    def leave(self) -> None:
        sys.stderr.write("could not open libfoo.so\n")
        sys.stderr.flush()
        os._exit(7)

    def segfault(self) -> None:
        signal.raise_signal(signal.SIGSEGV)

    def hang(self) -> None:
        threading.Event().wait()

    def not_json(self) -> Any:
        return object()
