"""The head cache alone: which heads are cached, and which requests are found in it."""

from __future__ import annotations

import pytest

from penstock_runtime.http.transport.message import CachedHead, Request, Response, Route
from tests.runtime.http.serving import post
from tests.runtime.http.transport.test_connection import GOOD

START = b"POST /predict HTTP/1.1\r\nhost: x\r\n"
ANOTHER = post("/predict", GOOD)


def admitted(length: bytes) -> Request:
    request = Request("POST", "/predict?a=b", {b"host": b"x", b"content-length": length})
    request.route = Route("POST", "/predict", lambda _: Response(), "", "")
    return request


def with_length(length: bytes, body: bytes) -> bytes:
    return START + b"content-length: %b\r\n\r\n" % length + body


def filled_cache() -> CachedHead:
    head = CachedHead.of(with_length(b"20", GOOD), admitted(b"20"))
    assert head is not None
    return head


@pytest.mark.parametrize(
    ("head", "length"),
    [
        pytest.param(b"POST / HTTP/1.1\nhost: x\r\ncontent-length: 3\r\n\r\n", b"3", id="a line feed"),
        pytest.param(b"POST / HTTP/1.1\r\ncontent-length: 3\n\r\nabc\r\n\r\n", b"3", id="an end before the end"),
        pytest.param(START + b"content-length: 3\r\n", b"3", id="no end"),
        pytest.param(START + b"\r\n", b"3", id="no line of it"),
        pytest.param(START + b"content-length:\r\n3\r\n\r\n", b"3", id="a line of its own"),
        pytest.param(START + b"content-length: 3\r\ncontent-length: 3\r\n\r\n", b"3, 3", id="two lines of it"),
        pytest.param(START + b"content-length: 3, 3\r\n\r\n", b"3, 3", id="two lengths"),
        pytest.param(START + b"content-length: +3\r\n\r\n", b"+3", id="a sign"),
        pytest.param(START + b"content-length: 33\r\n\r\n", b"3", id="another length"),
    ],
)
def test_a_head_that_other_parsers_might_read_differently_is_not_cached(head: bytes, length: bytes) -> None:
    assert CachedHead.of(head, admitted(length)) is None


def test_a_head_with_a_length_and_chunks_is_not_cached() -> None:
    request = admitted(b"20")
    request.headers[b"transfer-encoding"] = b"chunked"

    assert CachedHead.of(with_length(b"20", GOOD), request) is None


@pytest.mark.parametrize(
    "lines",
    [
        b"a: content-length: <alike>\r\ncontent-length: <length>\r\n",
        b"a: <alike>\r\ncontent-length:<length>\r\n",
        b"x-content-length: <alike>\r\nContent-Length: <length>\r\n",
        b"content-length: <length>\r\na: content-length: <alike>\r\n",
        b"content-length: <length>\r\ncontent-length-2: <alike>\r\n",
        b"content-length: \t<length>\r\na: <alike>\r\n",
    ],
)
def test_only_the_content_length_may_differ(lines: bytes) -> None:
    def request(length: bytes, alike: bytes, body: bytes) -> bytes:
        return START + lines.replace(b"<length>", length).replace(b"<alike>", alike) + b"\r\n" + body

    head = CachedHead.of(request(b"3", b"3", b'"x"'), admitted(b"3"))

    assert head is not None
    read = head.read(request(b"4", b"3", b'"xy"'))
    assert read is not None
    assert read[1] == b'"xy"'
    for length, body in ((b"3", b'"x"'), (b"3", b'"xy"'), (b"4", b'"xy"')):
        assert head.read(request(length, b"4", body)) is None


@pytest.mark.parametrize(
    ("length", "body"),
    [
        (b"20", GOOD),
        (b"3", b'"x"'),
        (b"100000", b"x" * 100_000),
        (b"0003", b'"x"'),
        (b"000000000003", b'"x"'),
        (b"4", b"\r\n\r\n"),
        (b"%d" % len(ANOTHER), ANOTHER),
    ],
)
def test_a_request_with_another_content_length_is_found_in_the_cache(length: bytes, body: bytes) -> None:
    read = filled_cache().read(with_length(length, body))

    assert read is not None
    request, found = read
    assert found == body
    assert request.headers == {b"host": b"x", b"content-length": length}
    assert (request.method, request.path, request.query) == ("POST", "/predict", "a=b")
    assert (request.identifier, request.body, request.refusal) == (b"", b"", None)


@pytest.mark.parametrize(
    ("length", "body"),
    [
        (b"0", b""),
        (b"3", b""),
        (b"4", b'"x"'),
        (b"2", b'"x"'),
        (b"0", b'"x"'),
        (b"", b'"x"'),
        (b"", b""),
        (b"20", GOOD + ANOTHER),
        (b"+3", b'"x"'),
        (b"-3", b'"x"'),
        (b" 3", b'"x"'),
        (b"3 ", b'"x"'),
        (b"3\r", b'"x"'),
        (b"3, 3", b'"x"'),
        (b"0x3", b'"x"'),
        (b"1_0", b"x" * 10),
        (b"0000000000003", b'"x"'),
        (b"9" * 12, b'"x"'),
        (b"9" * 5000, b'"x"'),
        (b"\xb3", b'"x"'),
        ("٣".encode(), b'"x"'),
    ],
)
def test_a_body_without_its_exact_plain_content_length_is_left_to_the_parser(length: bytes, body: bytes) -> None:
    assert filled_cache().read(with_length(length, body)) is None


@pytest.mark.parametrize(
    ("this", "that"),
    [
        (b"POST", b"PUT"),
        (b"POST", b"post"),
        (b"POST", b"\r\nPOST"),
        (b"/predict", b"/predict/"),
        (b"1.1", b"1.0"),
        (b"host", b"Host"),
        (b": x", b": y"),
        (b"host", b"a: b\r\nhost"),
        (b"20\r\n", b"20\r\na: b\r\n"),
        (b"20\r\n", b"20\n"),
        (b"20\r\n\r\n", b"20\r\n\n\r"),
        (b"20\r\n\r\n" + GOOD, b""),
        (START[8:] + b"content-length: 20\r\n\r\n" + GOOD, b""),
        (ANOTHER, b""),
    ],
)
def test_a_head_that_differs_in_one_byte_is_not_found_in_the_cache(this: bytes, that: bytes) -> None:
    data = with_length(b"20", GOOD).replace(this, that)

    assert data != with_length(b"20", GOOD)
    assert filled_cache().read(data) is None


def test_requests_of_one_head_have_headers_of_their_own() -> None:
    head = filled_cache()
    first, second = (head.read(with_length(b"20", GOOD)) for _ in range(2))

    assert first is not None
    assert second is not None
    first[0].headers[b"a"] = b"b"
    assert b"a" not in second[0].headers
