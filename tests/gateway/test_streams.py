"""Streams of text generation through the gateway: time-outs, replicas that come and go, clients that leave."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx

from tests.gateway.rig import Replica, Rig
from tests.gateway.streams import chat, read_stream, streams
from tests.gateway.text_replica import main as text_replica

STEP_SECONDS = 0.02
LIMIT_SECONDS = 60


def start(rig: Rig, name: str, *, seconds: float = STEP_SECONDS, **flags: Any) -> Replica:
    return rig.start(name, seconds=seconds, target=text_replica, **flags)


def running(replica: Replica) -> int:
    """Sequences that the replica generates."""
    text = httpx.get(f"http://127.0.0.1:{replica.port}/metrics", trust_env=False, verify=False).text
    found = re.search(r'^penstock_sequences\{state="running"\} (\S+)$', text, re.MULTILINE)
    assert found, text
    return int(float(found[1]))


def until_running(replica: Replica, count: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while (now := running(replica)) != count:
        assert time.monotonic() < deadline, f"{now} sequences run, not {count}"
        time.sleep(0.02)


def test_a_stream_may_take_longer_than_the_time_for_an_answer(rig: Rig) -> None:
    start(rig, "a", seconds=0.05)
    gateway = rig.gateway(answer_seconds=4, hold_seconds=1)
    gateway.until("replicas", 1)
    began = time.monotonic()
    with httpx.Client(trust_env=False, verify=False, timeout=LIMIT_SECONDS) as client:
        found = read_stream(client, gateway.url, chat(100))
    assert found.problem == ""
    assert (found.generated, found.finish_reason) == (100, "length")
    assert time.monotonic() - began > 4


def test_replicas_come_and_go_under_streams_and_none_is_broken(rig: Rig) -> None:
    first = start(rig, "a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    with streams(gateway.url, tokens=40) as load:
        load.more(4)
        second = start(rig, "b")
        gateway.until("replicas", 2)
        load.more(8)
        # On a busy machine the new replica's first streams end after later ones of the other replica.
        deadline = time.monotonic() + 60
        while not second.answered():
            assert time.monotonic() < deadline, "the new replica gets no streams"
            load.more(1)

        # Scale-down: the pod is terminating, its readiness is false, and it gets SIGTERM.
        rig.announce(ending=("a",))
        first.terminate()
        first.wait()
        rig.announce(without=("a",))
        gateway.until("replicas", 1)
        load.more(8)

        # A rollout: a new pod first, then the end of the old one.
        start(rig, "c", announce=False)
        rig.announce(without=("a",))
        gateway.until("replicas", 2)
        rig.announce(ending=("b",), without=("a",))
        second.terminate()
        second.wait()
        rig.announce(without=("a", "b"))
        load.more(8)
    assert load.failures == []


def test_a_replica_ends_streams_with_a_reason_at_the_limit_of_its_drain(rig: Rig) -> None:
    replica = start(rig, "a", drain_limit_seconds=3.0)
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    with (
        httpx.Client(trust_env=False, verify=False, timeout=LIMIT_SECONDS) as client,
        client.stream("POST", f"{gateway.url}/v1/chat/completions", json=chat(1900)) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        rig.announce(ending=("a",))
        replica.terminate()
        rest = list(lines)
    assert '"code":"not_ready"' in rest[-2].replace(" ", "")
    assert rest[-1] == "data: [DONE]"
    replica.wait()


def test_a_gateway_that_ends_finishes_its_streams(rig: Rig) -> None:
    start(rig, "a")
    gateway = rig.gateway(drain_seconds=0)
    gateway.until("replicas", 1)
    with (
        httpx.Client(trust_env=False, verify=False, timeout=LIMIT_SECONDS) as client,
        client.stream("POST", f"{gateway.url}/v1/chat/completions", json=chat(60)) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        gateway.terminate()
        assert list(lines)[-1] == "data: [DONE]"
    assert gateway.process.wait(LIMIT_SECONDS) == 0


def test_a_client_that_leaves_ends_the_generation_at_the_replica(rig: Rig) -> None:
    replica = start(rig, "a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    with (
        httpx.Client(trust_env=False, verify=False, timeout=LIMIT_SECONDS) as client,
        client.stream("POST", f"{gateway.url}/v1/chat/completions", json=chat(1900)) as response,
    ):
        lines = (line for line in response.iter_lines() if line)  # httpx disconnects when these are forgotten
        assert next(lines).startswith("data: ")
        until_running(replica, 1)  # the stream begins before the generation
    until_running(replica, 0)
    assert gateway.process.poll() is None
