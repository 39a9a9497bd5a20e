"""A pod whose server is killed: it is back, without a new container."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from penstock_runtime.pod.supervisor import MOST_CRASHES, WINDOW_SECONDS, may_restart
from tests.runtime.pod.pods import SECONDS, Pod, write_artefact

INPUT = {"inputs": "I like you. I love you."}


def server_of(pod: Pod) -> psutil.Process:
    """The process that serves: the only child of the first one."""
    (server,) = psutil.Process(pod.process.pid).children()
    return server


def answer(pod: Pod) -> object:
    """The answer to one text, waited for while no server listens."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            status, body = pod.ask("POST", "/predict", INPUT)
        except OSError:
            status, body = 0, None
        if status == 200:
            return body
        assert status in {0, 503}, body
        assert time.monotonic() < end, pod.output
        time.sleep(0.02)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefact") / "minilm"
    write_artefact(folder)
    return folder


def test_a_server_that_is_killed_is_started_again_until_it_crashes_too_often(artefact: Path, tmp_path: Path) -> None:
    with Pod(tmp_path, artefact=artefact) as pod:
        first = answer(pod)
        servers = []
        for crash in range(1, MOST_CRASHES + 1):
            server = server_of(pod)
            servers.append(server.pid)
            server.send_signal(signal.SIGKILL if crash == 1 else signal.SIGSEGV)
            server.wait(SECONDS)
            assert answer(pod) == first
            assert f"penstock_server_crashes_total {float(crash)}" in pod.ask("GET", "/metrics")[1]
        assert server_of(pod).pid not in servers
        crashes = re.findall(r"event=ServerCrashed reason=(\w+)", pod.output)
        assert crashes == ["SIGKILL", "SIGSEGV", "SIGSEGV"]
        server_of(pod).send_signal(signal.SIGABRT)
        assert pod.ended() == 75
        assert "SIGABRT, for the 4th time in this pod" in pod.last_words["message"]
        assert pod.last_words["reason"] == "ServerCrashed"


def test_the_first_process_forwards_signals_and_has_one_thread_and_no_port(artefact: Path, tmp_path: Path) -> None:
    with Pod(tmp_path, artefact=artefact) as pod:
        answer(pod)
        first, server = psutil.Process(pod.process.pid), server_of(pod)
        assert first.num_threads() == 1
        assert not [one for one in first.net_connections() if one.status == psutil.CONN_LISTEN]
        assert pod.end() == 0
        assert not server.is_running()
        assert "ServerCrashed" not in pod.output


def test_the_server_ends_with_the_first_process(artefact: Path, tmp_path: Path) -> None:
    with Pod(tmp_path, artefact=artefact) as pod:
        answer(pod)
        server = server_of(pod)
        os.kill(pod.process.pid, signal.SIGKILL)
        server.wait(SECONDS)


def test_crashes_count_within_a_window() -> None:
    assert may_restart([0.0], 0.0)
    assert may_restart([0.0, 1.0, 2.0], 2.0)
    assert not may_restart([0.0, 1.0, 2.0, 3.0], 3.0)
    assert may_restart([0.0, 1.0, 2.0, WINDOW_SECONDS], WINDOW_SECONDS)
    assert not may_restart([0.5, 1.0, 2.0, WINDOW_SECONDS], WINDOW_SECONDS)
