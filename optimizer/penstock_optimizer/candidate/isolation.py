"""Calls an object in a separate process: a crash, a hang or running out of memory there is a result here.

Candidates are built, judged and measured this way. A worker holds one object; calls are its methods by name with JSON
arguments, one at a time. `Worker` is the parent's end. `python -m penstock_optimizer.candidate.isolation
package.module:Class --cpus 0,1` is the child's: it makes one object and serves calls, one JSON line each, until its
input ends. Its standard output belongs to the protocol; what libraries print goes to the log. An answer also has the
object's `contention`, a CpuTime, if it has one: what its measurements ran and waited.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Self

from pydantic import BaseModel

from penstock import errors
from penstock.errors import OptimizationError, OutOfDisk, OutOfMemory, PenstockError, printable
from penstock.process import python_module
from penstock_runtime.host.disk import FULL

CLOSE_SECONDS = 3.0
"""How long a worker may take to end by itself before it is killed."""
CONFIGURE_SECONDS = 300.0
"""Limit for starting Python and importing: seconds, or minutes on busy cores. It only ends a process that hangs."""
TAIL_BYTES = 2000
NOT_QUIET = 0.05
"""Share of waiting of a whole search from which its figures are marked."""


class CallFailure(StrEnum):
    """How a call went wrong."""

    RAISED = "raised"
    """The method raised; the worker continues."""
    DIED = "died"
    TIMED_OUT = "timed out"


class WorkerFailed(Exception):
    """A call returned no value; `reason` is one line for the report, `log_tail` the end of standard error."""

    def __init__(
        self,
        failure: CallFailure,
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
        """The remedy of that error."""
        self.log_tail = log_tail
        self.seconds = seconds
        """The limit of a call that timed out."""

    @property
    def out_of_memory(self) -> bool:
        """True for a worker that the kernel killed (this program sends no SIGKILL before a call times out), and for
        allocators that failed."""
        killed = self.failure is CallFailure.DIED and self.reason.startswith(
            f"killed by signal {signal.SIGKILL.value} "
        )
        return killed or "bad_alloc" in self.reason or self.reason.startswith(("MemoryError", "_ArrayMemoryError"))

    def as_error(self, what: str) -> PenstockError:
        """The PenstockError that the method raised, OutOfMemory where memory ran out, or an OptimizationError about
        `what`."""
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


# The kernel counts for each thread the time that it ran and the time that it waited on a run queue (`schedstat`;
# Documentation/scheduler/sched-stats.rst), and for each CPU the time in which the hypervisor ran another machine
# (`steal`). On a quiet machine both hardly grow, except for the microseconds that a thread takes to wake up.


@dataclass(frozen=True)
class CpuTime:
    """CPU time of the threads of this process, and time in which they waited for a CPU, in nanoseconds since they were
    started."""

    ran: int = 0
    waited: int = 0

    @classmethod
    def read(cls) -> CpuTime:
        """Of now; zeros where the kernel does not count (CONFIG_SCHED_INFO)."""
        ran = waited = 0
        with contextlib.suppress(OSError):
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):  # it has just ended
                    fields = (thread / "schedstat").read_bytes().split()
                    ran, waited = ran + int(fields[0]), waited + int(fields[1])
        return cls(ran, waited + _stolen(os.sched_getaffinity(0)))

    def since(self, before: CpuTime) -> CpuTime:
        """What was added."""
        # A thread that ended takes its counts with it.
        return CpuTime(max(self.ran - before.ran, 0), max(self.waited - before.waited, 0))

    def __add__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.ran + other.ran, self.waited + other.waited)

    @property
    def share(self) -> float:
        """The share of waiting, 0 to 1."""
        return self.waited / (self.ran + self.waited) if self.waited else 0.0


def _stolen(cpus: set[int]) -> int:
    """Nanoseconds in which the hypervisor ran something else on these CPUs."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        names = {f"cpu{number}" for number in cpus}
        with Path("/proc/stat").open(encoding="ascii") as lines:
            return sum(int(line.split()[8]) * tick for line in lines if line.split(" ", 1)[0] in names)
    return 0


class Worker:
    """A process that holds one object. Use as a context manager, or `close` it."""

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        log: Path,
        cpus: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        configuration: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`target`: `package.module:Class`, made without arguments in the worker; or the command of another program
        that serves the same protocol (OSError when it cannot be started). `log`: receives all its output.
        `configuration`: arguments of `configure`, which is called before the first call."""
        command = (
            [*python_module("penstock_optimizer.candidate.isolation"), target] if isinstance(target, str) else target
        )
        if cpus:
            command = [*command, "--cpus", ",".join(map(str, cpus))]
        self._log = log
        self._configuration = configuration
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=environment
            )
        self._buffer = b""
        self.contention = CpuTime()
        """Of the measurements of all calls so far."""

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
        """False after the process has ended, for any reason."""
        return self._process.poll() is None

    def call(self, method: str, *, timeout_seconds: float, **arguments: Any) -> Any:
        """Call a method and wait for its value; WorkerFailed when there is none. A worker that times out is killed."""
        if self._configuration is not None:
            configuration, self._configuration = self._configuration(), None
            self.call("configure", timeout_seconds=max(timeout_seconds, CONFIGURE_SECONDS), **configuration)
        assert self._process.stdin is not None  # noqa: S101 - opened with a pipe
        line = json.dumps({"method": method, "arguments": arguments}, default=to_json).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        answer = json.loads(self._read_line(timeout_seconds, method))
        self.contention = CpuTime(*answer.get("contention", (0, 0)))
        if "error" in answer:
            raise WorkerFailed(
                CallFailure.RAISED, answer["error"], kind=answer["kind"], remedy=answer["remedy"], log_tail=self._tail()
            )
        return answer["value"]

    def close(self) -> None:
        """End the worker: close its input, and kill it if it does not end."""
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
                raise WorkerFailed(CallFailure.TIMED_OUT, reason, log_tail=self._tail(), seconds=timeout_seconds)
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise self._died()
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self) -> WorkerFailed:
        return WorkerFailed(CallFailure.DIED, death_reason(self._process.wait(), self._tail()), log_tail=self._tail())

    def _tail(self) -> str:
        """The end of the log."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace").strip()
        return ""


def death_reason(return_code: int, log_tail: str) -> str:
    """Why a process ended, in one line: the signal by number and name, or the exit code with the last output."""
    if return_code < 0:
        number = -return_code
        with contextlib.suppress(ValueError):
            name = signal.Signals(number).name
            hint = ", out of memory in all likelihood" if number == signal.SIGKILL else ""
            return f"killed by signal {number} ({name}{hint})"
        return f"killed by signal {number}"
    last = printable(log_tail.splitlines()[-1].strip()) if log_tail else "no output"
    return f"ended with exit code {return_code}: {last}"


PARENT_GONE = 3
"""Exit code when the parent died during a call."""


def to_json(value: Any) -> Any:
    """Encode values of calls as JSON: pydantic models as objects; the rest must be JSON already."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} does not go through JSON")


def error_answer(error: Exception) -> dict[str, str]:
    """The answer to a call that raised: `kind` is the class of a PenstockError, else empty."""
    if isinstance(error, PenstockError):
        return {"error": error.message, "remedy": error.remedy, "kind": type(error).__name__}
    if isinstance(error, OSError) and error.errno in FULL:
        return {"error": os.strerror(error.errno), "remedy": "", "kind": OutOfDisk.__name__}
    text = printable(" ".join(str(error).split())) or "no message"
    return {"error": f"{type(error).__name__}: {text}", "remedy": "", "kind": ""}


def serve(target: object, calls: queue.SimpleQueue[bytes | None], busy: threading.Event, output: BinaryIO) -> None:
    """Answer calls until None comes; `busy` is cleared after each."""
    while (line := calls.get()) is not None:
        call = json.loads(line)
        answer: dict[str, Any]
        try:
            value = getattr(target, call["method"])(**call["arguments"])
            answer = {"value": value, "contention": astuple(getattr(target, "contention", CpuTime()))}
            encoded = json.dumps(answer, default=to_json)
        except Exception as error:  # any error of a candidate is its outcome; the worker continues
            # The log may be on the full disk.
            with contextlib.suppress(OSError):
                traceback.print_exc()
            encoded = json.dumps(error_answer(error))
        busy.clear()
        output.write(encoded.encode() + b"\n")
        output.flush()


def _read(calls: queue.SimpleQueue[bytes | None], busy: threading.Event) -> None:
    """Queue the calls that come in. When the input ends during a call, its result is of no use: exit at once.

    Reads the descriptor: `sys.stdin` holds a lock while it waits, on which the interpreter aborts when it ends.
    """
    pending = b""
    while piece := os.read(0, 1 << 16):
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            # Set here and not where the call is answered: the input may end before that has begun.
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
    # When memory runs out, the kernel should kill this process first, not the one that holds the results.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if options.cpus:
        # Before the imports: thread pools take their size and their CPUs from the affinity at import.
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
