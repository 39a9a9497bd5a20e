"""Hostile clients, each from an address of its own on loopback, and one client that keeps to the limits."""

from __future__ import annotations

import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from penstock.resources.endpoint_parts.rollout import Gateway as GatewaySpec
from penstock_gateway.config import STATUS_CONNECTIONS_PER_CLIENT
from penstock_gateway.haproxy import HAProxySocket, ServerSync
from penstock_gateway.slices import ReplicaAddress
from penstock_operator.endpoint.objects.gateway import memory_bytes
from tests.gateway.rig import Crowd, Gateway, Rig, post

PROBE_SECONDS = 5.0
"""The kubelet's time-out for the probes of a gateway pod."""


@pytest.fixture
def clients() -> Iterator[Clients]:
    """Many sockets: the limit of open files is raised as far as it may be."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        with ExitStack() as stack:
            yield Clients(stack)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Clients:
    """Connections that stay open until the test ends."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def connect(self, port: int, count: int, *, address: str, data: bytes = b"") -> list[socket.socket]:
        """Connections from this address. Those that the server closes at once count as well."""
        sockets: list[socket.socket] = []
        for _ in range(count):
            client = self._stack.enter_context(socket.socket())
            client.bind((address, 0))
            # A connection that is not accepted stays in the server's backlog, or is still being made.
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(("127.0.0.1", port))
            sockets.append(client)
        if data:
            for client in sockets:
                with suppress(OSError):
                    client.settimeout(0.01)
                    client.sendall(data)
        return sockets


def open_ones(sockets: list[socket.socket]) -> int:
    """How many of the connections the server has not closed."""
    found = 0
    for client in sockets:
        client.setblocking(False)
        try:
            found += bool(client.recv(65536))
        except BlockingIOError:
            found += 1
        except OSError:
            continue
    return found


def until_open(sockets: list[socket.socket], count: int) -> None:
    """Until this number of the connections is open."""
    deadline = time.monotonic() + 60
    while (found := open_ones(sockets)) != count:
        assert time.monotonic() < deadline, f"{found} connections are open, not {count}"
        time.sleep(0.1)


def probe(gateway: Gateway) -> int:
    """The status of a probe, which must come within the kubelet's time-out."""
    return httpx.get(f"{gateway.status}/healthz", trust_env=False, verify=False, timeout=PROBE_SECONDS).status_code


def memory_of(gateway: Gateway) -> int:
    """Resident memory of the gateway's process and its HAProxy, in bytes."""
    pid = gateway.process.pid
    (haproxy,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return 1024 * sum(
        int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{one}/status").read_text())[0]) for one in (pid, haproxy)
    )


def partial_body(size: int) -> bytes:
    """A request of which `size` bytes of the body are sent, and the rest never."""
    return b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (2 * size, b"x" * size)


def test_five_thousand_idle_connections_of_one_address_leave_room_for_probes_and_for_other_clients(
    rig: Rig, clients: Clients
) -> None:
    rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    idle = clients.connect(gateway.port, 5_000, address="127.0.0.2")

    assert probe(gateway) == 200
    assert post(gateway.url).status_code == 200
    until_open(idle, 512)
    assert probe(gateway) == 200


def test_probes_are_answered_while_all_request_connections_are_taken_from_many_addresses(
    rig: Rig, clients: Clients
) -> None:
    gateway = rig.gateway()
    for number in range(2, 13):
        clients.connect(gateway.port, 480, address=f"127.0.0.{number}")

    assert probe(gateway) == 200


@pytest.mark.parametrize("size", [36_000, 60_000])
def test_thousands_of_partial_bodies_stay_below_the_planned_memory(rig: Rig, clients: Clients, size: int) -> None:
    rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    # Three addresses within their limits, and one beyond its own.
    for number, count in ((2, 500), (3, 500), (4, 500), (5, 1_000)):
        clients.connect(gateway.port, count, address=f"127.0.0.{number}", data=partial_body(size))

    assert probe(gateway) == 200
    assert memory_of(gateway) < memory_bytes(GatewaySpec())


@pytest.mark.parametrize("size", [36_000, 100_000])
def test_partial_bodies_of_one_address_do_not_delay_other_clients(rig: Rig, clients: Clients, size: int) -> None:
    rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    clients.connect(gateway.port, 2_500, address="127.0.0.2", data=partial_body(size))

    # Without a limit the bodies over a buffer would occupy the replica until they time out, after 30 s.
    assert post(gateway.url, timeout=20).status_code == 200
    assert probe(gateway) == 200


def test_partial_bodies_of_many_addresses_leave_places_for_shorter_requests(rig: Rig, clients: Clients) -> None:
    rig.start("a")
    gateway = rig.gateway(concurrency=8)
    gateway.until("replicas", 1)
    for number in range(2, 12):
        clients.connect(gateway.port, 5, address=f"127.0.0.{number}", data=partial_body(100_000))

    # Each address may have four of the eight places, and all of them together six.
    assert post(gateway.url, timeout=20).status_code == 200
    assert probe(gateway) == 200


def test_a_chunked_body_that_does_not_end_counts_as_a_long_one(rig: Rig, clients: Clients) -> None:
    rig.start("a")
    gateway = rig.gateway(concurrency=4)
    gateway.until("replicas", 1)
    head = b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (100_000, b"x" * 100_000)
    clients.connect(gateway.port, 20, address="127.0.0.2", data=head + chunk)

    assert post(gateway.url, timeout=20).status_code == 200


def test_a_client_that_holds_all_places_gives_some_up_for_other_clients(rig: Rig, clients: Clients) -> None:
    gateway = rig.gateway(max_held=6)
    request = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n" + b'{"inputs": "a"}'
    hostile = clients.connect(gateway.port, 6, address="127.0.0.2", data=request)
    gateway.until("held_requests", 6)
    crowd = Crowd(gateway.url, 5)
    gateway.until('refused_requests_total{reason="full"}', 5)
    gateway.until("held_requests", 6)
    rig.start("a")

    # Each of the two clients has half of the places.
    assert sorted(answer.status_code for answer in crowd.finish()) == [200, 200, 200, 429, 429]
    statuses = []
    for client in hostile:
        client.settimeout(60)
        statuses.append(client.recv(65536).split()[1])
    assert sorted(statuses) == [b"200"] * 3 + [b"429"] * 3


def test_a_client_with_one_connection_does_not_wait_behind_hundreds_of_another(rig: Rig, clients: Clients) -> None:
    rig.start("a", seconds=0.05)
    gateway = rig.gateway(concurrency=1)
    gateway.until("replicas", 1)
    request = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n" + b'{"inputs": "a"}'
    hostile = clients.connect(gateway.port, 200, address="127.0.0.2", data=request)
    # At 20 requests per second the others take ten seconds.
    assert post(gateway.url).status_code == 200

    answered = 0
    for client in hostile:
        client.setblocking(False)
        with suppress(BlockingIOError):
            answered += client.recv(65536).startswith(b"HTTP/1.1 200")
    assert answered < 150


def test_hundreds_of_open_questions_for_demand_leave_room_for_probes(rig: Rig, clients: Clients) -> None:
    gateway = rig.gateway()
    question = b"GET /demand?seconds=300 HTTP/1.1\r\nhost: x\r\n\r\n"
    asking = clients.connect(gateway.status_port, 600, address="127.0.0.2", data=question)

    assert probe(gateway) == 200
    until_open(asking, STATUS_CONNECTIONS_PER_CLIENT)


def test_an_asker_that_leaves_its_question_for_demand_ends_nothing(rig: Rig, clients: Clients) -> None:
    """As the operator does at its end, after a lost lease, and when a replica is up again."""
    gateway = rig.gateway()
    question = b"GET /demand?seconds=300 HTTP/1.1\r\nhost: x\r\n\r\n"
    for one in clients.connect(gateway.status_port, 10, address="127.0.0.2", data=question):
        one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.recv(1)
        one.close()
    # HAProxy ended itself after 100,000 calls of an applet without progress: some milliseconds.
    time.sleep(2)

    assert probe(gateway) == 200
    assert gateway.process.poll() is None
    # The questions are over: they take no connections of the next askers.
    again = clients.connect(
        gateway.status_port, STATUS_CONNECTIONS_PER_CLIENT, address="127.0.0.2", data=question.replace(b"300", b"0")
    )
    for one in again:
        one.settimeout(30)
        assert one.recv(4096).startswith(b"HTTP/1.1 200")


def test_clients_that_leave_while_they_are_held_write_nothing_to_the_log(rig: Rig) -> None:
    gateway = rig.gateway()
    request = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n" + b'{"inputs": "a"}'
    with ExitStack() as stack:
        Clients(stack).connect(gateway.port, 50, address="127.0.0.2", data=request)
        gateway.until("held_requests", 50)
    gateway.until("held_requests", 0)
    rig.start("a")
    # HAProxy reports the replica as up after the clients that left.
    gateway.until_logged("is UP")

    assert "Lua" not in gateway.log.read_text()


def test_a_removed_replica_is_deleted_from_haproxy_with_one_command(rig: Rig) -> None:
    """Otherwise the command would be repeated twice a second for as long as the gateway runs."""
    rig.gateway()
    haproxy = HAProxySocket(rig.folder / "gateway-0" / "haproxy.sock")
    sent: list[str] = []

    def send(command: str) -> str:
        sent.append(command)
        return haproxy.send(command)

    sync = ServerSync(send, concurrency=1)
    sync.set_replicas({"b": ReplicaAddress("b", "127.0.0.9", 9, takes_requests=True)})
    sync.set_replicas({})
    sent.clear()
    sync.retry()

    assert sent == []
