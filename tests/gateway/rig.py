"""A gateway with real replicas behind it, all processes of this machine on loopback."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock_gateway.settings import variable
from testbed.errors import BedError
from testbed.haproxy import VERSIONS, folder_with
from testbed.ports import some_free_ports
from tests.gateway.replica import main as replica_process
from tests.gateway.slices_api import SlicesApi, serving_slices

ROOT = Path(__file__).parents[2]
PROCESSES = multiprocessing.get_context("forkserver")
"""Imports the runtime once, and forks a replica within milliseconds."""
PROCESSES.set_forkserver_preload(["pytest", "tests.gateway.replica"])


@dataclass
class Replica:
    """A process that serves."""

    name: str
    port: int
    process: BaseProcess

    def answered(self) -> int:
        """Requests to the model that it has answered."""
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", trust_env=False, verify=False).text
        found = re.search(r"^penstock_request_seconds_count\S* (\S+)$", text, re.MULTILINE)
        assert found, f"no count in {text}"
        return int(float(found.group(1)))

    def kill(self) -> None:
        """SIGKILL, as when its node is lost."""
        self.process.kill()
        self.wait()

    def terminate(self) -> None:
        """SIGTERM, as from the kubelet; it drains."""
        self.process.terminate()

    def wait(self, seconds: float = 60) -> None:
        """Wait until it has ended."""
        self.process.join(seconds)
        assert not self.process.is_alive(), f"the replica {self.name} does not end"


@dataclass
class Gateway:
    """A running gateway."""

    port: int
    status_port: int
    process: subprocess.Popen[str]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def status(self) -> str:
        return f"http://127.0.0.1:{self.status_port}"

    def metric(self, name: str) -> float:
        """The value of a metric, by its name after the prefix and with its labels."""
        text = httpx.get(f"{self.status}/metrics", trust_env=False, verify=False).text
        found = re.search(rf"^penstock_gateway_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in {text}"
        return float(found.group(1))

    def until(self, name: str, value: float, *, seconds: float = 60) -> None:
        """Wait until a metric has this value."""
        deadline = time.monotonic() + seconds
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.02)

    def until_logged(self, words: str, *, times: int = 1, seconds: float = 60) -> None:
        """Wait until these words are in its log, this number of times."""
        deadline = time.monotonic() + seconds
        while self.log.read_text().count(words) < times:
            assert time.monotonic() < deadline, f"no {words!r} in {self.log.read_text()[-4000:]}"
            time.sleep(0.02)

    def terminate(self) -> None:
        """SIGTERM, as from the kubelet."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it together with HAProxy, as at the end of a container."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@dataclass
class Rig:
    """The API, replicas and gateways of one test."""

    api: SlicesApi
    api_url: str
    folder: Path
    haproxy: Path
    """The folder of the HAProxy that gateways run."""
    replicas: dict[str, Replica] = field(default_factory=dict)
    gateways: list[Gateway] = field(default_factory=list)

    def start(
        self,
        name: str,
        *,
        seconds: float = 0.01,
        announce: bool = True,
        target: Callable[..., None] = replica_process,
        **flags: Any,
    ) -> Replica:
        """Start a replica; the API publishes it as soon as it answers. `target`: what its process runs."""
        receiver, sender = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=target, args=(seconds, flags, sender), daemon=True)
        process.start()
        sender.close()
        with receiver:
            assert receiver.poll(60), "the replica does not start"
            replica = self.replicas[name] = Replica(name, int(receiver.recv()), process)
        if announce:
            self.announce()
        return replica

    def announce(self, *, ending: tuple[str, ...] = (), without: tuple[str, ...] = (), canary_percent: int = 0) -> None:
        """The API's answer: all started replicas, except those that are ending or have ended."""
        there = {name: one.port for name, one in self.replicas.items() if name not in (*ending, *without)}
        self.api.put(there, {name: self.replicas[name].port for name in ending}, canary_percent=canary_percent)

    def gateway(self, *, wait: bool = True, ports: tuple[int, int] | None = None, **settings: Any) -> Gateway:
        """Start a gateway; with the ports of one that has ended, as its successor."""
        port, status_port = ports or some_free_ports(2)
        values = {
            "endpoint": "emotion",
            "service": "emotion-pods",
            "namespace": "default",
            "host": "127.0.0.1",
            "port": port,
            "status_port": status_port,
            "drain_seconds": 1,
            "finish_seconds": 20,
            **settings,
        }
        folder = self.folder / f"gateway-{len(self.gateways)}"
        folder.mkdir()
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.gateway.outside", self.api_url, str(folder)],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PATH": os.pathsep.join((str(self.haproxy), os.environ["PATH"])),
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'gateway'}",
                    **{variable(name): str(value) for name, value in values.items()},
                },
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        gateway = Gateway(port, status_port, process, log)
        self.gateways.append(gateway)
        if wait:
            self.until_ready(gateway)
        return gateway

    @staticmethod
    def until_ready(gateway: Gateway, *, seconds: float = 60) -> None:
        """Wait until its readiness probe succeeds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if httpx.get(f"{gateway.status}/readyz", trust_env=False, verify=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert gateway.process.poll() is None, f"the gateway has ended: {gateway.log.read_text()}"
            assert time.monotonic() < deadline, f"the gateway is not ready: {gateway.log.read_text()}"
            time.sleep(0.02)


@contextmanager
def running_rig(version: str = VERSIONS[0]) -> Iterator[Rig]:
    """A rig with this version of HAProxy; all its processes end with the block."""
    try:
        haproxy = folder_with(version)
    except BedError as error:
        pytest.fail(str(error), pytrace=False)
    # A socket's path has 107 bytes: pytest's own folders may be too deep.
    with tempfile.TemporaryDirectory(prefix="gw-") as folder, serving_slices() as (api, url):
        rig = Rig(api, url, Path(folder), haproxy)
        try:
            yield rig
        finally:
            for gateway in rig.gateways:
                # pytest shows it when the test has failed.
                print(gateway.log.read_text()[-8000:])
            for gateway in rig.gateways:
                # Its requests in progress do not matter any more.
                gateway.kill()
            for replica in rig.replicas.values():
                replica.kill()


class Crowd:
    """Concurrent requests, each from its own thread; answers in the order of their arrival."""

    def __init__(self, url: str, count: int, *, body: bytes = b'{"inputs": "i like you"}', timeout: float = 60) -> None:
        self.answers: list[httpx.Response | Exception] = []
        self._lock = threading.Lock()
        self._url, self._body, self._timeout = url, body, timeout
        self._threads = [threading.Thread(target=self._one, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _one(self) -> None:
        answer: httpx.Response | Exception
        try:
            answer = post(self._url, self._body, timeout=self._timeout)
        except httpx.HTTPError as error:
            answer = error
        with self._lock:
            self.answers.append(answer)

    def finish(self, seconds: float = 60) -> list[httpx.Response]:
        """All answers; fails if one is missing."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        errors = [answer for answer in self.answers if isinstance(answer, Exception)]
        assert not errors, errors
        assert len(self.answers) == len(self._threads), "some requests are not answered yet"
        return [answer for answer in self.answers if isinstance(answer, httpx.Response)]


@contextmanager
def sent(gateway: Gateway, body: bytes = b'{"inputs": "i like you"}') -> Iterator[None]:
    """A request whose client disconnects at the end of the block, without an answer."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as client:
        client.sendall(
            b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        yield


def post(url: str, body: bytes = b'{"inputs": "i like you"}', *, timeout: float = 60) -> httpx.Response:
    """One request on a connection of its own."""
    # Nothing is encrypted here: loading certificates would take longer than the test.
    headers = {"content-type": "application/json"}
    with httpx.Client(trust_env=False, verify=False, timeout=timeout) as client:
        return client.post(f"{url}/predict", content=body, headers=headers)
