"""HTTP/1.1 on real sockets: framing, order, limits, deadlines, and clients that misbehave or disconnect."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.runtime.http.serving import (
    Endpoint,
    Gate,
    exchange,
    open_connections,
    post,
    read_answer,
    serving,
    until,
    wait_for_sample,
)

GOOD = b'{"inputs": "a text"}'


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    """Answers at once."""
    gate = Gate()
    gate.open()
    with serving(gate, max_body_bytes=2000, max_header_bytes=2048) as running:
        yield running


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_type(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error_type"])


def header(answer: bytes, name: bytes) -> bytes | None:
    head = answer.partition(b"\r\n\r\n")[0]
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b": ")
        if key == name:
            return value
    return None


def is_closed(client: socket.socket) -> bool:
    return client.recv(1) == b""


class TestFraming:
    """The boundaries of requests."""

    def test_a_body_may_arrive_byte_by_byte(self, endpoint: Endpoint) -> None:
        with endpoint.connect() as client:
            for byte in post("/predict", GOOD):
                client.send(bytes([byte]))
            answer = read_answer(client)

        assert status(answer) == 200

    def test_a_chunked_body_is_put_together(self, endpoint: Endpoint) -> None:
        head = b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (GOOD[:3], GOOD[3:10], GOOD[10:]))

        (answer,) = exchange(endpoint, head + chunks + b"0\r\nx-trailer: ignored\r\n\r\n")

        assert status(answer) == 200

    def test_pipelined_requests_are_answered_in_order(self, endpoint: Endpoint) -> None:
        requests = b"".join(post("/predict", GOOD, f"x-request-id: {number}") for number in range(40))

        answers = exchange(endpoint, requests, answers=40)

        assert [header(answer, b"x-request-id") for answer in answers] == [b"%d" % number for number in range(40)]

    def test_any_number_of_requests_behind_a_slow_one_are_answered_in_order(self) -> None:
        gate = Gate()
        health = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-request-id: %d\r\n\r\n"
        with serving(gate) as endpoint, endpoint.connect() as client:
            # Far more than Python would nest.
            client.sendall(post("/predict", GOOD) + b"".join(health % number for number in range(3000)))
            gate.wait_for("waiting", 1)
            gate.open()

            assert b"[[0.5]]" in read_answer(client)
            for number in range(3000):
                assert header(read_answer(client), b"x-request-id") == b"%d" % number
            client.sendall(post("/predict", GOOD))
            assert status(read_answer(client)) == 200

    def test_a_pipelined_request_behind_a_slow_one_waits(self) -> None:
        gate = Gate()
        with serving(gate) as endpoint, endpoint.connect() as client:
            client.sendall(post("/predict", GOOD) + b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            gate.wait_for("waiting", 1)
            gate.open()

            assert b"[[0.5]]" in read_answer(client)
            assert read_answer(client).endswith(b"ok\n")

    def test_a_body_sent_ahead_of_a_slow_answer_is_read(self) -> None:
        gate = Gate()
        with serving(gate) as endpoint, endpoint.connect() as client:
            second = post("/predict", GOOD, "x-request-id: second")
            client.sendall(post("/predict", GOOD) + second[:-5])
            gate.wait_for("waiting", 1)
            gate.open()
            assert b"[[0.5]]" in read_answer(client)
            client.sendall(second[-5:])

            assert header(read_answer(client), b"x-request-id") == b"second"

    def test_a_connection_is_kept_for_the_next_request(self, endpoint: Endpoint) -> None:
        with endpoint.connect() as client:
            for _ in range(3):
                client.sendall(post("/predict", GOOD))
                assert status(read_answer(client)) == 200

    def test_each_request_of_a_connection_has_its_own_id(self, endpoint: Endpoint) -> None:
        given = [None, None, None, b"a", b"b", b"b", None, None]
        found = []
        with endpoint.connect() as client:
            for one in given:
                client.sendall(post("/predict", GOOD, *([] if one is None else [f"x-request-id: {one.decode()}"])))
                found.append(header(read_answer(client), b"x-request-id"))

        assert [one for one, own in zip(found, given, strict=True) if own is not None] == [b"a", b"b", b"b"]
        assert len({*found} - {None}) == 2 + given.count(None)

    @pytest.mark.parametrize("headers", [("connection: close",), ("Connection: Close",)])
    def test_a_connection_is_closed_when_asked_for(self, endpoint: Endpoint, headers: tuple[str, ...]) -> None:
        with endpoint.connect() as client:
            client.sendall(post("/predict", GOOD, *headers))
            answer = read_answer(client)

            assert header(answer, b"connection") == b"close"
            assert is_closed(client)

    def test_http_1_0_is_closed_unless_it_asks_to_be_kept(self, endpoint: Endpoint) -> None:
        with endpoint.connect() as client:
            for asked in (b"keep-alive", b"Keep-Alive, TE"):
                client.sendall(b"GET /healthz HTTP/1.0\r\nconnection: %b\r\n\r\n" % asked)
                assert header(read_answer(client), b"connection") == b"keep-alive"
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert header(read_answer(client), b"connection") == b"close"
            assert is_closed(client)

    def test_head_has_the_length_and_no_body(self, endpoint: Endpoint) -> None:
        with endpoint.connect() as client:
            client.sendall(b"HEAD /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            both = b""
            while not both.endswith(b"ok\n"):
                both += client.recv(1000)

        assert both.count(b"content-length: 3\r\n") == 2
        assert both.count(b"ok\n") == 1

    @pytest.mark.parametrize(
        ("head", "code"),
        [
            pytest.param(b"HEAD / HTTP/1.1\r\n\r\n", 400, id="no host"),
            pytest.param(b"HEAD / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", 413, id="a large body"),
        ],
    )
    def test_head_that_is_refused_has_no_body_either(self, endpoint: Endpoint, head: bytes, code: int) -> None:
        with endpoint.connect() as client:
            client.sendall(head)
            client.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: client.recv(1000), b""))

        assert status(answer) == code
        assert header(answer, b"content-length") not in {None, b"0"}
        assert answer.endswith(b"\r\n\r\n")
        assert answer.count(b"\r\n\r\n") == 1

    @pytest.mark.parametrize("method", ["OPTIONS", "POST"])
    def test_expect_100_continue_is_answered_behind_another_request(self, method: str) -> None:
        gate = Gate()
        with serving(gate) as endpoint, endpoint.connect() as client:
            client.sendall(post("/predict", GOOD))
            gate.wait_for("waiting", 1)
            head = (
                f"{method} /predict HTTP/1.1\r\nhost: x\r\ncontent-length: {len(GOOD)}\r\nexpect: 100-continue\r\n\r\n"
            )
            client.sendall(head.encode())
            gate.open()

            assert status(read_answer(client)) == 200
            assert read_answer(client) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(GOOD)
            assert status(read_answer(client)) in {200, 204}

    def test_expect_100_continue_is_answered_before_the_body(self, endpoint: Endpoint) -> None:
        whole = post("/predict", GOOD, "expect: 100-continue")
        head = whole[: -len(GOOD)]
        with endpoint.connect() as client:
            client.sendall(head)
            assert read_answer(client) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(GOOD)

            assert status(read_answer(client)) == 200

    def test_expect_100_continue_is_refused_without_the_body(self, endpoint: Endpoint) -> None:
        head = b"POST /predict HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9000000\r\n\r\n"

        (answer,) = exchange(endpoint, head)

        assert status(answer) == 413

    @pytest.mark.parametrize("framing", ["content-length", "chunked"])
    def test_an_offered_upgrade_is_ignored(self, endpoint: Endpoint, framing: str) -> None:
        offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAABAAMAAABk")
        whole = post("/predict", GOOD, *offer)
        if framing == "chunked":
            whole = whole.replace(b"content-length: %d" % len(GOOD), b"transfer-encoding: chunked")
            whole = whole.replace(GOOD, b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD))

        answers = exchange(endpoint, whole + b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", answers=2)

        assert [status(answer) for answer in answers] == [200, 200]

    def test_an_offered_upgrade_without_a_body_is_ignored(self, endpoint: Endpoint) -> None:
        get = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"

        answers = exchange(endpoint, get + get, answers=2)

        assert [status(answer) for answer in answers] == [200, 200]

    def test_an_absolute_target_is_a_path(self, endpoint: Endpoint) -> None:
        (answer,) = exchange(endpoint, b"GET http://example.org/healthz?x=1 HTTP/1.1\r\nhost: example.org\r\n\r\n")

        assert status(answer) == 200


class TestLimits:
    """Requests that are refused for their size or form, without being read."""

    def test_a_declared_body_over_the_limit_is_refused_at_once(self, endpoint: Endpoint) -> None:
        with endpoint.connect() as client:
            client.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n")
            answer = read_answer(client)

            assert status(answer) == 413
            assert error_type(answer) == "too_large"
            assert is_closed(client)

    @pytest.mark.parametrize("requests_before", [1, 2])
    def test_a_body_over_the_limit_is_refused_behind_others_too(self, endpoint: Endpoint, requests_before: int) -> None:
        with endpoint.connect() as client:
            for body in [GOOD] * requests_before + [b"x" * 2001]:
                client.sendall(post("/predict", body))
                answer = read_answer(client)

            assert (status(answer), error_type(answer)) == (413, "too_large")
            assert header(answer, b"connection") == b"close"
            client.shutdown(socket.SHUT_WR)
            assert is_closed(client)

    def test_a_client_that_sends_all_of_it_first_still_gets_the_answer(self, endpoint: Endpoint) -> None:
        (answer,) = exchange(endpoint, post("/predict", b"x" * 10_000_000))

        assert status(answer) == 413

    def test_a_chunked_body_is_refused_when_it_grows_over_the_limit(self, endpoint: Endpoint) -> None:
        head = b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

        (answer,) = exchange(endpoint, head + b"3e8\r\n%b\r\n" % (b"x" * 1000) * 3)

        assert status(answer) == 413

    def test_a_small_body_of_a_refused_request_keeps_the_connection(self, endpoint: Endpoint) -> None:
        answers = exchange(endpoint, post("/nowhere", GOOD) + post("/predict", GOOD), answers=2)

        assert [status(answer) for answer in answers] == [404, 200]

    @pytest.mark.parametrize(
        "head",
        [
            b"GET /healthz HTTP/1.1\r\nx-large: " + b"x" * 5000 + b"\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\n" + b"x-many: 1\r\n" * 500 + b"\r\n",
            b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nx-endless: " + b"x" * 200_000,
        ],
        ids=["one large header", "many headers", "a long target", "a header without end"],
    )
    def test_headers_over_the_limit(self, endpoint: Endpoint, head: bytes) -> None:
        with endpoint.connect() as client:
            # In pieces: a request line or header that never ends must be noticed before it does.
            for start in range(0, len(head), 1024):
                client.sendall(head[start : start + 1024])
            answer = read_answer(client)

        assert status(answer) == 431
        assert header(answer, b"connection") == b"close"

    @pytest.mark.parametrize(
        "data",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"nonsense\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /predict HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
            b"POST /predict HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
            b"POST /predict HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nbad header: x\r\n\r\n",
            b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\n\r\n",
        ],
        ids=["TLS", "HTTP/2", "nonsense", "version", "negative", "two lengths", "smuggling", "header", "CONNECT"],
    )
    def test_invalid_http_is_refused_and_the_connection_is_closed(self, endpoint: Endpoint, data: bytes) -> None:
        with endpoint.connect() as client:
            client.sendall(data)
            answer = read_answer(client)

            assert status(answer) in {400, 405}
            client.shutdown(socket.SHUT_WR)
            assert is_closed(client)

    @pytest.mark.parametrize(
        ("data", "remedy"),
        [
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "Speak HTTP/1.1, not TLS"),
            (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef", "Speak HTTP/1.1"),
        ],
        ids=["TLS", "two lengths"],
    )
    def test_the_error_for_tls_is_only_for_tls_clients(self, endpoint: Endpoint, data: bytes, remedy: str) -> None:
        (answer,) = exchange(endpoint, data)

        assert json.loads(answer.partition(b"\r\n\r\n")[2])["remedy"] == remedy

    @pytest.mark.parametrize(
        ("wrong", "code"),
        [
            (b"nonsense\r\n\r\n", 400),
            (b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-endless: " + b"x" * 20_000, 431),
            (b"GET /healthz HTTP/1.1\r\n" + b"x-many: 1\r\n" * 5_000, 431),
            (post("/predict", b"x" * 10_000), 413),
        ],
        ids=["nonsense", "a header without end", "headers without end", "too large"],
    )
    def test_an_invalid_request_behind_valid_ones_is_answered_after_them(self, wrong: bytes, code: int) -> None:
        gate = Gate()
        with serving(gate, max_body_bytes=2000, max_header_bytes=2048) as endpoint, endpoint.connect() as client:
            client.sendall(post("/predict", GOOD) * 3)
            gate.wait_for("waiting", 1)
            for start in range(0, len(wrong), 1024):
                client.sendall(wrong[start : start + 1024])
            gate.open()
            answers = [read_answer(client) for _ in range(4)]

            assert [status(answer) for answer in answers] == [200, 200, 200, code]
            assert [header(answer, b"connection") for answer in answers] == [None, None, None, b"close"]
            client.shutdown(socket.SHUT_WR)
            assert is_closed(client)

    @pytest.mark.parametrize("piece", [b"x" * 1024, b"x-trailer: 1\r\n" * 80], ids=["one", "many"])
    def test_trailers_without_end_are_refused(self, endpoint: Endpoint, piece: bytes) -> None:
        head = b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        with endpoint.connect() as client:
            client.sendall(head + b"%x\r\n%b\r\n" % (len(GOOD), GOOD) + b"0\r\nx-first: ")
            for _ in range(20):
                client.sendall(piece)
            answer = read_answer(client)

        assert status(answer) == 431
        assert header(answer, b"connection") == b"close"

    @pytest.mark.parametrize(
        ("head", "about"),
        [
            (b"GET /healthz HTTP/1.1\r\n\r\n", "no host"),
            (b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", "more than one host"),
            (b"GET /healthz HTTP/2.0\r\nhost: a\r\n\r\n", "this is HTTP/2.0"),
            (
                b"POST /predict HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
                "the transfer-encoding is 'gzip, chunked'",
            ),
            (
                b"POST /predict HTTP/1.0\r\nconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n",
                "HTTP/1.0 has no transfer-encoding",
            ),
        ],
        ids=["no host", "two hosts", "version", "coding", "chunks of HTTP/1.0"],
    )
    def test_requests_that_rfc_9112_forbids_are_refused(self, endpoint: Endpoint, head: bytes, about: str) -> None:
        (answer,) = exchange(endpoint, head)

        assert (status(answer), error_type(answer)) == (400, "bad_request")
        assert about in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]

    def test_connections_over_the_limit_get_an_error(self) -> None:
        gate = Gate()
        with serving(gate, max_connections=1) as endpoint, endpoint.connect() as first:
            first.sendall(post("/predict", GOOD))
            gate.wait_for("waiting", 1)
            with endpoint.connect() as second:
                answer = read_answer(second)

            assert status(answer) == 503
            assert header(answer, b"retry-after") == b"1"
            gate.open()
            assert status(read_answer(first)) == 200
            first.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert status(read_answer(first)) == 200

    def test_bodies_of_all_connections_together_are_bounded(self) -> None:
        gate = Gate()
        body = b'"' + b"x" * 2000 + b'"'
        with serving(gate, max_held_bytes=5000) as endpoint:
            first, second = endpoint.connect(), endpoint.connect()
            with first, second:
                for number, client in enumerate((first, second), start=1):
                    client.sendall(post("/predict", body))
                    gate.wait_for("waiting", number)
                (refused,) = exchange(endpoint, post("/predict", body))
                gate.open()
                answers = [read_answer(client) for client in (first, second)]
            (later,) = exchange(endpoint, post("/predict", body))

        assert status(refused) == 429
        assert error_type(refused) == "overloaded"
        assert [status(answer) for answer in (*answers, later)] == [200, 200, 200]

    def test_a_refused_request_holds_no_memory_while_its_connection_is_open(self) -> None:
        gate = Gate()
        body = b'"' + b"x" * 2000 + b'"'
        with serving(gate, max_held_bytes=5000) as endpoint, ExitStack() as stack:
            first, *others = [stack.enter_context(endpoint.connect()) for _ in range(4)]
            first.sendall(post("/predict", b'"' + b"x" * 4000 + b'"'))
            gate.wait_for("waiting", 1)
            for client in others:
                client.sendall(post("/predict", body))
            refused = [read_answer(client) for client in others]
            gate.open()
            answers = [read_answer(first), *exchange(endpoint, post("/predict", body))]

        assert [status(answer) for answer in refused] == [429, 429, 429]
        assert [status(answer) for answer in answers] == [200, 200]


class TestDeadlines:
    """Clients that are too slow."""

    @pytest.mark.parametrize(
        ("sent", "setting"),
        [(b"GET /healthz HT", "header_timeout_seconds"), (post("/predict", GOOD)[:-4], "body_timeout_seconds")],
        ids=["headers", "body"],
    )
    def test_an_incomplete_request_gets_a_timeout_error(self, sent: bytes, setting: str) -> None:
        flags: Any = {setting: 1.0}
        with serving(Gate(), **flags) as endpoint, endpoint.connect() as client:
            client.sendall(sent)
            answer = read_answer(client)

            assert status(answer) == 408
            assert error_type(answer) == "timeout"
            client.shutdown(socket.SHUT_WR)
            assert is_closed(client)

    def test_an_idle_connection_is_closed_without_a_response(self) -> None:
        with serving(Gate(), idle_timeout_seconds=0.1) as endpoint, endpoint.connect() as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            read_answer(client)

            assert is_closed(client)

    def test_a_connection_that_sends_nothing_is_closed_without_a_response(self) -> None:
        with serving(Gate(), idle_timeout_seconds=0.1) as endpoint, endpoint.connect() as client:
            assert is_closed(client)

    def test_a_connection_without_its_first_request_has_the_idle_timeout(self) -> None:
        with serving(Gate(), header_timeout_seconds=0.1) as endpoint, endpoint.connect() as client:
            with endpoint.connect() as slow:
                slow.sendall(b"GET")
                assert status(read_answer(slow)) == 408  # a sweep has run, more than 0.1 s later
            client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")

            assert status(read_answer(client)) == 200

    def test_a_response_may_take_longer_than_the_connection_timeouts(self) -> None:
        gate = Gate()
        short: Any = {"header_timeout_seconds": 1.0, "body_timeout_seconds": 1.0, "idle_timeout_seconds": 1.0}
        with serving(gate, **short) as endpoint, endpoint.connect() as client:
            client.sendall(post("/predict", GOOD))
            gate.wait_for("waiting", 1)
            with endpoint.connect() as idle:
                assert is_closed(idle)  # a sweep has run, after the idle timeout of that one
            gate.open()

            assert status(read_answer(client)) == 200

    def test_a_client_that_does_not_read_is_cut_off(self) -> None:
        with serving(Gate(), write_timeout_seconds=0.1) as endpoint, endpoint.connect() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            requests = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 1_000_000

            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                client.sendall(requests)

    def test_a_client_that_reads_slowly_is_not_cut_off(self) -> None:
        # A sweep runs twice a second: some of the answer is read in each interval.
        with serving(Gate(), write_timeout_seconds=0.6) as endpoint, endpoint.connect() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400)
            client.settimeout(60)
            begin, read = time.monotonic(), 0
            while time.monotonic() - begin < 4:
                read += len(client.recv(65536))
                time.sleep(0.02)

            assert read > 0
            assert client.recv(65536)

    def test_unread_answers_count_for_the_memory_limit(self) -> None:
        gate = Gate()
        gate.open()
        large = post("/predict", b'"' + b"x" * 90_000 + b'"')
        with serving(gate, max_held_bytes=100_000, per_client_share=1) as endpoint, endpoint.connect() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400)
            listener = endpoint.server._listener
            assert listener is not None
            until(lambda: listener.held_bytes > 20_000)
            (answer,) = exchange(endpoint, large)

            assert status(answer) == 200  # the connection that does not read was closed for it
            until(lambda: not listener.connections)


class TestAnswersThatAreNotRead:
    """The size of an unread answer that fits into the transport's buffer: no event shows that the client is stuck."""

    def connect(self, endpoint: Endpoint) -> socket.socket:
        """A client with such an unread answer."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", endpoint.server.port))
        listener = endpoint.server._listener
        assert listener is not None
        until(lambda: bool(listener.connections))
        (connection,) = open_connections(endpoint)
        transport = connection.transport
        assert transport is not None
        # The default is 64 KB, which a single answer may exceed at once.
        transport.set_write_buffer_limits(high=2**24)

        def is_stuck() -> bool:
            # Twice the size: the bytes just written count for a moment as well.
            sizes = []
            for _ in range(2):
                sizes.append(transport.get_write_buffer_size())
                time.sleep(0.01)
            return all(sizes)

        while not is_stuck():
            client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 50)
        assert connection.writable
        return client

    def test_the_client_is_cut_off_once_it_has_been_idle(self) -> None:
        with serving(Gate(), idle_timeout_seconds=2.0, write_timeout_seconds=0.1) as endpoint, self.connect(endpoint):
            listener = endpoint.server._listener
            assert listener is not None
            until(lambda: listener.held_bytes > 0)
            until(lambda: not listener.connections)

            assert listener.held_bytes == 0

    def test_a_client_that_closes_its_side_is_cut_off_too_and_its_request_is_cancelled(self) -> None:
        gate = Gate()
        with serving(gate, write_timeout_seconds=0.1) as endpoint, self.connect(endpoint) as client:
            listener = endpoint.server._listener
            assert listener is not None
            client.sendall(post("/predict", GOOD))
            gate.wait_for("waiting", 1)
            client.shutdown(socket.SHUT_WR)

            gate.wait_for("cancelled", 1)
            until(lambda: not listener.connections)

    def test_an_unread_answer_is_cut_off_in_time_while_the_server_drains(self) -> None:
        with serving(Gate(), drain_limit_seconds=60.0, write_timeout_seconds=0.1) as endpoint, self.connect(endpoint):
            endpoint.stop()
            endpoint.thread.join(50)

            assert endpoint.cut == [0]


class TestClientsThatLeave:
    """Requests of disconnected clients are not run."""

    def test_a_closed_connection_cancels_its_request(self) -> None:
        gate = Gate()
        with serving(gate) as endpoint:
            with endpoint.connect() as client:
                client.sendall(post("/predict", GOOD))
                gate.wait_for("waiting", 1)
            gate.wait_for("cancelled", 1)
            gate.open()
            counted = exchange(endpoint, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")[0]

        assert b'penstock_requests_total{code="499",route="/predict"} 1.0' in counted
        assert b"penstock_in_flight_requests 1.0" in counted  # this one

    @pytest.mark.parametrize("behind", [1, 50])
    def test_a_closed_connection_with_pipelined_requests_is_noticed_as_soon(self, behind: int) -> None:
        gate = Gate()
        with serving(gate) as endpoint:
            with endpoint.connect() as client:
                client.sendall(post("/predict", GOOD) * (1 + behind))
                gate.wait_for("waiting", 1)
            gate.wait_for("cancelled", 1)
            gate.open()
            counted = exchange(endpoint, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")[0]

        assert gate.counts["answered"] == 0
        assert b"penstock_in_flight_requests 1.0" in counted

    def test_queued_requests_of_a_closed_connection_are_not_counted_as_in_flight(self, endpoint: Endpoint) -> None:
        for _ in range(50):
            with endpoint.connect() as client:
                client.sendall(post("/predict", GOOD) * 3)

        wait_for_sample(endpoint.server.port, "penstock_in_flight_requests 1.0")

    def test_a_reset_connection_cancels_its_request(self) -> None:
        gate = Gate()
        with serving(gate) as endpoint:
            client = endpoint.connect()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            client.sendall(post("/predict", GOOD))
            gate.wait_for("waiting", 1)
            client.close()

            gate.wait_for("cancelled", 1)
            gate.open()
