"""A server that is measured: started on given CPUs, stopped with SIGSTOP while other servers are measured, ended.

The model of a ModelEndpoint file is optimised here for the given cores, and served by `penstock serve` as a user would.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from penstock.process import python_module
from penstock.resources.endpoint import ModelEndpoint
from penstock.settings import hugging_face_token
from penstock_bench.cell import MeasurementFailed
from penstock_bench.results import OURS
from penstock_optimizer.candidate.isolation import death_reason
from penstock_optimizer.job.progress import DownloadReporter, ProgressEvent, Stage
from penstock_runtime.host.forks import end_with_parent

POLL_SECONDS = 0.1
STOP_SECONDS = 15.0
"""How long a server may take to end by itself."""
ORPHAN_SECONDS = 2.0
"""The same for processes that it left."""
PAUSE_SECONDS = 2.0
OUTPUT_LINES = 12
"""Lines of a failed server's output that the error shows."""


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def on_cpus(cpus: Iterable[int]) -> Iterator[None]:
    """Processes started inside inherit this affinity of the calling thread."""
    wanted = set(cpus)
    before = os.sched_getaffinity(0)
    if wanted:
        os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


GONE = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})
"""A zombie without a parent waits for process 1, which in a container may never reap it."""
STOPPED = GONE | {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}


def _status(member: psutil.Process) -> str:
    try:
        return str(member.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


def _wait_until(reached: Callable[[], bool], *, seconds: float) -> None:
    """Look every millisecond; go on after `seconds` in any case."""
    until = time.monotonic() + seconds
    while not reached() and time.monotonic() < until:
        time.sleep(0.001)


class MeasuredServer:
    """A server process and its children; or a server elsewhere, which we neither pause nor end."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        process: subprocess.Popen[bytes] | None = None,
        cpus: Sequence[int] = (),
        log: Path | None = None,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.cpus = tuple(cpus)
        self._process = process
        self._log = log
        self._members: dict[int, psutil.Process] = {}
        self.paused = False

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        cpus: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> MeasuredServer:
        """Start a command that listens on a port of the loopback interface. Wait for it with `wait_until_ready`.

        It is killed when the thread that started it ends without having stopped it.
        """
        with tempfile.NamedTemporaryFile(prefix="penstock-bench-", suffix=".log", delete=False) as log, on_cpus(cpus):
            try:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    # A new session: an interrupt from the keyboard reaches this process only, which ends the server.
                    start_new_session=True,
                    preexec_fn=partial(end_with_parent, os.getpid()),  # noqa: PLW1509 - takes no locks
                )
            except OSError as error:
                Path(log.name).unlink(missing_ok=True)
                raise MeasurementFailed(f"{name} does not start: {command[0]}: {error.strerror}") from error
        return cls(name, f"http://127.0.0.1:{port}", process=process, cpus=cpus, log=Path(log.name))

    @property
    def is_ours(self) -> bool:
        """We started it."""
        return self._process is not None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process and all its descendants, as of now; empty for a server elsewhere."""
        return tuple(member.pid for member in self._family())

    def wait_until_ready(self, path: str, *, seconds: float) -> None:
        """Wait until GET `path` is answered with 200; MeasurementFailed with the server's last words when it ends."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process is not None and self._process.poll() is not None:
                raise MeasurementFailed(
                    f"{self.name} ended while starting ({self._process.returncode}): {self.last_output()}"
                )
            if self._answers(path):
                return
            time.sleep(POLL_SECONDS)
        if self._process is None:
            raise MeasurementFailed(f"{self.url}{path} has not answered with 200 after {seconds:.0f} s")
        raise MeasurementFailed(f"{self.name} is not ready after {seconds:.0f} s: {self.last_output()}")

    def require_alive(self) -> None:
        """MeasurementFailed with its status and last words where it is ours and has ended by itself."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            how = death_reason(status, "") if status < 0 else f"exit code {status}"
            raise MeasurementFailed(
                f"{self.name} ended while it was measured ({how}): {self.last_output()}",
                remedy="The same command goes on from there",
            )

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except (OSError, http.client.HTTPException):
            return False

    def confine(self) -> None:
        """Keep every thread on the server's CPUs: some libraries spread their threads over all CPUs of the machine,
        whatever the process was started with. Threads that stay on some of the server's keep to those."""
        wanted = set(self.cpus)
        for member in self._family() if self.cpus else ():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                for thread in member.threads():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        if not os.sched_getaffinity(thread.id) <= wanted:
                            os.sched_setaffinity(thread.id, wanted)

    def pause(self) -> None:
        """Stop it, parents first, so that none is started anew meanwhile. Call it only when nothing is under way."""
        members = self._family()
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.suspend()
        # The signal is on its way: the next measurement must not share a core with its last instructions.
        _wait_until(lambda: all(_status(member) in STOPPED for member in members), seconds=PAUSE_SECONDS)
        self.paused = self.is_ours

    def resume(self) -> None:
        """Let it go on, children first."""
        for member in reversed(self._family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.resume()
        self.paused = False

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL to whatever is left after a while. A server elsewhere is left alone."""
        if self._process is None:
            return
        self.resume()
        members = self._family()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        # Processes that it left (some servers forget their workers) get SIGTERM, then SIGKILL.
        alive = [member for member in members if member.is_running()]
        for end, seconds in ((psutil.Process.terminate, ORPHAN_SECONDS), (psutil.Process.kill, ORPHAN_SECONDS)):
            for member in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(member)
            _wait_until(lambda: all(_status(member) in GONE for member in members), seconds=seconds)
            alive = [member for member in alive if _status(member) not in GONE]
        self._process.wait()
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    def last_output(self) -> str:
        """The end of its output."""
        if self._log is None:
            return "it is not ours, so its output is elsewhere"
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-OUTPUT_LINES:]) or "it printed nothing"

    def _family(self) -> list[psutil.Process]:
        """Parent first. Those seen before are kept: a child without a parent is still ours."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            for member in (parent, *parent.children(recursive=True)):
                self._members.setdefault(member.pid, member)
        return [member for member in self._members.values() if member.is_running()]


COMMAND = tuple(python_module("penstock_cli.main"))
READY_PATH = "/readyz"
READY_SECONDS = 120.0
TRANSFER_SECONDS = 10.0
"""Between two lines about a download."""


def find_or_make(
    endpoint: ModelEndpoint, cores: int, *, store: Path, models: Path, on_line: Callable[[str], None]
) -> Path:
    """The artefact of the endpoint for this number of cores: found, or made now, with a line for each event.

    PenstockErrors as `optimise`.
    """
    # Imported here: processes that are measured with this module load no search.
    from penstock_optimizer.optimise import optimise

    def tell(progress: ProgressEvent) -> None:
        on_line(progress.message if progress.stage is Stage.DOWNLOAD else f"{progress.short}: {progress.message}")

    return optimise(
        endpoint,
        store=store,
        models=models,
        cores=cores,
        token=hugging_face_token(os.environ),
        on_progress=tell,
        on_transfer=DownloadReporter(tell, every_seconds=TRANSFER_SECONDS),
    )


def serve(
    file: Path, cores: int, *, cpus: Sequence[int], store: Path, models: Path, seconds: float = READY_SECONDS
) -> MeasuredServer:
    """Serve an artefact, or the finished artefact of an endpoint's file; ready when it returns. MeasurementFailed when
    it does not."""
    port = free_port()
    found = () if file.is_dir() else ("--store", str(store), "--models", str(models), "--no-optimize")
    words = [
        *COMMAND,
        "serve",
        str(file),
        *("--port", str(port)),
        *("--cores", str(cores)),
        *found,
        # The texts of a measurement come again: with the caches of the endpoint it would be of these.
        *("--answer-cache-bytes", "0"),
        *("--token-cache-bytes", "0"),
    ]
    server = MeasuredServer.start(OURS, words, port=port, cpus=cpus)
    try:
        server.wait_until_ready(READY_PATH, seconds=seconds)
    except BaseException:
        server.stop()
        raise
    return server
