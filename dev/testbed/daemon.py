"""Processes that outlive the call that starts them, and are found again by a record in a file.

A record holds the process id and its start time, so that an id which the kernel has given to another process is never
mistaken for ours. Waiting for an end is by pidfd: no polling, and it works for other people's children.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import BedError

TAIL_BYTES = 2000


@dataclass(frozen=True)
class Process:
    """A process, identified uniquely since boot."""

    pid: int
    started_ticks: int

    @classmethod
    def current(cls) -> Process:
        """This very process."""
        return cls(os.getpid(), _started_ticks(os.getpid()) or 0)

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has this id now; None when none has."""
        ticks = _started_ticks(pid)
        return None if ticks is None else cls(pid, ticks)

    @classmethod
    def read(cls, path: Path) -> Process | None:
        """What `write` wrote; None where nothing, or nothing whole, is written."""
        try:
            record = json.loads(path.read_text())
            return cls(int(record["pid"]), int(record["started_ticks"]))
        except (OSError, ValueError, KeyError):
            return None

    def write(self, path: Path) -> None:
        """Write it down, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".new")
        whole.write_text(json.dumps({"pid": self.pid, "started_ticks": self.started_ticks}))
        whole.replace(path)

    @property
    def alive(self) -> bool:
        """False once it has ended, also when another process has its id by now."""
        return _started_ticks(self.pid) == self.started_ticks

    def end(self, *, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL when that has not helped within the grace; returns when the process is gone."""
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.alive:
                    if grace_seconds > 0:
                        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                    if grace_seconds <= 0 or not _ended(descriptor, grace_seconds):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        _ended(descriptor, None)
            finally:
                os.close(descriptor)
        # A child of this process stays a zombie until its exit status is read.
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)


@dataclass(frozen=True)
class Daemon:
    """A named program below a folder: its record in pids/, its output in logs/."""

    name: str
    folder: Path

    @property
    def log(self) -> Path:
        """Its standard output and standard error."""
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def record(self) -> Path:
        """Where its process is written down while it should run."""
        return self.folder / "pids" / f"{self.name}.json"

    @property
    def process(self) -> Process | None:
        """The running process; None when it never started or has ended."""
        process = Process.read(self.record)
        return process if process is not None and process.alive else None

    def start(self, executable: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Run `executable` in a new session, so that Ctrl-C in the terminal does not reach it.

        `arguments` begin with the name that the program is called by.
        """
        if self.process is not None:
            raise BedError(f"{self.name} is running already in {self.folder}", remedy="`make cluster-down` ends it")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        output = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        pid = os.posix_spawn(
            executable,
            list(arguments),
            {**os.environ, **(environment or {})},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self.log), output, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        Process(pid, _started_ticks(pid) or 0).write(self.record)

    def stop(self, *, grace_seconds: float = 10) -> None:
        """End it, by force after the grace (at once with 0); without effect when it is not running."""
        if (process := Process.read(self.record)) is not None:
            process.end(grace_seconds=grace_seconds)
        self.record.unlink(missing_ok=True)

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        try:
            return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        except FileNotFoundError:
            return "(no output)"


def daemons(folder: Path) -> list[Daemon]:
    """Every daemon that has a record below `folder`."""
    return [Daemon(record.stem, folder) for record in sorted((folder / "pids").glob("*.json"))]


def _started_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of a live process; None for none, and for a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may itself hold anything.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _ended(descriptor: int, seconds: float | None) -> bool:
    """Wait for the end of a pidfd's process; False after `seconds`."""
    return bool(select.select([descriptor], [], [], seconds)[0])
