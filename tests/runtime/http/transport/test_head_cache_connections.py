"""Connections whose clients repeat a head: it is not parsed again, and the answers are the same as with the parser."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock_runtime.http.transport.message import CachedHead, HeadCache
from tests.examples import examples
from tests.runtime.http.feeding import Fed, feed
from tests.runtime.http.serving import post
from tests.runtime.http.transport.test_connection import GOOD
from tests.runtime.http.transport.test_head_cache import START

MOST_BYTES = 1024
"""Of a head, and of a body."""
LENGTH = b"content-length: <n>\r\n"
"""<n>: of the body."""


def with_room(digits: int) -> bytes:
    """A head that is within the limit if its length has no more digits."""
    others = len(b"/predicthost: x\r\ncontent-length: \r\npadding: \r\n")
    return START + LENGTH + b"padding: %b\r\n\r\n" % (b"x" * (MOST_BYTES - others - digits))


REMEMBERED = {
    "plain": START + LENGTH + b"\r\n",
    "odd capitals and spaces before": START + b"Content-LENGTH: \t <n>\r\n\r\n",
    "no space before": START + b"content-length:<n>\r\n\r\n",
    "values like it before": START + b"a: content-length: <n>\r\nb: <n>\r\n" + LENGTH + b"\r\n",
    "values like it behind": START + LENGTH + b"a: content-length: <n>\r\nb: <n>\r\n\r\n",
    "names like it": START + b"x-content-length: <n>\r\n" + LENGTH + b"content-length-2: <n>\r\n\r\n",
    "parameters and a query": b"POST /v2/models/emotion/infer?a=%20<n>#b HTTP/1.1\r\nhost: x\r\n" + LENGTH + b"\r\n",
    "a whole URL": b"POST http://x/predict?a HTTP/1.1\r\nhost: x\r\n" + LENGTH + b"\r\n",
    "HTTP/1.0 that is kept": b"POST /predict HTTP/1.0\r\nconnection: keep-alive\r\n" + LENGTH + b"\r\n",
    "an empty line before": b"\r\n" + START + LENGTH + b"\r\n",
    "another method": b"HEAD /healthz HTTP/1.1\r\nhost: x\r\n" + LENGTH + b"\r\n",
    "a header that comes twice": START + b"a: 1\r\n" + LENGTH + b"A: 2\r\n\r\n",
    "clear of the limit": with_room(1 + 12),
}
FORGOTTEN = {
    "chunks": START + b'transfer-encoding: chunked\r\n\r\n3\r\n"x"\r\n0\r\n\r\n',
    "no length": START + b"\r\n",
    "an expectation": START + LENGTH + b"expect: 100-continue\r\n\r\n",
    "an upgrade": START + LENGTH + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "half an upgrade": START + LENGTH + b"upgrade: h2c\r\n\r\n",
    "an identifier": START + LENGTH + b"x-request-id: mine\r\n\r\n",
    "an empty identifier": START + b"x-request-id:\r\n" + LENGTH + b"\r\n",
    "close": START + LENGTH + b"connection: close\r\n\r\n",
    "HTTP/1.0": b"POST /predict HTTP/1.0\r\n" + LENGTH + b"\r\n",
    "a route that is missing": b"POST /nowhere HTTP/1.1\r\nhost: x\r\n" + LENGTH + b"\r\n",
    "no route": b"OPTIONS /predict HTTP/1.1\r\nhost: x\r\n" + LENGTH + b"\r\n",
    "a space behind": START + b"content-length: <n> \r\n\r\n",
    "a tab behind": START + b"content-length:\t<n>\t\r\n\r\n",
    "a bare line feed before": b"\n" + START + LENGTH + b"\r\n",
    "empty lines before": b"\r\n\r\n" + START + LENGTH + b"\r\n",
    "close to the limit": with_room(12),
    "closer to the limit": with_room(2),
}
TOKENS = {
    name: START + LENGTH + b"authorization: Bearer %b\r\n\r\n" % token
    for name, token in {"right token": b"right", "wrong token": b"wrong", "no token": b""}.items()
}
WITH_TOKEN = {"auth_token": "right"}


def fed(pieces: list[bytes], **flags: Any) -> tuple[Fed, int]:
    """The answers to the pieces, and how many requests were not parsed."""
    flags = {"max_body_bytes": MOST_BYTES, "max_header_bytes": MOST_BYTES, **flags}
    found: list[object] = []
    read = HeadCache.read

    def noted(self: HeadCache, data: bytes, version: int) -> object:
        found.append(read(self, data, version))
        return found[-1]

    with mock.patch.object(HeadCache, "read", noted):
        return asyncio.run(feed(pieces, **flags)), len(found) - found.count(None)


def parsed(pieces: list[bytes], **flags: Any) -> Fed:
    """The answers if all requests are parsed."""
    with mock.patch.object(CachedHead, "of", return_value=None):
        made, unparsed = fed(pieces, **flags)
    assert unparsed == 0
    return made


def assert_same(found: Fed, expected: Fed) -> None:
    assert found.requests == expected.requests
    assert found.written == expected.written
    assert (found.held_bytes, found.connection.state) == (expected.held_bytes, expected.connection.state)


def filled(head: bytes, body: bytes, length: bytes = b"<n>") -> bytes:
    """`length`: the value of Content-Length; `<n>` is the true one."""
    if b"<n>" not in head:
        return head
    return head.replace(b"<n>", length.replace(b"<n>", b"%d" % len(body))) + body


@pytest.mark.parametrize(
    ("head", "flags"),
    [
        *(pytest.param(head, {}, id=name) for name, head in REMEMBERED.items()),
        pytest.param(TOKENS["right token"], WITH_TOKEN, id="right token"),
    ],
)
def test_a_repeated_head_is_not_parsed_again(head: bytes, flags: dict[str, str]) -> None:
    pieces = [filled(head, body) for body in (b'"x"', b'"y"', b'"z"')]

    found, unparsed = fed(pieces, **flags)

    assert (len(found.requests), unparsed) == (3, 2)
    assert_same(found, parsed(pieces, **flags))


def test_only_the_content_length_of_a_cached_head_may_differ() -> None:
    pieces = [post("/predict", b"x" * count) for count in (9, 10, MOST_BYTES, 0, 100, 1)]

    found, unparsed = fed(pieces)

    assert (len(found.requests), unparsed) == (6, 4)  # a request without a body is parsed
    assert_same(found, parsed(pieces))


@pytest.mark.parametrize(
    ("head", "flags"),
    [
        *(pytest.param(head, {}, id=name) for name, head in FORGOTTEN.items()),
        *(pytest.param(TOKENS[name], WITH_TOKEN, id=name) for name in ("wrong token", "no token")),
    ],
)
def test_values_that_may_differ_the_next_time_are_not_cached(head: bytes, flags: dict[str, str]) -> None:
    found, _ = fed([filled(TOKENS["right token"], b'"x"'), filled(head, b'"x"')], **flags)

    assert len(found.requests) == 2
    assert found.connection._head_cache._head is None


@pytest.mark.parametrize(
    ("cut", "remembered"),
    [
        pytest.param(len(START) + len(b"content-length: 1"), False, id="within the length"),
        pytest.param(len(START) + len(b"content-length: 10"), False, id="behind the length"),
        pytest.param(len(START) + len(b"content-length: 10\r\n"), False, id="behind its line"),
        pytest.param(-11, False, id="before the last byte"),
        pytest.param(-10, True, id="before the body"),
        pytest.param(-1, True, id="within the body"),
    ],
)
def test_a_head_is_cached_if_it_arrived_in_one_segment(cut: int, *, remembered: bool) -> None:
    whole = post("/predict", b'"xxxxxxxx"')

    found, unparsed = fed([whole[:cut], whole[cut:], whole])

    assert (len(found.requests), unparsed) == (2, int(remembered))


def test_pipelined_requests_are_parsed() -> None:
    one = post("/predict", GOOD)

    found, unparsed = fed([one, one * 2, one, one])

    assert (len(found.requests), unparsed) == (5, 1)


HEADS = [*REMEMBERED.values(), *FORGOTTEN.values(), *TOKENS.values(), b"", b"nonsense\r\n\r\n"]
BODIES = [b'"x"', GOOD, b"x" * (MOST_BYTES - 1), post("/predict", GOOD), b"\r\n\r\n"]
ODD_BODIES = [b"", b"x" * MOST_BYTES, b"x" * (MOST_BYTES + 1)]
ODD_LENGTHS = [b"0<n>", b"0" * 12 + b"<n>", b"1<n>", b"2", b"", b"+<n>", b"<n> ", b"9" * 20, b"\xb3"]
FLAGS: list[dict[str, Any]] = [{}, WITH_TOKEN, {"max_body_bytes": 2 * MOST_BYTES, "max_held_bytes": MOST_BYTES}]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[bytes], dict[str, Any]]:
    """Pieces, most of them requests of the same head, and settings."""
    flags = draw(st.sampled_from(FLAGS))
    usual = TOKENS["right token"] if flags is WITH_TOKEN else draw(st.sampled_from([*REMEMBERED.values()]))
    pieces: list[bytes] = []
    for _ in range(draw(st.integers(2, 8))):
        whole = filled(usual, draw(st.sampled_from(BODIES)))
        match draw(st.sampled_from([*["again"] * 6, "head", "body", "length", "joined", "cut"])):
            case "head":
                whole = filled(draw(st.sampled_from(HEADS)), GOOD)
            case "body":
                whole = filled(usual, draw(st.sampled_from(ODD_BODIES)))
            case "length":
                whole = filled(usual, b'"x"', draw(st.sampled_from(ODD_LENGTHS)))
            case "joined" if pieces:
                whole = pieces.pop() + whole
            case "cut":
                at = draw(st.integers(0, len(whole)))
                pieces.append(whole[:at])
                whole = whole[at:]
        pieces.append(whole)
    return pieces, flags


def after_a_good_one(last: bytes, flags: dict[str, Any]) -> tuple[list[bytes], dict[str, Any]]:
    return [post("/predict", GOOD), last, post("/predict", GOOD)], flags


@given(conversations(), st.just(0) | st.integers(1, 8))
@example(after_a_good_one(post("/predict", b"x" * (MOST_BYTES + 1)), {}), 0)
@example(after_a_good_one(post("/predict", b"x" * (MOST_BYTES + 1)), FLAGS[2]), 0)
@example(after_a_good_one(b"nonsense\r\n\r\n", {}), 0)
@example(([filled(with_room(2), b'"x"'), filled(with_room(2), b"x" * 100)], {}), 0)
@settings(max_examples=examples(400))
def test_any_sequence_of_requests_is_answered_as_without_the_cache(
    conversation: tuple[list[bytes], dict[str, Any]], opens_at: int
) -> None:
    pieces, flags = conversation

    found, _ = fed(pieces, opens_at=opens_at, **flags)

    assert_same(found, parsed(pieces, opens_at=opens_at, **flags))


def test_the_cached_head_of_a_large_request_is_small() -> None:
    def converse() -> Fed:
        return fed([post("/predict", b"x" * 1_000_000)] * 2, max_body_bytes=2_000_000)[0]

    converse()  # warm up: memory that is allocated once does not count
    gc.collect()
    tracemalloc.start()
    try:
        found = converse()
        found.requests.clear()
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found.connection._head_cache._head is not None
    assert kept_bytes < 500_000
