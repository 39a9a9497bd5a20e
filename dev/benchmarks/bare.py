"""A bare server: the forward pass of an artefact behind a socket, and nothing else. It reads no text and writes the
same answer every time; the graph runs in the loop's own thread. What it has of a tail the machine and the client do.

A program of its own: `python -m benchmarks.bare ARTEFACT PORT TOKENS [TOKENS ...]`. POST `/8` runs a row of 8 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import cast

import httptools
import numpy as np
import orjson
import uvloop

from penstock_bench.floor import load_chosen
from penstock_bench.server import MeasuredServer, free_port
from penstock_runtime.engines.base import Engine
from penstock_runtime.http.transport.message import Request, Response, encode
from penstock_runtime.rows import Batch

NAME = "bare"
START_SECONDS = 60.0
READY_PATH = b"/"


@contextmanager
def bare_server(artefact: Path, lengths: Sequence[int], cpus: Sequence[int]) -> Iterator[MeasuredServer]:
    """Started and ready; ended afterwards. POST its URL with `/` and one of the lengths. MeasurementFailed."""
    port = free_port()
    command = [sys.executable, "-m", __name__, str(artefact), str(port), *map(str, lengths)]
    server = MeasuredServer.start(NAME, command, port=port, cpus=cpus)
    try:
        server.wait_until_ready(READY_PATH.decode(), seconds=START_SECONDS)
        yield server
    finally:
        server.stop()


class Connection(asyncio.Protocol):
    """Requests one after the other, as a client sends them that waits for each answer."""

    def __init__(self, engine: Engine, rows: Mapping[bytes, Batch], answer: bytes) -> None:
        self._engine = engine
        self._rows = rows
        self._answer = answer
        self._path = b""
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._path = url

    def on_message_complete(self) -> None:
        """Run the row as soon as the request is there."""
        if self._path != READY_PATH:
            self._engine.run(self._rows[self._path])
        self._transport.write(self._answer)


def row(tokens: int) -> Batch:
    """A row of this many tokens. Which ones does not change its time; every vocabulary has the first hundred."""
    ids = np.arange(tokens, dtype=np.int64)[None, :] % 100
    return Batch(ids, np.ones_like(ids), np.zeros_like(ids))


async def serve(artefact: Path, port: int, lengths: Sequence[int]) -> None:
    """Until it is ended."""
    engine = load_chosen(artefact)
    rows = {f"/{tokens}".encode(): row(tokens) for tokens in lengths}
    (output, *_) = [next(iter(engine.run(batch).values())) for batch in rows.values()]
    # As long as a real answer: one vector as wide as the model.
    body = orjson.dumps(output.reshape(-1, output.shape[-1])[0], option=orjson.OPT_SERIALIZE_NUMPY)
    answer = encode(Response(body), Request(), formatdate(usegmt=True).encode(), close=False)
    # A collection pauses for milliseconds.
    gc.disable()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine, rows, answer), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artefact", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("tokens", type=int, nargs="+")
    given = parser.parse_args()
    uvloop.run(serve(given.artefact, given.port, given.tokens))
