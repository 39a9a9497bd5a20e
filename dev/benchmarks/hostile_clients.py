"""The latency of one good client among ten hostile ones, against its latency alone.

    python dev/benchmarks/hostile_clients.py

Server, hostile clients and good client run in three processes. The server has the model of `front_end.py` (the real
tokenizer and queue around an engine that answers at once) and an internal port. The hostile clients have the addresses
127.0.0.2 to 127.0.0.11 and hold what they can: idle connections, heads and bodies that do not end, bodies that arrive
byte by byte. Each opens 450 connections, or 8 with 1.8 MB each, and replaces those that it loses, ten or one a second.
The good client sends a request every 20 ms, each on a new connection, which is the case that the attack hurts most; ten
times a second it asks the internal port. Not measured: floods of requests and bytes, which a server cannot stop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from contextlib import suppress

from penstock.tasks import TaskName
from penstock_runtime.serving.server import Server
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings

HOSTILE = tuple(f"127.0.0.{number}" for number in range(2, 12))
BODY = b'{"inputs": "a text"}'
ASK = b"POST /predict HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
LARGE = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1900000\r\n\r\n" + b"x"
MANY, FEW = (450, 0.1), (8, 1.0)
"""Connections of each hostile client (together more than the server takes, or than fit into its memory), and seconds
between two that replace lost ones."""
ATTACKS = {
    "idle connections": (b"", *MANY),
    "heads that do not end": (b"POST /pre", *MANY),
    "bodies that do not end": (LARGE + b"x" * 1_800_000, *FEW),
    "bodies byte by byte": (LARGE, *MANY),
}
INTERVAL_SECONDS = 0.02


def serve() -> None:
    """The server; prints its two ports."""
    import uvloop

    from benchmarks.front_end import real_predictor

    async def main() -> None:
        settings = Settings.load({}, {"port": 0, "internal_port": 0, "drain_idle_seconds": 0.0})
        server = Server(ServerStatus("model", TaskName.FEATURE_EXTRACTION), settings, real_predictor())
        await server.start()
        print(server.port, server.internal_port, flush=True)
        await server.serve()

    uvloop.run(main())


async def exchange(port: int, data: bytes) -> tuple[float, bool]:
    """Milliseconds until the answer is read, and whether it is 200."""
    begin = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    except (OSError, TimeoutError):
        answer = b""
    return (time.perf_counter() - begin) * 1e3, answer.startswith(b"HTTP/1.1 200")


async def good(port: int, seconds: float) -> list[tuple[float, bool]]:
    """The good client."""
    end = time.perf_counter() + seconds
    found = []
    while time.perf_counter() < end:
        found.append(await exchange(port, ASK))
        await asyncio.sleep(INTERVAL_SECONDS)
    return found


async def probe(port: int) -> list[bool]:
    """Ask the internal port until cancelled."""
    found: list[bool] = []
    with suppress(asyncio.CancelledError):
        while True:
            ask = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            found.append((await exchange(port, ask))[1])
            await asyncio.sleep(0.1)
    return found


async def attack(port: int, address: str, data: bytes, connections: int, replace_seconds: float) -> None:
    """One hostile client: keep connections open, and open others in place of those that the server closes."""
    held: list[asyncio.StreamWriter] = []
    for turn in itertools.count():
        held = [writer for writer in held if not writer.transport.is_closing()]
        if len(held) < connections:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
                writer.write(data)
                asyncio.get_running_loop().create_task(close_at_end(reader, writer))
                held.append(writer)
        if data == LARGE and turn % 10 == 0:
            for writer in held:
                writer.write(b"x")
        await asyncio.sleep(0.001 if turn < connections else replace_seconds)


async def close_at_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close the connection when the server has closed it."""
    with suppress(OSError):
        await reader.read()
    writer.close()


async def attack_all(port: int, kinds: list[str]) -> None:
    """All hostile clients, each with one of these kinds."""
    chosen = itertools.cycle(ATTACKS[kind] for kind in kinds)
    await asyncio.gather(*(attack(port, address, *next(chosen)) for address in HOSTILE))


async def measure(seconds: float) -> None:
    """Print the table."""
    this = (sys.executable, __file__)
    server = await asyncio.create_subprocess_exec(*this, "--serve", stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    port, internal = map(int, (await server.stdout.readline()).split())
    try:
        await good(port, 2)
        rows = [("alone", await good(port, seconds), [True])]
        for name, kinds in [*((name, [name]) for name in ATTACKS), ("all of them", list(ATTACKS))]:
            attackers = await asyncio.create_subprocess_exec(*this, "--attack", str(port), *kinds)
            probing = asyncio.create_task(probe(internal))
            await asyncio.sleep(5)  # until the connections are taken
            answers = await good(port, seconds)
            probing.cancel()
            rows.append((name, answers, await probing))
            attackers.kill()
            await attackers.wait()
    finally:
        server.terminate()
        await server.wait()
    alone = _p99(rows[0][1])
    print(
        "| clients | requests | failed | p50 ms | p99 ms | p99 ratio | probes failed |\n|---|---|---|---|---|---|---|"
    )
    for name, answers, probes in rows:
        times = [milliseconds for milliseconds, _ in answers]
        failed = sum(not ok for _, ok in answers)
        print(
            f"| {name} | {len(answers)} | {failed} | {statistics.median(times):.1f} | {_p99(answers):.1f} "
            f"| {_p99(answers) / alone:.1f} | {probes.count(False)} of {len(probes)} |"
        )


def _p99(answers: list[tuple[float, bool]]) -> float:
    return statistics.quantiles((milliseconds for milliseconds, _ in answers), n=100)[98]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="run the server; used by the benchmark itself")
    parser.add_argument("--seconds", type=float, default=15, help="duration of each row")
    parser.add_argument("--attack", nargs="+", help="run the clients: port and kinds; used by the benchmark itself")
    given = parser.parse_args()
    if given.serve:
        serve()
    elif given.attack:
        asyncio.run(attack_all(int(given.attack[0]), given.attack[1:]))
    else:
        asyncio.run(measure(given.seconds))
