"""The child process that owns the NeuronCores: started, spoken to, watched and ended. I/O of the Neuron engine.

A process takes its NeuronCores at the first use of the runtime and keeps them until it ends, and the runtime may end a
process that fails. Therefore a child has them, and this process serves on and reports what happened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import printable
from penstock.logs import log_event
from penstock_runtime.engines.neuron.copies import Place
from penstock_runtime.engines.neuron.device_errors import DeviceFailure, detail_of, failure_in, failure_of
from penstock_runtime.engines.neuron.shapes import Int32
from penstock_runtime.engines.neuron.worker import receive, send
from penstock_runtime.rows import Float

logger = logging.getLogger("penstock.neuron")

WORKER = Path(__file__).with_name("worker.py")
LOAD_SECONDS = 900.0
"""Longest time of one load with its first run. Some loads take minutes."""
RUN_SECONDS = 60.0
"""Longest time of one run. The Neuron runtime ends one after 30 s itself (NEURON_RT_EXEC_TIMEOUT)."""
END_SECONDS = 10.0
"""How long the child may take to end by itself, which releases the cores."""
LINES = 200
"""Lines of the runtime that are kept."""
LINE_SECONDS = 0.5
"""How long a line that explains a failure is waited for."""


class StartFailed(Exception):
    """The child could not load the model. `failure` by its messages; `stage`: import or load."""

    def __init__(self, failure: DeviceFailure, stage: str, details: str) -> None:
        super().__init__(details)
        self.failure = failure
        self.stage = stage
        self.details = details


class RunFailed(Exception):
    """A run failed on the device."""

    def __init__(self, failure: DeviceFailure, details: str) -> None:
        super().__init__(details)
        self.failure = failure
        self.details = details


class ProcessEnded(Exception):
    """The child has ended."""


class NeuronProcess:
    """A child process. Use `load` first, then `run` from any threads, one at a time for each slot."""

    def __init__(self, python: Path, environment: Mapping[str, str], *, copies: int, places: int) -> None:
        """Start it. OSError if there is no such interpreter. `places`: runs in progress of each copy."""
        self._places = places
        self._control, theirs = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(copies * places)]
        self._connections = [own for own, _ in pairs]
        passed = [theirs, *(other for _, other in pairs)]
        reading, writing = os.pipe()
        numbers = [one.fileno() for one in passed]
        try:
            self._process = subprocess.Popen(
                [str(python), "-u", str(WORKER), *map(str, numbers)],
                env=dict(environment),
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                # Signals of a terminal are for the server, which ends the child after its last request.
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            self._close_sockets()
            raise
        finally:
            os.close(writing)
            for one in passed:
                one.close()
        self._lines: deque[tuple[int, str]] = deque(maxlen=LINES)
        """The last lines of the child, numbered from 1."""
        self._line_count = 0
        self._closing = False
        self._watcher: threading.Thread | None = None
        self._reader = threading.Thread(
            target=self._read_lines, args=(reading,), name="penstock-neuron-log", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def load(
        self,
        given: Mapping[str, Any],
        check_packages: Callable[[Mapping[str, str]], None],
        on_loaded: Callable[[int], None],
        on_ended: Callable[[str], None],
    ) -> None:
        """Load the model. StartFailed, and what `check_packages` raises for the installed versions.

        `given`: the first message of worker.py. `on_loaded` gets the number of loads so far. `on_ended` is called in
        another thread when the child ends later without having been closed.
        """
        try:
            self._control.settimeout(LOAD_SECONDS)
            send(self._control, dict(given))
            check_packages(receive(self._control)[0]["packages"])
            send(self._control, {"go": True})
            loads = 0
            while True:
                message, _ = receive(self._control)
                if "failed" in message:
                    failed = message["failed"]
                    text = f"{failed['type']}: {failed['message']}"
                    failure, detail = self._explained(text)
                    raise StartFailed(failure, failed["stage"], detail)
                if "ready" in message:
                    break
                loads += 1
                on_loaded(loads)
        except TimeoutError:
            text = f"no answer within {LOAD_SECONDS:.0f} s"
            failure, detail = self._explained(text)
            raise StartFailed(failure, "load", detail) from None
        except (EOFError, OSError):
            text = self.end_reason()
            failure, detail = self._explained(text)
            raise StartFailed(failure, "load", detail) from None
        self._control.settimeout(None)
        for connection in self._connections:
            connection.settimeout(RUN_SECONDS)
        self._watcher = threading.Thread(
            target=self._watch, args=(on_ended,), name="penstock-neuron-watch", daemon=True
        )
        self._watcher.start()

    def run(self, place: Place, file: int, rows: int, tokens: int, inputs: Sequence[Int32]) -> list[Float]:
        """Run a batch, padded to the shape of the file; the outputs of its `rows` real rows and `tokens`, float32, each
        its own memory. Blocks. RunFailed, ProcessEnded."""
        connection = self._connections[place.copy * self._places + place.number]
        written = self._line_count
        header = {"file": file, "rows": rows, "tokens": tokens, "shape": list(inputs[0].shape)}
        try:
            send(connection, header, *inputs)
            answer, data = receive(connection)
        except TimeoutError:
            raise RunFailed(DeviceFailure.TIMED_OUT, f"no answer within {RUN_SECONDS:.0f} s") from None
        except (EOFError, OSError):
            raise ProcessEnded(self.end_reason()) from None
        if "error" in answer:
            text = f"{answer['error']['type']}: {answer['error']['message']}"
            failure, detail = self._explained(text, after=written)
            raise RunFailed(failure, detail)
        outputs, start = [], 0
        for shape in answer["shapes"]:
            count = int(np.prod(shape, dtype=np.int64))
            outputs.append(np.frombuffer(data, np.float32, count, start).reshape(shape))
            start += 4 * count
        return outputs

    def end_reason(self) -> str:
        """How the child ended; waits for its end."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the process that owns the device closed its connections"
        if code >= 0:
            return f"the process that owns the device ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the process that owns the device was ended by {name}"

    def close(self) -> None:
        """End the child, which releases the cores. No run may be in progress."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):  # it has ended
            send(self._control, {"close": True})
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._watcher is not None:
            self._watcher.join(END_SECONDS)
        self._close_sockets()
        # A process that the child has left behind may hold the pipe open.
        self._reader.join(1.0)

    def _close_sockets(self) -> None:
        for connection in (self._control, *self._connections):
            connection.close()

    def _watch(self, on_ended: Callable[[str], None]) -> None:
        try:
            receive(self._control)
        except (EOFError, OSError):
            if not self._closing:
                on_ended(self.end_reason())

    def _read_lines(self, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as file:
            for line in file:
                text = printable(line.rstrip())
                if not text:
                    continue
                self._line_count += 1
                self._lines.append((self._line_count, text))
                if "ERROR" in text or failure_in(text) is not None:
                    logger.warning("the Neuron runtime reports: %s", text, extra=log_event("NeuronRuntimeMessage"))
                else:
                    logger.debug("the Neuron runtime reports: %s", text)

    def _explained(self, text: str, *, after: int = 0) -> tuple[DeviceFailure, str]:
        """The failure that a message names, or else one of the lines after this number; and the message with the last
        of these lines that names a failure."""
        end = time.monotonic() + LINE_SECONDS
        while (
            not (named := [one for one in self._written(after) if failure_in(one) is not None])
            and time.monotonic() < end
        ):
            # The lines were written before the message was sent; the thread that reads them may be behind.
            time.sleep(0.01)
        whole = f"{named[-1]} ({text})" if named and named[-1] not in text else text
        return failure_of(text, named), detail_of(whole)

    def _written(self, after: int) -> list[str]:
        return [line for number, line in list(self._lines) if number > after]


def start(
    make: Callable[[], NeuronProcess],
    load: Callable[[NeuronProcess], None],
    *,
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    name: str = "",
) -> NeuronProcess:
    """Start a child and load the model; again, for up to `seconds`, while the cores are taken.

    A process that has just ended may not have released its cores yet. StartFailed when they stay taken, or at once for
    any other failure; what `load` raises.
    """
    begun, delay = clock(), 1.0
    while True:
        process = make()
        try:
            load(process)
        except StartFailed as error:
            process.close()
            waited = clock() - begun
            if error.failure is not DeviceFailure.CORES_TAKEN or waited + delay > seconds:
                raise
            logger.warning(
                "the NeuronCores are taken; trying again in %.0f s (%.0f of %.0f s): %s",
                delay,
                waited,
                seconds,
                error.details,
                extra=log_event("NeuronCoresTaken", object=name),
            )
            sleep(delay)
            delay = min(2 * delay, 8.0)
        except BaseException:
            process.close()
            raise
        else:
            return process
