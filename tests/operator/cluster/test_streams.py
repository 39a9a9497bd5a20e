"""A cancelled stream is closed at once, although TLS would wait for the server's closing message."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kubernetes.aio.client import Configuration

from penstock_operator.cluster.api import POD
from penstock_operator.cluster.kubernetes import KubernetesPort
from testbed.identities import Authority

EVENT = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "x"}}}).encode() + b"\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def busy_server(tmp_path: Path) -> Iterator[Configuration]:
    """A server that begins a watch, and then sends neither events nor TLS's closing message."""
    authority = Authority.create()
    identity = authority.server("kube-apiserver", ["127.0.0.1"])
    (tmp_path / "ca").write_bytes(authority.certificate)
    (tmp_path / "certificate").write_bytes(identity.certificate)
    (tmp_path / "key").write_bytes(identity.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with closing(context.wrap_socket(connection, server_side=True)) as stream:
                stream.recv(65536)
                stream.sendall(HEAD + b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                over.wait(60)

        thread = threading.Thread(target=serve)
        thread.start()
        configuration = Configuration(host=f"https://127.0.0.1:{listening.getsockname()[1]}")
        configuration.ssl_ca_cert = str(tmp_path / "ca")
        yield configuration
        over.set()
        thread.join()


def test_a_cancelled_watch_leaves_no_open_connection(busy_server: Configuration) -> None:
    async def scenario() -> None:
        async with KubernetesPort(busy_server) as port:
            begun = asyncio.Event()

            async def follow() -> None:
                async for _ in port.watch(POD, "a", resource_version="1"):
                    begun.set()

            task = asyncio.create_task(follow())
            async with asyncio.timeout(60):
                await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with warnings.catch_warnings():
        # From earlier tests: a cancelled request closes its connection to a server that may be busy, and the loop ends
        # first.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(scenario())
        gc.collect()

    assert [str(one.message) for one in found] == []
