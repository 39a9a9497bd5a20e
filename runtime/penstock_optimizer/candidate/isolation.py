"""Work in a process of its own: a crash, a hang or running out of memory there is a result here.

Candidates are built, judged and measured so. One worker holds one object; calls are methods by name with JSON
arguments, one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from penstock import errors
from penstock.errors import OptimizationError, OutOfMemory, PenstockError
from penstock_optimizer.candidate.worker import to_json

CLOSE_SECONDS = 3.0
"""How long a worker may take to end by itself before it is killed."""
TAIL_BYTES = 2000


class Failure(StrEnum):
    """How a call went wrong."""

    RAISED = "raised"
    """The method raised; the worker lives on."""
    DIED = "died"
    TIMED_OUT = "timed out"


class WorkerFailed(Exception):
    """A call brought no value; `reason` is one line for the report, `log_tail` the last words on standard error."""

    def __init__(
        self,
        failure: Failure,
        reason: str,
        *,
        kind: str = "",
        remedy: str = "",
        log_tail: str = "",
        seconds: float = 0.0,
    ) -> None:
        super().__init__(reason)
        self.failure = failure
        self.reason = reason
        self.kind = kind
        """Class name of a PenstockError that the method raised."""
        self.remedy = remedy
        """Of that error."""
        self.log_tail = log_tail
        self.seconds = seconds
        """That a call which timed out was given."""

    @property
    def out_of_memory(self) -> bool:
        """True for a worker that was killed (nobody else here sends SIGKILL), and for allocators that gave up."""
        killed = self.failure is Failure.DIED and self.reason.startswith(f"killed by signal {signal.SIGKILL.value} ")
        return killed or "bad_alloc" in self.reason or self.reason.startswith(("MemoryError", "_ArrayMemoryError"))

    def as_error(self, what: str) -> PenstockError:
        """The PenstockError that the method raised, OutOfMemory where the kernel or the allocator said so, or an
        OptimizationError that says what came to nothing."""
        if self.out_of_memory:
            return OutOfMemory(
                f"{what}: {self.reason}",
                remedy="Give it more memory (spec.pod.memory on a cluster), or take a smaller model",
            )
        kind = getattr(errors, self.kind, None) if self.kind else None
        if isinstance(kind, type) and issubclass(kind, PenstockError):
            return kind(self.reason, remedy=self.remedy)
        remedy = self.remedy or "See the logs in the work folder of the store"
        return OptimizationError(f"{what}: {self.reason}", remedy=remedy)


class Worker:
    """One process with one object in it. Use as a context manager, or `close` it."""

    def __init__(self, target: str, *, log: Path, cpus: Sequence[int] = ()) -> None:
        """`target`: `package.module:Class`, made without arguments in the worker. `log`: takes all that it prints."""
        command = [sys.executable, "-m", "penstock_optimizer.candidate.worker", target]
        if cpus:
            command += ["--cpus", ",".join(map(str, cpus))]
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False after the process has ended, for whatever reason."""
        return self._process.poll() is None

    def call(self, method: str, *, timeout_seconds: float, **arguments: Any) -> Any:
        """Call a method and wait for its value; WorkerFailed when there is none. A worker that times out is killed."""
        assert self._process.stdin is not None  # noqa: S101 - opened with a pipe
        line = json.dumps({"method": method, "arguments": arguments}, default=to_json).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        answer = json.loads(self._read_line(timeout_seconds, method))
        if "error" in answer:
            raise WorkerFailed(
                Failure.RAISED, answer["error"], kind=answer["kind"], remedy=answer["remedy"], log_tail=self._tail()
            )
        return answer["value"]

    def close(self) -> None:
        """End the worker: politely, then not."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read_line(self, timeout_seconds: float, method: str) -> bytes:
        assert self._process.stdout is not None  # noqa: S101 - opened with a pipe
        descriptor = self._process.stdout.fileno()
        end = time.monotonic() + timeout_seconds
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self._process.kill()
                self._process.wait()
                limit = f"{timeout_seconds:.0f}" if timeout_seconds >= 10 else f"{timeout_seconds:.2g}"
                reason = f"{method} did not end within {limit} s"
                raise WorkerFailed(Failure.TIMED_OUT, reason, log_tail=self._tail(), seconds=timeout_seconds)
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise self._died()
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self) -> WorkerFailed:
        return WorkerFailed(Failure.DIED, death_reason(self._process.wait(), self._tail()), log_tail=self._tail())

    def _tail(self) -> str:
        """The last words of the log."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").strip()
        return ""


def death_reason(return_code: int, log_tail: str) -> str:
    """Why a process ended, in one line: the signal by number and name, or the exit code, and its last words."""
    if return_code < 0:
        number = -return_code
        with contextlib.suppress(ValueError):
            name = signal.Signals(number).name
            hint = ", out of memory in all likelihood" if number == signal.SIGKILL else ""
            return f"killed by signal {number} ({name}{hint})"
        return f"killed by signal {number}"
    last = log_tail.splitlines()[-1].strip() if log_tail else "it said nothing"
    return f"ended with exit code {return_code}: {last}"
