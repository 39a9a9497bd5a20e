"""`penstock serve` as a separate process, observed from the outside."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Self

import psutil

from tests.cli.endpoints import clean_environment

SECONDS = 400.0
"""A limit for operations of seconds, on machines with other work."""


class Served:
    """A running `penstock serve`. Use as a context manager: it is ended, with all that it started, at the end."""

    def __init__(
        self,
        target: Path | str,
        *words: object,
        program: tuple[str, ...] = ("-m", "penstock_cli.main"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables besides this process's own."""
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", str(target), "--port", "0", *map(str, words)],
            env=clean_environment(**(environment or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._changed = threading.Condition()
        self._lines: list[tuple[float, str]] = []
        self._family: set[psutil.Process] = set()
        pipes = (self.process.stdout, self.process.stderr)
        self._readers = [threading.Thread(target=self._read, args=(pipe,), daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        family = {*self._family, *self.family()}
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in family:
            if process.is_running():
                process.kill()
        for reader in self._readers:
            reader.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    # its output

    @property
    def output(self) -> str:
        """The text of its two outputs so far."""
        with self._changed:
            return "\n".join(line for _, line in self._lines)

    def wait_for(self, words: str, seconds: float = SECONDS) -> float:
        """Wait until a line with these words was written; returns the seconds since the start."""
        end = time.monotonic() + seconds
        with self._changed:
            while (found := next((when for when, line in self._lines if words in line), None)) is None:
                left = end - time.monotonic()
                ended = self.process.poll() is not None and not any(reader.is_alive() for reader in self._readers)
                if left <= 0 or ended:
                    text = "\n".join(line for _, line in self._lines)
                    raise AssertionError(f"it never wrote {words!r}, but:\n{text}")
                self._changed.wait(min(left, 0.5))
        return found - self.begun

    def ready(self) -> float:
        """Wait until it serves; returns the seconds since the start."""
        return self.wait_for("serving ")

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            with self._changed:
                self._lines.append((time.monotonic(), line.rstrip()))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    # asking it

    @property
    def port(self) -> int:
        """Where it listens."""
        self.wait_for("listening on")
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.output)
        assert found is not None
        return int(found[1])

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON."""
        return self._ask("GET", path, None)

    def predict(self, inputs: Any) -> tuple[int, Any]:
        """Status and JSON of `/predict`."""
        return self._ask("POST", "/predict", {"inputs": inputs})

    def info(self) -> dict[str, Any]:
        """`/info`."""
        status, value = self.get("/info")
        assert status == 200
        found: dict[str, Any] = value
        return found

    def wait_until(self, true_of: Callable[[dict[str, Any]], bool], seconds: float = SECONDS) -> dict[str, Any]:
        """Poll `/info` four times a second until the condition holds."""
        end = time.monotonic() + seconds
        while not true_of(info := self.info()):
            assert time.monotonic() < end, info
            time.sleep(0.25)
        return info

    def _ask(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"} if data else {})
            response = connection.getresponse()
            text = response.read()
            is_json = "json" in (response.getheader("content-type") or "")
            return response.status, json.loads(text) if is_json else text.decode()
        finally:
            connection.close()

    # its processes

    def family(self) -> list[psutil.Process]:
        """All processes that it has started, and theirs. They are remembered, and ended with it."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._family.update(found)
        return found

    def cpu_seconds(self) -> float:
        """CPU seconds that it has used so far, on all cores together."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process only."""
        os.kill(self.process.pid, number)

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = SECONDS) -> int:
        """Send the signal and wait for the end; its exit status."""
        self.send(number)
        return self.process.wait(seconds)


def gone(processes: list[psutil.Process], seconds: float = 120.0) -> bool:
    """True when all have ended within the time."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
