"""Builds the tools, once: binaries are kept outside the repository under a key of all that decides them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.errors import BedError
from testbed.tools import Tool, content_key, oldest_go

CACHE = Path.home() / ".cache" / "penstock" / "testbed"
REPORT_SECONDS = 20.0
"""Seconds between lines of progress where the output is no terminal."""

Say = Callable[[str], None]


def say(text: str) -> None:
    """The default way of reporting: standard error, which pytest shows with a failed set-up."""
    print(text, file=sys.stderr, flush=True)


def binary(tool: Tool, *, report: Say = say) -> Path:
    """The tool's binary, built if it is not cached.

    The folder that it lies in has its other names, too, and nothing else: it can go into PATH.

    Raises BedError without Go, or when the build fails.
    """
    folder = CACHE / f"{tool.name}-{content_key(tool, go_version=_go_version(tool), platform=_platform())}"
    if not (folder / tool.name).is_file():
        with _only_one(folder):
            if not (folder / tool.name).is_file():
                _build(tool, folder, report)
    return folder / tool.name


def is_built(tool: Tool) -> bool:
    """True when `binary` would return at once."""
    key = content_key(tool, go_version=_go_version(tool), platform=_platform())
    return (CACHE / f"{tool.name}-{key}" / tool.name).is_file()


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Several test processes want the same binary at the same time: one builds, the rest wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _go(tool: Tool, *arguments: str) -> str:
    if shutil.which("go") is None:
        raise BedError(
            f"{tool.name} has to be built from its Go module, and there is no Go here",
            remedy=f"install Go {oldest_go(tool.source)} or later (https://go.dev/dl), or use a cluster that you have: "
            "PENSTOCK_TEST_KUBECONFIG=/path/to/kubeconfig (kind gives one: kind create cluster)",
        )
    result = subprocess.run(
        ["go", *arguments], cwd=tool.source, env=_environment(), capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise BedError(
            f"go {' '.join(arguments)} failed in {tool.source}:\n{result.stderr[-2000:].strip()}\n",
            remedy="Modules come from the Go proxy (`go env GOPROXY`): see that it can be reached",
        )
    return result.stdout.strip()


def _go_version(tool: Tool) -> str:
    version, oldest = _go(tool, "env", "GOVERSION"), oldest_go(tool.source)
    if _parts(version.removeprefix("go").split(" ")[0].split("rc")[0]) < _parts(oldest):
        raise BedError(
            f"{version} is too old for {tool.name}", remedy=f"install Go {oldest} or later (https://go.dev/dl)"
        )
    return version


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _platform() -> str:
    return f"linux/{os.uname().machine}"


def _environment() -> dict[str, str]:
    """Static binaries by the Go that is here, whatever flags the caller is used to; caches and proxies are his."""
    return {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}


def _build(tool: Tool, folder: Path, report: Say) -> None:
    report(f"building {tool.name} from its Go module: some {tool.cold_minutes:g} minutes on two cores, once")
    started = time.monotonic()
    packages = len(_go(tool, "list", "-mod=readonly", "-deps", tool.package).splitlines())
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{tool.name}-") as temporary:
        target = Path(temporary, "bin")
        target.mkdir()
        _compile(tool, target / tool.name, _Progress(tool.name, packages, report))
        for program in tool.programs:
            (target / program).symlink_to(tool.name)
        target.rename(folder)
    size = (folder / tool.name).stat().st_size / 1e6
    report(f"built {tool.name} in {_clock(time.monotonic() - started)} ({size:.0f} MB, kept in {folder})")


def _compile(tool: Tool, output: Path, progress: _Progress) -> None:
    with subprocess.Popen(
        ["go", "build", "-v", *tool.flags(), "-o", str(output), tool.package],
        cwd=tool.source,
        env=_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        complaints = [line for line in process.stderr or () if not progress.counts(line)]
    progress.end()
    if process.returncode != 0:
        raise BedError(
            f"{tool.name} could not be built in {tool.source}:\n{''.join(complaints)[-2000:].strip()}\n",
            remedy="a build of Kubernetes wants some 3 GB of memory and 5 GB of disk below ~/.cache and ~/go",
        )


class _Progress:
    """Counts the packages that `go build -v` names; those that Go has cached are not named."""

    def __init__(self, name: str, packages: int, report: Say) -> None:
        self._name, self._packages, self._report = name, packages, report
        self._started = time.monotonic()
        self._done = 0
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def counts(self, line: str) -> bool:
        """Whether the line is a package's name, which it counts, and not a complaint."""
        is_package = " " not in line.strip() and not line.startswith("#")
        self._done += is_package
        return is_package or line.startswith("go: downloading")

    def end(self) -> None:
        self._over.set()
        self._ticker.join()

    def _tick(self) -> None:
        while not self._over.wait(REPORT_SECONDS):
            self._report(
                f"  {self._name}: {self._done} of at most {self._packages} packages, "
                f"{_clock(time.monotonic() - self._started)}"
            )


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
