"""Artefacts of the real MiniLM, and `python -m penstock_runtime.pod` as a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from penstock.artefact_store import Digest
from penstock.capacity import CapacityCurve, CapacityPoint
from penstock.hardware import CpuIdentity, Isa
from penstock.manifest import MANIFEST_NAME
from penstock.recipe import Plan, Recipe
from penstock_runtime.host import read_host
from tests.runtime.minilm import ORT_DYNAMIC, ORT_FP32, copied_graph, copy_settings, manifest_of
from tests.runtime.models.s3_server import free_port

ROOT = Path(__file__).parents[3]
SECONDS = 400.0
"""A limit for operations of seconds, on machines with other work."""


def other_isa() -> Isa:
    """Not this machine's."""
    return Isa.NEON if read_host().cpu.isa is not Isa.NEON else Isa.AVX2


def write_artefact(
    root: Path, *, recipe: Recipe = ORT_DYNAMIC, isa: Isa | None = None, measured: bool = True, cores: int = 1
) -> Digest:
    """An artefact that can be served; its digest."""
    served = {
        one: copied_graph(root, one, Plan(recipe=one, streams=cores, threads_per_stream=1))
        for one in {recipe, ORT_FP32}
    }
    copy_settings(root)
    here = read_host().cpu
    point = CapacityPoint(
        arrivals_per_second=10,
        completed_per_second=10,
        p50_milliseconds=1,
        p95_milliseconds=2,
        p99_milliseconds=3,
        samples=100,
    )
    manifest = manifest_of(
        root,
        chosen=served[recipe],
        baseline=served[ORT_FP32],
        cpu=here if isa is None else CpuIdentity(isa=isa, model_name="another processor"),
        cores=cores,
        capacity=CapacityCurve(points=(point,)) if measured else CapacityCurve(),
    )
    content = manifest.model_dump_json().encode()
    (root / MANIFEST_NAME).write_bytes(content)
    return Digest.of(content)


class Pod:
    """A running pod process. Use as a context manager: it is ended at the end."""

    def __init__(self, work: Path, /, *modules: str, **variables: object) -> None:
        """`modules`: what Python is to run, and words for it; the runtime's own when none is given."""
        work.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.termination_log = work / "termination-log"
        self.termination_log.touch()
        own = {
            "PENSTOCK_HOST": "127.0.0.1",
            "PENSTOCK_PORT": self.port,
            "PENSTOCK_CACHE": work / "cache",
            "PENSTOCK_TERMINATION_LOG": self.termination_log,
            **{f"PENSTOCK_{name.upper()}" if name.islower() else name: value for name, value in variables.items()},
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *(modules or ("penstock_runtime.pod",))],
            cwd=ROOT,
            env={**kept, "PYTHONUNBUFFERED": "1", **{name: str(value) for name, value in own.items()}},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def output(self) -> str:
        """All that it wrote until now."""
        with self._changed:
            return "\n".join(self._lines)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines among it."""
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]

    def wait_for(self, words: str, seconds: float = SECONDS) -> None:
        """Until it has written these words."""
        end = time.monotonic() + seconds
        with self._changed:
            while not any(words in line for line in self._lines):
                left = end - time.monotonic()
                if left <= 0 or not (self._reader.is_alive() or self.process.poll() is None):
                    raise AssertionError(f"it never wrote {words!r}, but:\n" + "\n".join(self._lines))
                self._changed.wait(min(left, 0.5))

    def ended(self, seconds: float = SECONDS) -> int:
        """Its exit code, once it has ended by itself."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal, and wait."""
        self.process.send_signal(number)
        return self.ended()

    @property
    def last_words(self) -> dict[str, Any]:
        """Its termination message."""
        found: dict[str, Any] = json.loads(self.termination_log.read_text())
        return found

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"} if data else {})
            response = connection.getresponse()
            text = response.read().decode()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text
        finally:
            connection.close()

    def unready_for(self, words: str, seconds: float = SECONDS) -> str:
        """Poll /readyz ten times a second until it is 503 with these words; returns the whole text."""
        end = time.monotonic() + seconds
        while True:
            status, reason = self.ask("GET", "/readyz")
            if status == 503 and words in reason["error"]:
                return str(reason["error"])
            assert time.monotonic() < end, (status, reason)
            time.sleep(0.1)
