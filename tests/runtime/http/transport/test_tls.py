"""HTTPS: real TLS clients, certificates that are replaced under load, and clients that take what they can."""

from __future__ import annotations

import asyncio
import itertools
import logging
import select
import socket
import ssl
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock_runtime.app import server
from penstock_runtime.http.transport.tls import TlsFiles, TlsLayer
from penstock_runtime.settings import Settings
from tests.runtime.http.secret_files import CERTIFICATE, KEY, Authority, publish
from tests.runtime.http.serving import Endpoint, Gate, open_connections, post, read_answer, serving, until

PROBE = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
ASK = post("/predict", b'{"inputs": "x"}')
PAGES = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2000
"""Requests whose answers no socket's buffers can hold."""
FIRST, SECOND = 1001, 1002
"""Serial numbers of certificates."""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def secret(tmp_path: Path, authority: Authority) -> Path:
    folder = tmp_path / "tls"
    publish(folder, authority.issue(FIRST), FIRST)
    return folder


@contextmanager
def https(secret: Path, *, gate_open: bool = True, **flags: Any) -> Iterator[tuple[Endpoint, Gate]]:
    gate = Gate()
    if gate_open:
        gate.open()
    with serving(gate, tls_certificate=secret / CERTIFICATE, tls_key=secret / KEY, **flags) as endpoint:
        yield endpoint, gate


def connect(endpoint: Endpoint, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(endpoint.connect(), server_hostname="127.0.0.1")


def serial(client: ssl.SSLSocket) -> int:
    der = client.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def serial_of_new_connections(endpoint: Endpoint, context: ssl.SSLContext) -> int:
    with connect(endpoint, context) as client:
        return serial(client)


class TestRequests:
    def test_a_client_that_trusts_the_authority_is_answered(self, secret: Path, authority: Authority) -> None:
        with https(secret) as (endpoint, _), httpx.Client(verify=authority.client(), base_url=endpoint.url) as client:
            answers = [client.post("/predict", json={"inputs": "x" * length}) for length in (1, 50_000, 500_000)]
            page = client.get("/")

        assert endpoint.url.startswith("https://")
        assert [one.status_code for one in answers] == [200] * 3
        assert "<html" in page.text

    def test_older_versions_than_tls_1_2_are_refused(self, secret: Path, authority: Authority) -> None:
        with https(secret) as (endpoint, _):
            context = authority.client()
            context.set_ciphers("ALL:@SECLEVEL=0")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
                connect(endpoint, context)
            found = []
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                context = authority.client()
                context.minimum_version = context.maximum_version = version
                with connect(endpoint, context) as client:
                    client.sendall(PROBE)
                    found.append((client.version(), read_answer(client)[9:12]))

        assert found == [("TLSv1.2", b"200"), ("TLSv1.3", b"200")]

    def test_plain_http_is_not_answered_and_harms_no_one(self, secret: Path, authority: Authority) -> None:
        with https(secret) as (endpoint, _):
            with endpoint.connect() as plain:
                plain.sendall(PROBE)
                received = plain.recv(1000)
                rest = plain.recv(1000)
            after = httpx.get(f"{endpoint.url}/healthz", verify=authority.client(), timeout=60)

        assert not received.startswith(b"HTTP")
        assert rest == b""
        assert after.status_code == 200

    def test_the_internal_port_stays_http(self, secret: Path) -> None:
        with https(secret, internal_port=0) as (endpoint, _):
            internal = f"http://127.0.0.1:{endpoint.server.internal_port}"
            found = [httpx.get(f"{internal}{path}", timeout=60).status_code for path in ("/readyz", "/metrics")]

        assert found == [200, 200]

    def test_requests_that_arrive_together_are_answered_in_order(self, secret: Path, authority: Authority) -> None:
        with https(secret) as (endpoint, _), connect(endpoint, authority.client()) as client:
            client.sendall(ASK + PROBE + ASK)
            found = [read_answer(client) for _ in range(3)]

        assert [one[9:12] for one in found] == [b"200"] * 3
        assert b"0.5" in found[0]

    def test_a_refused_body_is_explained_before_the_connection_ends(self, secret: Path, authority: Authority) -> None:
        with https(secret, max_body_bytes=2000) as (endpoint, _), connect(endpoint, authority.client()) as client:
            client.sendall(post("/predict", b"x" * 100_000))
            answer = read_answer(client)
            end = client.recv(1)

        assert answer[9:12] == b"413"
        assert end == b""

    def test_a_request_in_progress_is_answered_during_the_drain(self, secret: Path, authority: Authority) -> None:
        with https(secret, gate_open=False, drain_limit_seconds=120.0) as (endpoint, gate), ExitStack() as stack:
            busy, idle = (stack.enter_context(connect(endpoint, authority.client())) for _ in range(2))
            busy.sendall(ASK)
            gate.wait_for("waiting", 1)
            endpoint.stop()
            ended = idle.recv(1)
            gate.open()
            answer = read_answer(busy)
            endpoint.thread.join(60)

        assert ended == b""
        assert answer[9:12] == b"200"
        assert endpoint.cut == [0]


class TestCertificates:
    def test_a_replaced_certificate_under_load_fails_no_request_and_is_used_for_new_connections(
        self, secret: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server, "REFRESH_SECONDS", 0.05)
        context = authority.client()
        ends = threading.Event()
        statuses: list[list[int]] = [[], [], []]
        failures: list[Exception] = []

        def load(found: list[int], *, keep: bool) -> None:
            try:
                with httpx.Client(verify=context, base_url=endpoint.url, timeout=60) as client:
                    for _ in itertools.takewhile(lambda _: not ends.is_set(), range(100_000)):
                        headers = {} if keep else {"connection": "close"}
                        found.append(client.post("/predict", json={"inputs": "x"}, headers=headers).status_code)
            except httpx.HTTPError as error:
                failures.append(error)

        def more_requests(count: int) -> None:
            goals = [len(found) + count for found in statuses]
            until(lambda: bool(failures) or all(len(f) >= goal for f, goal in zip(statuses, goals, strict=True)))

        with https(secret, idle_timeout_seconds=600) as (endpoint, _), connect(endpoint, context) as old:
            threads = [
                threading.Thread(target=load, args=(found,), kwargs={"keep": number == 0})
                for number, found in enumerate(statuses)
            ]
            for thread in threads:
                thread.start()
            more_requests(20)
            publish(secret, authority.issue(SECOND), SECOND)
            until(lambda: serial_of_new_connections(endpoint, context) == SECOND)
            more_requests(20)
            ends.set()
            for thread in threads:
                thread.join(60)
            old.sendall(PROBE)
            of_old_connection = serial(old), read_answer(old)[9:12]

        assert failures == []
        assert {status for found in statuses for status in found} == {200}
        assert of_old_connection == (FIRST, b"200")

    def test_a_key_of_another_certificate_changes_nothing(
        self, secret: Path, authority: Authority, caplog: pytest.LogCaptureFixture
    ) -> None:
        files = TlsFiles(secret / CERTIFICATE, secret / KEY)
        before = files.context
        other = authority.issue(SECOND)
        publish(secret, {**authority.issue(3), KEY: other[KEY]}, 2)
        with caplog.at_level(logging.WARNING, "penstock.http"):
            files.refresh()
            files.refresh()
        refused, warnings_of_both = files.context, len(caplog.records)
        publish(secret, other, 3)
        files.refresh()

        assert refused is before
        assert warnings_of_both == 1
        assert files.context is not before

    @pytest.mark.parametrize("what", ["missing", "another key", "a key with a password", "no PEM"])
    def test_a_certificate_that_cannot_be_used_is_refused_at_start(
        self, what: str, secret: Path, authority: Authority
    ) -> None:
        content = authority.issue(SECOND)
        publish(
            secret,
            {
                "missing": {KEY: content[KEY]},
                "another key": {**content, KEY: authority.issue(3)[KEY]},
                "a key with a password": authority.issue(4, password="secret"),
                "no PEM": {**content, CERTIFICATE: "text"},
            }[what],
            2,
        )
        with pytest.raises(SettingError, match="PENSTOCK_TLS_CERTIFICATE") as caught:
            TlsFiles(secret / CERTIFICATE, secret / KEY)

        assert "kubectl create secret tls" in caught.value.remedy

    @pytest.mark.parametrize("given", ["TLS_CERTIFICATE", "TLS_KEY"])
    def test_one_file_without_the_other_is_refused(self, given: str) -> None:
        with pytest.raises(SettingError, match=f"PENSTOCK_{given} is set without"):
            Settings.load({f"PENSTOCK_{given}": "/x"})


class TestHostileClients:
    def test_connections_without_a_handshake_give_way_to_a_client(self, secret: Path, authority: Authority) -> None:
        with https(secret, max_connections=10, per_client_share=1) as (endpoint, _), ExitStack() as stack:
            silent = [
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", endpoint.server.port), source_address=("127.0.0.2", 0))
                )
                for _ in range(10)
            ]
            until(lambda: len(open_connections(endpoint)) == 10)
            with connect(endpoint, authority.client()) as client:
                client.sendall(PROBE)
                answer = read_answer(client)
            (closed, *_), _, _ = select.select(silent, [], [], 60)

            assert answer[9:12] == b"200"
            assert closed.recv(1) == b""

    def test_answers_that_a_client_does_not_read_count_as_held(self, secret: Path, authority: Authority) -> None:
        with https(secret) as (endpoint, _), connect(endpoint, authority.client()) as client:
            listener = endpoint.server._listener
            assert listener is not None
            sender = threading.Thread(target=_send_all, args=(client, PAGES))
            sender.start()
            until(lambda: listener.held_bytes > 50_000)
            client.shutdown(socket.SHUT_RDWR)
            sender.join(60)
            until(lambda: listener.held_bytes == 0)

    def test_a_client_that_reads_nothing_is_cut_off(self, secret: Path, authority: Authority) -> None:
        with https(secret, write_timeout_seconds=0.5) as (endpoint, _), connect(endpoint, authority.client()) as client:
            sender = threading.Thread(target=_send_all, args=(client, PAGES))
            sender.start()
            until(lambda: not open_connections(endpoint))
            sender.join(60)

            assert not sender.is_alive()

    @given(st.binary(max_size=2000), st.integers(0, 3))
    def test_any_bytes_instead_of_tls_reach_no_connection_and_raise_no_error(self, data: bytes, cuts: int) -> None:
        layer, _, received = _layer(_CONTEXT)
        for piece in _pieces(data, cuts):
            layer.data_received(piece)

        assert received == []

    @given(st.lists(st.binary(min_size=1, max_size=40_000), min_size=1, max_size=4), st.randoms(use_true_random=False))
    def test_data_in_any_pieces_is_received_as_it_was_sent(self, sent: list[bytes], dice: Any) -> None:
        layer, transport, received = _layer(_CONTEXT)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = _AUTHORITY.client().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")

        def deliver() -> None:
            data = outgoing.read()
            while data:
                size = dice.randint(1, 5000)
                layer.data_received(data[:size])
                data = data[size:]
            incoming.write(bytes(transport.written))
            transport.written.clear()

        for _ in range(5):
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                deliver()
        for data in sent:
            client.write(data)
            deliver()

        assert b"".join(received) == b"".join(sent)


_AUTHORITY = Authority()


def _server_context() -> ssl.SSLContext:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in _AUTHORITY.issue(FIRST).items():
            (Path(folder) / name).write_text(text)
        return TlsFiles(Path(folder) / CERTIFICATE, Path(folder) / KEY).context


_CONTEXT = _server_context()


class _Socket(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class _Receiver(asyncio.Protocol):
    def __init__(self) -> None:
        self.received: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.received.append(data)


def _layer(context: ssl.SSLContext) -> tuple[TlsLayer, _Socket, list[bytes]]:
    receiver, transport = _Receiver(), _Socket()
    layer = TlsLayer(context, receiver)
    layer.connection_made(transport)
    return layer, transport, receiver.received


def _pieces(data: bytes, cuts: int) -> list[bytes]:
    size = len(data) // (cuts + 1) + 1
    return [data[start : start + size] for start in range(0, len(data), size)]


def _send_all(client: ssl.SSLSocket, data: bytes) -> None:
    try:
        client.sendall(data)
    except OSError:  # the server has cut the connection off
        return
