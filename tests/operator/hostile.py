"""HTTP servers in place of pods that answer with attacks, on loopback addresses and the real ports."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MEBIBYTE = 2**20
STREAM_BYTES = 600 * MEBIBYTE

Answer = Callable[[BaseHTTPRequestHandler], None]


def body(data: bytes, **headers: str) -> Answer:
    """An answer with this body."""

    def give(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(data)

    return give


def stream(request: BaseHTTPRequestHandler) -> None:
    """600 MiB of digits, as fast as they are read."""
    request.send_response(200)
    request.send_header("Content-Length", str(STREAM_BYTES))
    request.end_headers()
    send_in_pieces(request, b"1" * MEBIBYTE)


def compressed_stream(request: BaseHTTPRequestHandler) -> None:
    """600 MiB that take little on the wire."""
    body(_compressed(), Content_Encoding="gzip")(request)


@cache
def _compressed() -> bytes:
    """Made when it is first asked for: it takes seconds, and many processes only import this module."""
    return gzip.compress(b"[" * STREAM_BYTES, 9)


def endless_headers(request: BaseHTTPRequestHandler) -> None:
    """Headers up to the size of the stream."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\n")
    line = b"x-filler: " + b"y" * 4000 + b"\r\n"
    send_in_pieces(request, line * (MEBIBYTE // len(line)))


def send_in_pieces(request: BaseHTTPRequestHandler, piece: bytes) -> None:
    """The size of the stream, or as much as the client takes."""
    assert isinstance(request.server, HostilePod)
    for _ in range(STREAM_BYTES // len(piece)):
        request.wfile.write(piece)
        request.server.sent_bytes += len(piece)


ATTACKS: Mapping[str, Answer] = {
    "an infinite number": body(b'{"host": {"cores": {"granted": 1e999}}}'),
    "deep nesting": body(b"[" * 200_000),
    "no UTF-8": body(b'{"host": "\xff\xfe"}'),
    "an integer of 4,000 digits": body(b'{"host": {"cores": {"granted": ' + b"9" * 4000 + b"}}}"),
    "600 MiB": stream,
    "600 MiB, compressed": compressed_stream,
    "endless headers": endless_headers,
}


class HostilePod(ThreadingHTTPServer):
    """One pod: the same answer to each request."""

    daemon_threads = True

    def __init__(self, address: str, port: int, answer: Answer) -> None:
        self.connections = 0
        self.asked: list[str] = []
        """Paths of the requests."""
        self.sent_bytes = 0
        """Of streams."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805 - the standard library's name
                self.asked.append(handler.path)
                try:
                    answer(handler)
                except OSError:
                    # The operator closed the connection.
                    handler.close_connection = True

            do_POST = do_GET  # noqa: N815 - the standard library's name

            def log_message(handler, *_: object) -> None:  # noqa: N805
                pass

        super().__init__((address, port), Handler)

    def verify_request(self, request: object, client_address: object) -> bool:
        self.connections += 1
        return True


@contextmanager
def hostile_pods(answers: Mapping[tuple[str, int], Answer]) -> Iterator[dict[tuple[str, int], HostilePod]]:
    """Servers by address and port."""
    with ExitStack() as stack:
        pods = {}
        for (address, port), answer in answers.items():
            pod = pods[address, port] = HostilePod(address, port, answer)
            stack.callback(pod.server_close)
            thread = threading.Thread(target=pod.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            stack.callback(pod.shutdown)
        yield pods
