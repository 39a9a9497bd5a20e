"""Clients that take what they can: connections, memory, slow bodies. Others are served all the same."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from penstock_runtime.http.transport import pool
from penstock_runtime.http.transport.connection import Connection
from penstock_runtime.http.transport.fair_reads import READS, FairReader, LimitedReads
from tests.runtime.http.serving import Endpoint, Gate, exchange, open_connections, post, read_answer, serving, until

HOSTILE = tuple(f"127.0.0.{number}" for number in range(2, 12))
"""Addresses of ten hostile clients; the good one is 127.0.0.1."""
PROBE = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
GOOD = b'{"inputs": "text"}'


def connect(endpoint: Endpoint, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.server.port), timeout=60, source_address=(address, 0))


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@contextmanager
def opened(*, gate_open: bool = True, **flags: Any) -> Iterator[tuple[Endpoint, ExitStack, Gate]]:
    gate = Gate()
    if gate_open:
        gate.open()
    with serving(gate, **flags) as endpoint, ExitStack() as stack:
        yield endpoint, stack, gate


def unfinished(length: int, sent: int) -> bytes:
    """A request without the last part of its body."""
    return post("/predict", b"x" * length)[: sent - length]


def wait_for_connections(endpoint: Endpoint, count: int) -> None:
    until(lambda: len(open_connections(endpoint)) >= count)


class TestConnections:
    """All connections are taken."""

    def test_a_new_address_gets_the_oldest_idle_connection_of_the_address_with_the_most(self) -> None:
        with opened(max_connections=20, per_client_share=1) as (endpoint, stack, _):
            many = [stack.enter_context(connect(endpoint, HOSTILE[0])) for _ in range(15)]
            few = [stack.enter_context(connect(endpoint, HOSTILE[1])) for _ in range(5)]
            wait_for_connections(endpoint, 20)
            good = [stack.enter_context(connect(endpoint)) for _ in range(3)]
            for client in good:
                client.sendall(PROBE)
            answers = [status(read_answer(client)) for client in good]
            closed = [client.recv(1) for client in many[:3]]
            for client in (*many[3:], *few):
                client.sendall(PROBE)

            assert answers == [200, 200, 200]
            assert closed == [b"", b"", b""]
            assert [status(read_answer(client)) for client in (*many[3:], *few)] == [200] * 17

    @pytest.mark.parametrize("sent", [b"GET /hea", unfinished(1000, 500)], ids=["headers", "body"])
    def test_a_new_address_gets_a_connection_that_waits_for_its_client(self, sent: bytes) -> None:
        with opened(max_connections=10, per_client_share=1) as (endpoint, stack, _):
            for _ in range(10):
                stack.enter_context(connect(endpoint, HOSTILE[0])).sendall(sent)
            until(lambda: sum(not one.is_idle for one in open_connections(endpoint)) == 10)
            (answer,) = exchange(endpoint, PROBE)

        assert status(answer) == 200

    def test_connections_with_a_request_in_progress_are_not_closed(self) -> None:
        with opened(gate_open=False, max_connections=4, per_client_share=1) as (endpoint, stack, gate):
            busy = [stack.enter_context(connect(endpoint, HOSTILE[0])) for _ in range(4)]
            for client in busy:
                client.sendall(post("/predict", GOOD))
            gate.wait_for("waiting", 4)
            (refused,) = exchange(endpoint, PROBE)
            gate.open()

            assert status(refused) == 503
            assert [status(read_answer(client)) for client in busy] == [200] * 4

    def test_an_address_with_as_many_connections_does_not_lose_one_with_half_a_request(self) -> None:
        with opened(max_connections=2, per_client_share=1) as (endpoint, stack, _):
            slow = [stack.enter_context(connect(endpoint, address)) for address in HOSTILE[:2]]
            for client in slow:
                client.sendall(PROBE[:20])
            until(lambda: sum(not one.is_idle for one in open_connections(endpoint)) == 2)
            (refused,) = exchange(endpoint, PROBE)
            for client in slow:
                client.sendall(PROBE[20:])

            assert status(refused) == 503
            assert [status(read_answer(client)) for client in slow] == [200, 200]

    def test_one_address_leaves_a_reserve(self) -> None:
        with opened(gate_open=False, max_connections=10, per_client_share=0.8) as (endpoint, stack, gate):
            busy = [stack.enter_context(connect(endpoint, HOSTILE[0])) for _ in range(8)]
            for client in busy:
                client.sendall(post("/predict", GOOD))
            gate.wait_for("waiting", 8)
            # Only now: it would have got the place of one whose request had not arrived yet.
            refused = status(read_answer(stack.enter_context(connect(endpoint, HOSTILE[0]))))
            (answer,) = exchange(endpoint, PROBE)
            gate.open()

            assert refused == 503
            assert status(answer) == 200
            assert [status(read_answer(client)) for client in busy] == [200] * 8

    def test_a_flood_of_refused_connections_is_cut_off(self) -> None:
        """Refused connections linger until their clients have read why: they must not use up open files."""
        with opened(gate_open=False, max_connections=2) as (endpoint, stack, gate):
            for _ in range(2):
                stack.enter_context(connect(endpoint)).sendall(post("/predict", GOOD))
            gate.wait_for("waiting", 1)
            most = 0
            for _ in range(pool.REFUSED_CONNECTIONS + 100):
                stack.enter_context(connect(endpoint, HOSTILE[0]))
                most = max(most, len(open_connections(endpoint)))
            gate.open()

        assert most <= 2 + pool.REFUSED_CONNECTIONS + 1


class TestBodies:
    """Bodies fill the memory for them."""

    LENGTH = 10_000

    def test_unfinished_bodies_of_others_do_not_refuse_a_request(self) -> None:
        with opened(max_held_bytes=100_000) as (endpoint, stack, _):
            for address in HOSTILE:
                for _ in range(2):
                    client = stack.enter_context(connect(endpoint, address))
                    client.sendall(unfinished(self.LENGTH, self.LENGTH - 10))
            until(lambda: endpoint.server._listener.held_bytes > 90_000)  # type: ignore[union-attr]
            answers = [status(exchange(endpoint, post("/predict", b'"' + b"x" * 5000 + b'"'))[0]) for _ in range(10)]

        assert answers == [200] * 10

    def test_the_slowest_body_of_the_address_with_the_most_gives_way(self) -> None:
        with opened(max_held_bytes=45_000, per_client_share=1) as (endpoint, stack, _):
            stalled = stack.enter_context(connect(endpoint, HOSTILE[0]))
            stalled.sendall(unfinished(self.LENGTH, 9_000))
            until(lambda: endpoint.server._listener.held_bytes > 8_000)  # type: ignore[union-attr]
            time.sleep(0.5)  # what makes it the slower one
            moving = stack.enter_context(connect(endpoint, HOSTILE[0]))
            whole = post("/predict", b'"' + b"x" * 25_000 + b'"')
            moving.sendall(whole[:-100])
            until(lambda: endpoint.server._listener.held_bytes > 33_000)  # type: ignore[union-attr]
            (answer,) = exchange(endpoint, post("/predict", b'"' + b"x" * 15_000 + b'"'))
            evicted = read_answer(stalled)
            moving.sendall(whole[-100:])

            assert status(answer) == 200
            assert status(evicted) == 429
            assert status(read_answer(moving)) == 200

    def test_one_address_leaves_a_reserve(self) -> None:
        with opened(gate_open=False, max_held_bytes=100_000, per_client_share=0.5) as (endpoint, stack, gate):
            body = b'"' + b"x" * 9_000 + b'"'
            clients = [stack.enter_context(connect(endpoint, HOSTILE[0])) for _ in range(6)]
            for number, client in enumerate(clients[:5], start=1):
                client.sendall(post("/predict", body))
                gate.wait_for("waiting", number)
            clients[5].sendall(post("/predict", body))
            refused = status(read_answer(clients[5]))
            gate.open()
            (answer,) = exchange(endpoint, post("/predict", body))

            assert refused == 429
            assert status(answer) == 200
            assert [status(read_answer(client)) for client in clients[:5]] == [200] * 5

    def test_a_body_that_stalls_is_refused_long_before_its_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pool, "UPLOAD_SECONDS", 1.0)
        with opened(body_timeout_seconds=600) as (endpoint, stack, _):
            client = stack.enter_context(connect(endpoint))
            client.sendall(unfinished(self.LENGTH, 9_000))
            answer = read_answer(client)

        assert status(answer) == 408
        assert b"less than 1000 bytes a second" in answer

    def test_a_body_that_trickles_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pool, "UPLOAD_SECONDS", 0.5)
        with opened(body_timeout_seconds=600) as (endpoint, stack, _):
            client = stack.enter_context(connect(endpoint))
            client.sendall(unfinished(self.LENGTH, 100))
            client.settimeout(0.02)
            for _ in range(1000):
                try:
                    answer = client.recv(4096)
                    break
                except TimeoutError:
                    client.sendall(b"x")

        assert status(answer) == 408

    def test_a_body_that_arrives_fast_enough_is_answered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pool, "UPLOAD_SECONDS", 0.5)
        with opened(min_upload_bytes_per_second=10) as (endpoint, stack, _):
            client = stack.enter_context(connect(endpoint))
            whole = post("/predict", b'"' + b"x" * 3000 + b'"')
            client.sendall(whole[:100])
            for start in range(100, len(whole), 100):
                time.sleep(0.05)
                client.sendall(whole[start : start + 100])

            assert status(read_answer(client)) == 200


def test_one_good_client_is_served_among_ten_hostile_ones() -> None:
    """Idle connections, headers and bodies that never end, bodies that trickle: no request fails, and no probe."""
    stop = threading.Event()

    def attack(endpoint: Endpoint, address: str, number: int) -> None:
        with ExitStack() as stack:
            clients: list[socket.socket] = []
            while not stop.is_set():
                try:
                    client = stack.enter_context(connect(endpoint, address))
                    kind = number % 4
                    client.sendall((b"", b"GET /he", unfinished(20_000, 19_000), unfinished(20_000, 1))[kind])
                    clients.append(client)
                    if kind == 3:
                        for one in clients[-20:]:
                            one.sendall(b"x")
                except OSError:  # refused or evicted
                    stop.wait(0.005)
                if len(clients) > 60:
                    clients.pop(0).close()

    with opened(internal_port=0, max_connections=100, max_held_bytes=400_000) as (endpoint, _, _):
        attackers = [
            threading.Thread(target=attack, args=(endpoint, address, number)) for number, address in enumerate(HOSTILE)
        ]
        for thread in attackers:
            thread.start()
        try:
            wait_for_connections(endpoint, 90)
            answered, probed = [], []
            internal = f"http://127.0.0.1:{endpoint.server.internal_port}"
            for _ in range(60):
                # A new connection each time: the case in which the attack hurts most.
                answered.append(httpx.post(f"{endpoint.url}/predict", content=GOOD, timeout=60).status_code)
                probed.append(httpx.get(f"{internal}/healthz", timeout=60).status_code)
        finally:
            stop.set()
            for thread in attackers:
                thread.join(60)

    assert answered == [200] * 60
    assert probed == [200] * 60


def test_addresses_of_one_ipv6_network_count_as_one_client() -> None:
    assert pool.client_key("2001:db8:1:2::1") == pool.client_key("2001:db8:1:2:ffff::7") == "2001:db8:1:2::/64"
    assert pool.client_key("2001:db8:1:3::1") != pool.client_key("2001:db8:1:2::1")
    assert pool.client_key("::ffff:192.0.2.1") == pool.client_key("192.0.2.1") == "192.0.2.1"
    assert pool.client_key("fe80::1%eth0") == "fe80::/64"
    assert pool.client_key("") == ""


def test_a_long_path_is_not_compared_with_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing it would block the event loop for milliseconds, for each request without a token."""
    compared: list[str] = []

    def closest(path: str, *_: object, **__: object) -> str:
        compared.append(path)
        return ""

    monkeypatch.setattr("penstock_runtime.http.application.closest", closest)
    with opened() as (endpoint, _, _):
        for length in (50, 101, 30_000):
            error = endpoint.server.application.router._missing("/" + "x" * (length - 1))
            assert len(error.message) < 150

    assert [len(path) for path in compared] == [50]


class TestTurns:
    """Clients that keep the event loop busy."""

    @pytest.mark.parametrize(("connections", "requests"), [(1, 1500), (300, 1)], ids=["one piece", "many connections"])
    def test_requests_that_arrive_together_do_not_delay_another_client(
        self, monkeypatch: pytest.MonkeyPatch, connections: int, requests: int
    ) -> None:
        parsed: list[str] = []
        parse = Connection.on_headers_complete

        def record(self: Connection) -> None:
            parsed.append(self.address)
            parse(self)

        monkeypatch.setattr(Connection, "on_headers_complete", record)
        with opened() as (endpoint, stack, _):
            hostile = [stack.enter_context(connect(endpoint, HOSTILE[0])) for _ in range(connections)]
            good = stack.enter_context(connect(endpoint))
            wait_for_connections(endpoint, connections + 1)
            # All data is there before the event loop reads any.
            sent = threading.Event()
            endpoint.loop.call_soon_threadsafe(sent.wait, 60)
            for client in hostile:
                client.sendall(b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n" * requests)
            good.sendall(PROBE)
            sent.set()
            assert status(read_answer(good)) == 200
            until(lambda: len(parsed) == connections * requests + 1)

        assert parsed.index("127.0.0.1") < connections * requests / 2

    def test_bytes_that_arrive_one_by_one_are_read_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = {"reads": 0, "turns": 0}
        receive, turn = Connection.data_received, LimitedReads._read_next

        def received(self: Connection, data: bytes) -> None:
            counts["reads"] += 1
            receive(self, data)

        def turned(self: LimitedReads) -> None:
            counts["turns"] += 1
            turn(self)

        monkeypatch.setattr(Connection, "data_received", received)
        monkeypatch.setattr(LimitedReads, "_read_next", turned)
        with opened() as (endpoint, stack, _):
            clients = [stack.enter_context(connect(endpoint, HOSTILE[0])) for _ in range(20)]
            for client in clients:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in post("/predict", b'{"inputs": "a text"}'):
                for client in clients:
                    client.sendall(bytes([byte]))
            answers = [status(read_answer(client)) for client in clients]

        assert answers == [200] * 20
        # Each request's first pieces, and then some in each turn.
        assert counts["reads"] <= 3 * 20 + READS * counts["turns"]

    def test_data_that_waits_for_its_turn_counts_as_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held: list[int] = []
        wait = FairReader._wait

        def record(self: FairReader, data: bytes) -> bool:
            waits = wait(self, data)
            held.append(self._pool.held_bytes)
            return waits

        monkeypatch.setattr(FairReader, "_wait", record)
        with opened(max_held_bytes=100_000) as (endpoint, stack, _):
            hostile = [stack.enter_context(connect(endpoint, HOSTILE[0])) for _ in range(10)]
            wait_for_connections(endpoint, 10)
            sent = threading.Event()
            endpoint.loop.call_soon_threadsafe(sent.wait, 60)
            for client in hostile:
                client.sendall(b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n" * 600)
            sent.set()
            until(lambda: bool(held) and endpoint.server._listener.held_bytes == 0)  # type: ignore[union-attr]
            (answer,) = exchange(endpoint, PROBE)

        assert status(answer) == 200
        assert 30_000 < max(held) <= 100_000
