"""An image's root file system, started by runc as a container engine does: unprivileged, with a read-only root and its
own network."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from images.archive import Archive
from images.build import Builder

USER = 65532
"""The images'."""

SECONDS = 240.0
"""No operation of these tests takes longer, even on a busy machine."""

ASK = """
import http.client, json, sys
method, path, body = json.loads(sys.stdin.read())
connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=60)
connection.request(method, path, body, {"content-type": "application/json"})
answer = connection.getresponse()
print(json.dumps([answer.status, dict(answer.getheaders()), answer.read().decode()]))
"""


@dataclass(frozen=True)
class Answer:
    """What a server in a container answered. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: Any


def ready(answer: Answer) -> bool:
    """Whether it is that of a server that is ready."""
    return answer.status == 200


def volume(path: Path) -> Path:
    """A folder that the images' user may write to."""
    path.mkdir()
    os.chown(path, USER, USER)
    return path


@dataclass(frozen=True)
class Container:
    """A started image."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    folder: Path

    @property
    def pid(self) -> int:
        """Its first process, as the machine counts them."""
        return int((self.folder / "pid").read_text())

    def read_output(self) -> str:
        """Everything that it wrote so far."""
        return self.output.read_text(errors="replace")

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """One request over its own loopback. OSError when no server listens."""
        if not (self.folder / "pid").is_file():
            raise OSError("it is not started yet")
        words = json.dumps([method, path, None if body is None else json.dumps(body)])
        run = subprocess.run(
            ["nsenter", f"--net=/proc/{self.pid}/ns/net", sys.executable, "-c", ASK],
            input=words,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        if run.returncode != 0:
            raise OSError(run.stderr.strip().splitlines()[-1])
        status, headers, text = json.loads(run.stdout)
        kind = {name.lower(): value for name, value in headers.items()}
        return Answer(status, kind, json.loads(text) if "json" in kind.get("content-type", "") else text)

    def until(self, method: str, path: str, *, is_it: Any, body: object = None) -> Answer:
        """Ask until `is_it(answer)`; fails with the container's output when it ends before, or takes too long."""
        deadline = time.monotonic() + SECONDS
        last: object = None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the container ended with status {self.process.returncode}:\n{self.read_output()[-4000:]}")
            try:
                answer = self.ask(method, path, body)
            except (OSError, subprocess.TimeoutExpired) as error:
                last = error
            else:
                last = answer
                if is_it(answer):
                    return answer
            time.sleep(0.2)
        pytest.fail(
            f"{method} {path} had no expected answer in {SECONDS:.0f} s; last: {last}\n{self.read_output()[-4000:]}"
        )

    def until_output(self, what: re.Pattern[str]) -> None:
        """Wait until it wrote this; fails with its output when it ends before, or takes too long."""
        deadline = time.monotonic() + SECONDS
        while not what.search(self.read_output()):
            if self.process.poll() is not None and not what.search(self.read_output()):
                pytest.fail(f"the container ended with status {self.process.returncode}:\n{self.read_output()[-4000:]}")
            if time.monotonic() > deadline:
                pytest.fail(f"it did not print {what.pattern!r} within {SECONDS:.0f} s:\n{self.read_output()[-4000:]}")
            time.sleep(0.2)

    def end(self) -> int:
        """SIGTERM, as `docker stop` does, and the status that it ended with."""
        if self.process.poll() is None:
            subprocess.run(["runc", "kill", self.name, "TERM"], check=True, capture_output=True)
        return self.process.wait(SECONDS)


class Engine:
    """Starts one image: its file system is mounted while the engine is open."""

    def __init__(self, archive: Archive, root: Path, folder: Path) -> None:
        self._config = archive.configuration["config"]
        self._root = root
        self._folder = folder

    @contextmanager
    def run(
        self,
        *words: str,
        mounts: Mapping[str, Path] | None = None,
        environment: Mapping[str, str] | None = None,
        entrypoint: Sequence[str] | None = None,
    ) -> Iterator[Container]:
        """`docker run --read-only -v ... IMAGE WORDS`, ended with the block.

        mounts: path in the container -> folder or file of the machine, writable where the user may write.
        entrypoint: instead of the image's.
        """
        name = f"penstock-test-{secrets.token_hex(4)}"
        folder = self._folder / name
        folder.mkdir()
        arguments = [*(entrypoint or self._config["Entrypoint"]), *words]
        (folder / "config.json").write_text(json.dumps(self._bundle(name, arguments, mounts or {}, environment or {})))
        output = folder / "output"
        with (
            output.open("wb") as stream,
            subprocess.Popen(
                ["runc", "run", "--bundle", str(folder), "--pid-file", str(folder / "pid"), name],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            ) as process,
        ):
            try:
                yield Container(name, process, output, folder)
            finally:
                subprocess.run(["runc", "delete", "--force", name], check=False, capture_output=True)

    def _bundle(
        self, name: str, words: Sequence[str], mounts: Mapping[str, Path], environment: Mapping[str, str]
    ) -> dict[str, Any]:
        user, group = (int(part) for part in self._config["User"].split(":"))
        plain = ["nosuid", "noexec", "nodev"]
        return {
            "ociVersion": "1.0.2",
            "hostname": "container",
            "process": {
                "user": {"uid": user, "gid": group},
                "args": list(words),
                "env": [*self._config["Env"], *(f"{key}={value}" for key, value in environment.items())],
                "cwd": self._config["WorkingDir"],
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "root": {"path": str(self._root), "readonly": True},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*plain, "mode=1777"]},
                {"destination": "/sys", "type": "bind", "source": "/sys", "options": ["rbind", "ro"]},
                {"destination": "/tmp", "type": "tmpfs", "source": "tmp", "options": ["nosuid", "nodev", "mode=1777"]},
                *(
                    {"destination": inside, "type": "bind", "source": str(outside), "options": ["rbind", "rw"]}
                    for inside, outside in mounts.items()
                ),
            ],
            # A container engine brings the loopback device up; runc leaves that to others.
            "hooks": {
                "createContainer": [{"path": str(shutil.which("ip")), "args": ["ip", "link", "set", "lo", "up"]}]
            },
            "linux": {
                "cgroupsPath": f"/{name}",
                "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
                "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
                "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"],
            },
        }


@contextmanager
def engine(images: Builder, archive: Archive, folder: Path) -> Iterator[Engine]:
    """Mount the image's file system. Skips the test where runc is not installed."""
    for tool in ("runc", "nsenter", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} missing: images are started with Debian's runc (apt-get install runc)")
    with images.buildah.mounted(archive.path) as root:
        yield Engine(archive, root, folder)
