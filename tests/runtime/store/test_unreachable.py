"""Object stores that do not answer: each request is sent once, since Penstock retries, and reports each failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket

import pytest

from penstock_runtime.remote import READ_SECONDS, FailureKind, classify_failure, describe, open_bucket

SCHEMES = pytest.mark.parametrize("scheme", ["s3", "gs", "az"])


def use(url: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library of a scheme send its requests there."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if scheme == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    elif scheme == "gs":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    else:
        account = f"AccountName=account;AccountKey=a2V5;BlobEndpoint={url}/account"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{account};")


def failure(scheme: str) -> Exception:
    """The error of a listing."""
    bucket = open_bucket(scheme, "bucket/prefix")
    try:
        bucket.objects()
    except Exception as error:
        return error
    raise AssertionError("the store answers")


@contextmanager
def busy_server() -> Iterator[tuple[str, list[str]]]:
    """A server that is overloaded: its URL, and the paths of its requests."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its signature
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", paths
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def full_backlog() -> Iterator[str]:
    """An address that drops packets: the kernel answers no further connection."""
    with socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket() for _ in range(3)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(listener.getsockname())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for one in waiting:
                one.close()


@SCHEMES
def test_a_request_that_fails_is_sent_once(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with busy_server() as (url, paths):
        use(url, scheme, monkeypatch)
        error = failure(scheme)

    assert classify_failure(error) is FailureKind.UNAVAILABLE
    assert len(paths) == 1


@SCHEMES
@pytest.mark.parametrize("drops", [False, True])
def test_an_address_that_refuses_or_drops_packets_is_unavailable(
    scheme: str, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_backlog() as url:
        use(url if drops else "http://127.0.0.1:9", scheme, monkeypatch)
        started = time.monotonic()
        error = failure(scheme)

    # The limits of a request are ten times as long.
    assert time.monotonic() - started < READ_SECONDS

    assert classify_failure(error) is FailureKind.UNAVAILABLE
    assert describe(error).startswith("Connection refused") or drops
