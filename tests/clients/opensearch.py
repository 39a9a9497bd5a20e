"""A node of OpenSearch on the loopback address, made of its modules on Maven Central."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

SOURCES = Path(__file__).parent / "opensearch_node"


@contextmanager
def opensearch_node(folder: Path) -> Iterator[str]:
    """The address of a new node, whose data is below `folder`. It has the modules for HTTP and `rank_features`."""
    if missing := [one for one in ("mvn", "java") if shutil.which(one) is None]:
        pytest.skip(f"OpenSearch needs {' and '.join(missing)}")
    jars = folder / "jars"
    fetch = ["mvn", "--quiet", "--batch-mode", "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
    subprocess.run(fetch, cwd=SOURCES, check=True, stdout=subprocess.PIPE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "java",
        "-Xmx512m",
        "-cp",
        f"{jars}/*",
        str(SOURCES / "SearchNode.java"),
        str(folder / "data"),
        str(port),
    ]
    with (folder / "node.log").open("wb") as log:
        node = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield _ready(node, f"http://127.0.0.1:{port}", folder / "node.log")
        finally:
            node.terminate()
            node.wait(60)


def _ready(node: subprocess.Popen[bytes], address: str, log: Path) -> str:
    """The address, when the node answers."""
    end = time.monotonic() + 300
    while True:
        try:
            if httpx.get(address, timeout=10).status_code == 200:
                return address
        except httpx.TransportError:
            assert node.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)
