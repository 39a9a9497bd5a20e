"""The latency of one good client among ten hostile ones, against its latency alone; the CPU time that the attack costs.

    python -m benchmarks.hostile_clients

Server, hostile clients and good client run in three processes, the hostile clients at nice 19: on a machine with few
cores they would otherwise take the processor from the good client themselves, which no server can prevent. The hostile
clients have the addresses 127.0.0.2 to 127.0.0.11. `ATTACKS` lists their behaviour: most hold connections (450 each, or
8 with 1.8 MB each) and replace those that they lose, ten or one a second. The good client sends a request every 20 ms,
each on a new connection, which is the case that the attack hurts most; ten times a second it sends to the internal
port.

For attacks on the connections, the server has the real tokenizer and queue around an engine that returns zeros at once.
For valid requests that cost work it has all-MiniLM-L6-v2 on the native engine with one thread, and runs on one core;
each hostile client has four connections, and sends the next request when it has the answer.

Each attack is measured in rounds of the good client alone and among the hostile ones, alternately: other load of the
machine falls on both. The ratio is the median over the rounds. Two figures do not depend on other load: the CPU time of
the server in milliseconds per second, without the good client's requests; and the CPU time that the server's
event loop uses between a request of the good client and its answer, for any client.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from benchmarks.models import minilm_on_one_thread, minilm_package
from penstock.manifest import Axes, GraphIO
from penstock.recipe import EngineName, Plan, Precision, Recipe
from penstock.tasks import TaskName
from penstock_runtime.app.server import Server
from penstock_runtime.engines.base import EngineFacts, Streams, Threads
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.host import read_host
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Batch, Outputs
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from penstock_runtime.tasks import make_task

HOSTILE = tuple(f"127.0.0.{number}" for number in range(2, 12))
BODY = b'{"inputs": "a text"}'
ASK = b"POST /predict HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
LARGE = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1900000\r\n\r\nx"
CHUNKED = b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
MISSING = b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"
LONGEST_BODY = 1_800_000
PASSAGE = "the quick brown fox jumps over the lazy dog and runs away from what it has seen there in the dark forest "
NICE = 19
ALL = "all of them"
ALL_VALID = "all valid ones"
INTERVAL_SECONDS = 0.02
WARM_UP_SECONDS = 4.0
"""Until the hostile clients have taken the connections."""


@dataclass(frozen=True)
class Attack:
    """What one hostile client does."""

    first: bytes = b""
    """Sent on each new connection."""
    then: bytes = b""
    """Sent on every connection in each interval."""
    connections: int = 450
    """Of one client; ten of them have more than the server takes."""
    replace_seconds: float = 0.1
    """Between two connections that replace lost ones."""
    interval_seconds: float = 1.0
    closes: bool = False
    """Each connection is closed at once."""
    reads: bool = True
    again: bool = False
    """`first` is sent again after each answer."""


def _valid(path: str, body: object, **changes: Any) -> Attack:
    """Valid requests that cost work."""
    data = orjson.dumps(body)
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data))
    return Attack(head + data, **{"connections": 4, "again": True, **changes})


def _long_text() -> str:
    return (PASSAGE * (LONGEST_BODY // len(PASSAGE) + 1))[:LONGEST_BODY]


ATTACKS = {
    "idle connections": Attack(),
    "heads that do not end": Attack(b"POST /pre"),
    "bodies that do not end": Attack(LARGE + b"x" * 1_800_000, connections=8, replace_seconds=1.0),
    "heads byte by byte": Attack(b"POST /predict HTTP/1.1\r\nx: ", b"x"),
    "bodies byte by byte": Attack(LARGE, b"x"),
    "chunks of one byte": Attack(CHUNKED, b"1\r\nx\r\n"),
    "flood of bytes": Attack(LARGE, b"x", connections=8, interval_seconds=0.005),
    "flood of chunks": Attack(CHUNKED, b"1\r\nx\r\n", connections=8, interval_seconds=0.005),
    "flood of connections": Attack(connections=1, replace_seconds=0.005, closes=True),
    "flood of pipelined requests": Attack(b"", MISSING * 5, connections=8, interval_seconds=0.1),
}
"""On connections and the parser."""
VALID = {
    "short texts": _valid("/predict", {"inputs": "a text"}),
    "rows of 256 tokens": _valid("/predict", {"inputs": PASSAGE * 12}),
    "256 rows of 256 tokens": _valid("/predict", {"inputs": [PASSAGE * 12] * 256}),
    "256 rows of 8 tokens": _valid("/predict", {"inputs": [f"{number} of the texts" for number in range(256)]}),
    "256 rows, a vector for each token": _valid("/embed_all", {"inputs": [PASSAGE * 3] * 256, "truncate": True}),
    "texts of 1.8 MB": _valid("/predict", {"inputs": _long_text()}),
    "/tokenize of 1.8 MB": _valid("/tokenize", {"inputs": _long_text()}),
    "/tokenize of 100 KB": _valid("/tokenize", {"inputs": _long_text()[:100_000]}),
    "JSON with 900,000 numbers": _valid("/predict", {"inputs": "a text", "parameters": {"x": [0] * 900_000}}),
    "JSON of 1,000 levels": _valid("/predict", {"inputs": orjson.Fragment(b"[" * 1000 + b"]" * 1000)}),
    "answers that are not read": _valid("/embed_all", {"inputs": [PASSAGE] * 32}, reads=False, again=False),
}
"""That cost work."""
BOTH = {**ATTACKS, **VALID}
MIXED = {ALL: [*ATTACKS], ALL_VALID: [*VALID]}


class _TrivialEngine:
    """Zeros at once."""

    facts = EngineFacts("none", "0", Threads(1, 1), "f32")

    def run(self, batch: Batch) -> Outputs:
        """[rows, tokens, width]."""
        return {"last_hidden_state": np.zeros((*batch.input_ids.shape, 384), np.float32)}

    run_wide = run
    run_widening = run

    def start_streams(self) -> Streams:
        """As a library's engine has them."""
        return ThreadStreams(self)

    def close(self) -> None:
        """Nothing is held."""


def _predictor(*, real: bool) -> Predictor:
    """A predictor of all-MiniLM-L6-v2, or of its tokenizer around the trivial engine."""
    if real:
        return Predictor(minilm_on_one_thread(read_host().cpu.isa))
    folder = ModelFolder.open(minilm_package(), weights=False)
    task = make_task(TaskName.FEATURE_EXTRACTION, folder)
    recipe = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32)
    plan = Plan(recipe=recipe, streams=1, threads_per_stream=1)
    io = GraphIO(inputs=("input_ids", "attention_mask", "token_type_ids"), outputs={"last_hidden_state": Axes.TOKENS})
    return Predictor(LoadedModel(task, _TrivialEngine(), plan, io))


def serve(*, real: bool) -> None:
    """The server; prints its two ports."""
    import uvloop

    if real:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    async def main() -> None:
        settings = Settings.load({}, {"port": 0, "internal_port": 0, "drain_idle_seconds": 0.0})
        server = Server(ServerStatus("model", TaskName.FEATURE_EXTRACTION), settings, _predictor(real=real))
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


@dataclass
class Period:
    """The good client's results of a period."""

    milliseconds: list[float]
    loop_milliseconds: list[float]
    """CPU time of the server's event loop from each request to its answer."""
    failed: int
    cpu: float
    """Of the server, in milliseconds per second."""


async def good(port: int, process: int, seconds: float) -> Period:
    """The good client. `process`: the server's, for its CPU time."""
    begin, cpu = time.perf_counter(), cpu_seconds(process)
    found = Period([], [], 0, 0.0)
    while (elapsed := time.perf_counter() - begin) < seconds:
        before = loop_milliseconds(process)
        taken, ok = await exchange(port, ASK)
        found.loop_milliseconds.append(loop_milliseconds(process) - before)
        found.milliseconds.append(taken)
        found.failed += not ok
        await asyncio.sleep(INTERVAL_SECONDS)
    found.cpu = (cpu_seconds(process) - cpu) / elapsed * 1e3
    return found


def loop_milliseconds(process: int) -> float:
    """CPU time of the main thread, which runs the event loop."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e6


def cpu_seconds(process: int) -> float:
    """User and system time of all threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def probe(port: int) -> list[bool]:
    """Send probes to the internal port until cancelled."""
    found: list[bool] = []
    with suppress(asyncio.CancelledError):
        while True:
            ask = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            found.append((await exchange(port, ask))[1])
            await asyncio.sleep(0.1)
    return found


async def hostile(port: int, address: str, attack: Attack) -> None:
    """One hostile client: keep connections open, and replace each one that the server closes."""
    held: list[asyncio.StreamWriter] = []
    reading: set[asyncio.Task[None]] = set()
    send_at = 0.0
    for turn in itertools.count():
        held = [writer for writer in held if not writer.transport.is_closing()]
        is_full = len(held) >= attack.connections
        if not is_full:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
                if attack.closes:
                    writer.close()
                else:
                    writer.write(attack.first)
                    if attack.reads:
                        task = asyncio.get_running_loop().create_task(read_all(reader, writer, attack))
                        reading.add(task)
                        task.add_done_callback(reading.discard)
                    held.append(writer)
        if attack.then and time.monotonic() >= send_at:
            send_at = time.monotonic() + attack.interval_seconds
            for writer in held:
                if not writer.transport.get_write_buffer_size():
                    writer.write(attack.then)
        pause = 0.001 if turn < attack.connections else attack.replace_seconds
        await asyncio.sleep(min(pause, attack.interval_seconds))


async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attack: Attack) -> None:
    """Read and drop the answers; close the connection when the server has closed it."""
    with suppress(OSError, asyncio.IncompleteReadError):
        while attack.again:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)
            if head.split()[1] == b"429":
                await asyncio.sleep(0.01)
            writer.write(attack.first)
        while await reader.read(65536):
            pass
    writer.close()


async def attack_all(port: int, kinds: list[str]) -> None:
    """All hostile clients, each with one of these kinds."""
    os.nice(NICE)
    chosen = itertools.cycle(BOTH[kind] for kind in kinds)
    await asyncio.gather(*(hostile(port, address, next(chosen)) for address in HOSTILE))


async def measure(names: list[str], seconds: float, rounds: int) -> None:
    """Print the table."""
    this = (sys.executable, __file__)
    print(
        "| attack | requests | failed | p99 alone, ms | p99, ms | ratio | probes failed | CPU, ms/s "
        "| loop's p99 alone, ms | loop's p99, ms | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        kinds = MIXED.get(name, [name])
        is_real = not ATTACKS.keys() & set(kinds)
        server = await asyncio.create_subprocess_exec(
            *this, "--serve-real" if is_real else "--serve", stdout=asyncio.subprocess.PIPE
        )
        assert server.stdout is not None
        port, internal = map(int, (await server.stdout.readline()).split())
        chosen = [word for kind in kinds for word in ("--only", kind)]
        periods: list[tuple[Period, Period]] = []
        probes: list[bool] = []
        try:
            await good(port, server.pid, 1)
            for _ in range(rounds):
                alone = await good(port, server.pid, seconds)
                attackers = await asyncio.create_subprocess_exec(*this, "--attack", str(port), *chosen)
                probing = asyncio.create_task(probe(internal))
                await asyncio.sleep(WARM_UP_SECONDS)
                periods.append((alone, await good(port, server.pid, seconds)))
                probing.cancel()
                probes += await probing
                attackers.kill()
                await attackers.wait()
                await asyncio.sleep(1)  # until the server has closed their connections
        finally:
            server.terminate()
            await server.wait()
        failed = sum(attacked.failed for _, attacked in periods)
        requests = sum(len(attacked.milliseconds) for _, attacked in periods)
        cpu = statistics.median(attacked.cpu - alone.cpu for alone, attacked in periods)
        waits = [(p99(alone.milliseconds), p99(attacked.milliseconds)) for alone, attacked in periods]
        loop = [(p99(alone.loop_milliseconds), p99(attacked.loop_milliseconds)) for alone, attacked in periods]
        print(
            f"| {name} | {requests} | {failed} | {_columns(waits)} | {probes.count(False)} of {len(probes)} "
            f"| {cpu:.0f} | {_columns(loop)} |",
            flush=True,
        )


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


def _columns(pairs: list[tuple[float, float]]) -> str:
    """Alone, attacked and their ratio, each as the median of the rounds; the ratio with its range."""
    ratios = [attacked / alone for alone, attacked in pairs]
    alone, attacked = (statistics.median(column) for column in zip(*pairs, strict=True))
    return f"{alone:.2f} | {attacked:.2f} | {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"


@click.command(help=__doc__)
@click.option("--seconds", default=6.0, show_default=True, help="Of each period.")
@click.option("--rounds", default=3, show_default=True, help="Periods of each kind.")
@click.option("--only", multiple=True, type=click.Choice([*BOTH, *MIXED]), help="These attacks. Default: all.")
@click.option("--serve", "is_server", is_flag=True, hidden=True)
@click.option("--serve-real", "is_real", is_flag=True, hidden=True)
@click.option("--attack", "port", type=int, hidden=True, help="The port of the server.")
def main(
    *, seconds: float, rounds: int, only: tuple[str, ...], is_server: bool, is_real: bool, port: int | None
) -> None:
    """Print a table in Markdown. The server and the hostile clients are this program, too."""
    if is_server or is_real:
        serve(real=is_real)
    elif port is not None:
        asyncio.run(attack_all(port, [*only]))
    else:
        asyncio.run(measure([*only] or [*ATTACKS, ALL, *VALID, ALL_VALID], seconds, rounds))


if __name__ == "__main__":
    main()
