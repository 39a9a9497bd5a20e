"""Checks grammars in a process of its own, within limits of time and memory.

A schema of a kilobyte that combines patterns can make the library compute for minutes and take gigabytes, and none of
its own limits ends that. `GrammarChecker` is the server's end. `python -m penstock_runtime.generation.grammar_check` is
the other: it answers each line of its input, a grammar as JSON, with a line, the error as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from penstock.process import python_module

CPU_SECONDS = 2.0
"""For one grammar. A schema of 3,000 properties takes half of it."""
MEMORY_BYTES = 1024 * 2**20
"""Of addresses, a part of which the interpreter and its libraries have."""
TOO_COMPLEX = "it takes too much time or memory to prepare"
CLOSE_SECONDS = 10.0


class GrammarChecker:
    """Starts the process when it is first needed, and ends it when this object is dropped. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def error(self, grammar: str) -> str:
        """Why a grammar is refused; empty: it can be used. OSError if the process cannot be started."""
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                self._end()
                command = python_module("penstock_runtime.generation.grammar_check")
                process = self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
                self._end = weakref.finalize(self, _end, process)
            assert process.stdin is not None  # noqa: S101 - opened with pipes
            assert process.stdout is not None  # noqa: S101
            line = b""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(grammar).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if not line:
                process.wait()
                return TOO_COMPLEX
            return str(json.loads(line))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its input, which ends it."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Answer until the input ends."""
    import llguidance

    # A terminal sends it to the server's whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.nice(10)
    # When the container's memory runs out, the kernel should end this process and not the server.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    limits = llguidance.LLParserLimits(verbose_errors=False)
    for line in sys.stdin.buffer:
        # The default action of its signal ends the process, in the library's code too.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        error = llguidance.LLMatcher.validate_grammar(json.loads(line), limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(error).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
