"""An old connection closes with an answer, so that clients with persistent connections reach new replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from penstock.tasks import TaskName
from tests.gateway.balancer import balancing
from tests.gateway.load import load
from tests.runtime.http.serving import Endpoint, Gate, make_model, open_connections, post, read_answer, serving, until

AGE = 1.0


def served(endpoint: Endpoint) -> int:
    """Requests to the model that were answered."""
    return len(endpoint.model.deadlines)


def test_an_old_connection_announces_its_end_with_its_answer(tmp_path: Path) -> None:
    model = make_model(tmp_path, TaskName.FEATURE_EXTRACTION)
    request = post("/predict", b'{"inputs": "i like you"}', "content-type: application/json")
    with serving(model, connection_age_seconds=600) as endpoint, endpoint.connect() as client:
        client.sendall(request)
        first = read_answer(client)
        (connection,) = open_connections(endpoint)
        # With a maximum age of a second, a pause of the machine could make the first answer the last one.
        connection.expires = 0.0
        until(lambda: connection.expired)
        client.sendall(request)
        last = read_answer(client)
        rest = client.recv(1)

    assert first.startswith(b"HTTP/1.1 200")
    assert b"connection: close" not in first
    assert last.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in last
    assert rest == b""


def test_requests_already_sent_are_answered_before_an_old_connection_closes() -> None:
    gate = Gate()
    request = post("/predict", b'{"inputs": "x"}', "content-type: application/json")
    with serving(gate, connection_age_seconds=AGE) as endpoint, endpoint.connect() as client:
        client.sendall(request * 3)
        gate.wait_for("waiting", 1)
        (connection,) = open_connections(endpoint)
        until(lambda: connection.expired)
        gate.open()
        answers = [read_answer(client) for _ in range(3)]

    assert [b"connection: close" in answer for answer in answers] == [False, False, True]


@pytest.mark.parametrize("first", ["/predict", "/nowhere"])
def test_requests_that_arrive_in_one_segment_are_answered_before_an_old_connection_closes(
    tmp_path: Path, first: str
) -> None:
    model = make_model(tmp_path, TaskName.FEATURE_EXTRACTION)
    good = b'{"inputs": "i like you"}'
    with serving(model, connection_age_seconds=600) as endpoint, endpoint.connect() as client:
        client.sendall(post("/predict", good))
        read_answer(client)
        (connection,) = open_connections(endpoint)
        connection.expires = 0.0
        until(lambda: connection.expired)
        client.sendall(post(first, good) + post("/predict", good) * 2)
        answers = [read_answer(client) for _ in range(3)]

    assert [b"200 OK" in answer for answer in answers] == [first == "/predict", True, True]
    assert [b"connection: close" in answer for answer in answers] == [False, False, True]


def test_an_old_idle_connection_is_not_closed_by_the_server() -> None:
    with serving(Gate(), connection_age_seconds=AGE) as endpoint, endpoint.connect() as client:
        until(lambda: bool(endpoint.server._listener.connections))  # type: ignore[union-attr]
        (connection,) = open_connections(endpoint)
        until(lambda: connection.expired)
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")

        assert read_answer(client).startswith(b"HTTP/1.1 200")


def test_without_a_limit_connections_stay_open() -> None:
    with serving(Gate(), connection_age_seconds=0) as endpoint:
        assert endpoint.server._listener.expiry(5.0) == float("inf")  # type: ignore[union-attr]


def test_maximum_ages_differ_between_connections() -> None:
    with serving(Gate(), connection_age_seconds=100) as endpoint:
        ages = [endpoint.server._listener.expiry(0.0) for _ in range(200)]  # type: ignore[union-attr]

    assert min(ages) >= 75
    assert max(ages) <= 100
    assert max(ages) - min(ages) > 15


def test_clients_with_persistent_connections_reach_a_new_replica(tmp_path: Path) -> None:
    """A balancer as behind a Service: each connection goes to a random replica, and stays there."""
    with ExitStack() as stack:
        old = stack.enter_context(
            serving(make_model(tmp_path / "a", TaskName.FEATURE_EXTRACTION), connection_age_seconds=AGE)
        )
        balancer = stack.enter_context(balancing([old.server.port]))
        running = stack.enter_context(load(balancer.url, clients=8))
        running.more(100)
        new = stack.enter_context(
            serving(make_model(tmp_path / "b", TaskName.FEATURE_EXTRACTION), connection_age_seconds=AGE)
        )
        balancer.backends.append(new.server.port)
        until(lambda: served(new) > 200)
        before = served(old), served(new)
        running.more(500)
        after = served(old), served(new)
        running.end()

    share = (after[1] - before[1]) / (sum(after) - sum(before))
    assert not running.failures
    # Eight clients choose at random, again every second.
    assert 0.1 < share < 0.9


def test_without_a_maximum_age_a_new_replica_gets_no_requests(tmp_path: Path) -> None:
    """The purpose of the limit."""
    with ExitStack() as stack:
        old = stack.enter_context(
            serving(make_model(tmp_path / "a", TaskName.FEATURE_EXTRACTION), connection_age_seconds=0)
        )
        balancer = stack.enter_context(balancing([old.server.port]))
        running = stack.enter_context(load(balancer.url, clients=4))
        running.more(50)
        new = stack.enter_context(
            serving(make_model(tmp_path / "b", TaskName.FEATURE_EXTRACTION), connection_age_seconds=0)
        )
        balancer.backends.append(new.server.port)
        running.more(500)
        running.end()

    assert not running.failures
    assert served(new) == 0


async def by_httpx(url: str, least: int) -> tuple[int, list[str]]:
    """Send requests until this number of connections was closed by an answer; returns how many were, and the
    failures."""
    ends, deadline = 0, time.monotonic() + 60
    failures: list[str] = []
    limits = httpx.Limits(max_connections=4)
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=120, limits=limits) as client:

        async def work() -> None:
            nonlocal ends
            while ends < least and time.monotonic() < deadline:
                try:
                    answer = await client.post(f"{url}/predict", json={"inputs": "x"})
                except httpx.HTTPError as error:
                    failures.append(repr(error))
                    continue
                ends += answer.headers.get("connection") == "close"
                if answer.status_code != 200:
                    failures.append(answer.text)

        await asyncio.gather(*(work() for _ in range(8)))
    return ends, failures


async def by_aiohttp(url: str, least: int) -> tuple[int, list[str]]:
    """The same."""
    ends, deadline = 0, time.monotonic() + 60
    failures: list[str] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=4), trust_env=False) as client:

        async def work() -> None:
            nonlocal ends
            while ends < least and time.monotonic() < deadline:
                try:
                    async with client.post(f"{url}/predict", json={"inputs": "x"}) as answer:
                        await answer.read()
                        ends += answer.headers.get("connection") == "close"
                        if answer.status != 200:
                            failures.append(await answer.text())
                except aiohttp.ClientError as error:
                    failures.append(repr(error))

        await asyncio.gather(*(work() for _ in range(8)))
    return ends, failures


@pytest.mark.parametrize("client", [by_httpx, by_aiohttp])
def test_a_pool_of_connections_is_renewed_without_a_failed_request(
    tmp_path: Path, client: Callable[[str, int], Coroutine[Any, Any, tuple[int, list[str]]]]
) -> None:
    with serving(make_model(tmp_path, TaskName.FEATURE_EXTRACTION), connection_age_seconds=AGE) as endpoint:
        ends, failures = asyncio.run(client(endpoint.url, 12))

    assert not failures
    assert ends >= 12
