"""Serving pods for the autoscaler: real HTTP on loopback addresses, and the runtime's own metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from penstock.tasks import TaskName
from penstock_runtime.generation.loop import LoopState
from penstock_runtime.generation.scheduler import PlannedRow, Sequence, Step
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.serving.status import ServerPhase, ServerStatus
from testbed.ports import some_free_ports

ROUTE = "/predict"


class ServingPod:
    """Counts the answers that a test states with `answer` and `refuse`."""

    def __init__(self, *, objective_milliseconds: float | None = 20.0) -> None:
        status = ServerStatus("emotion", TaskName.TEXT_CLASSIFICATION, phase=ServerPhase.READY)
        self.metrics = ServerMetrics(status, objective_p95_milliseconds=objective_milliseconds)
        self.status = 200
        self.scrapes = 0

    def answer(self, count: int, *, seconds: float = 0.008, late: int = 0, late_seconds: float = 0.2) -> None:
        """Count `count` answered requests; `late` of them took `late_seconds`."""
        for index in range(count):
            self.metrics.finished(ROUTE, 200, late_seconds if index < late else seconds, inference=True)

    def answer_texts(self, count: int, *, tokens: int) -> None:
        """Count `count` answered requests of this number of computed tokens."""
        self.answer(count)
        self.metrics.tokens += count * tokens

    def generate(self, tokens: int, *, first_token_seconds: float = 0.1) -> None:
        """Count an answer of text generation with this number of tokens, one step each."""
        metrics = self.metrics.generation
        metrics.state = lambda: (LoopState(), 1)
        metrics.first_token(first_token_seconds)
        sequence = Sequence(0, [1], 2)
        for _ in range(tokens):
            metrics.step(Step((PlannedRow(sequence, 1, samples=True),), 16), 0.01)
        self.answer(1, seconds=first_token_seconds + 0.01 * tokens)

    def refuse(self, count: int) -> None:
        """Count requests refused with 429."""
        for _ in range(count):
            self.metrics.finished(ROUTE, 429, 0.001, inference=True)

    def text(self) -> str:
        """The text of /metrics, which counts its own request as in flight."""
        self.metrics.in_flight += 1
        try:
            return self.metrics.exposition("text/plain")[0].decode()
        finally:
            self.metrics.in_flight -= 1

    async def serve(self, _: web.Request) -> web.Response:
        """Serve /metrics as the runtime does."""
        self.scrapes += 1
        if self.status != 200:
            return web.Response(status=self.status)
        return web.Response(text=self.text())


class Fleet:
    """Pods by loopback address, all on one port: as in a cluster."""

    def __init__(self) -> None:
        self.pods: dict[str, ServingPod] = {}
        (self.port,) = some_free_ports(1)
        self._runners: list[web.AppRunner] = []

    async def add(self, address: str) -> ServingPod:
        """Start one more pod."""
        pod = self.pods[address] = ServingPod()
        app = web.Application()
        app.router.add_get("/metrics", pod.serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, address, self.port).start()
        self._runners.append(runner)
        return pod

    def share(self, requests: int, among: Iterable[str], *, seconds: float = 0.008) -> None:
        """Spread `count` requests evenly over the pods at these addresses."""
        chosen = sorted(among)
        for index, address in enumerate(chosen):
            extra = 1 if index < requests % len(chosen) else 0
            self.pods[address].answer(requests // len(chosen) + extra, seconds=seconds)

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


@asynccontextmanager
async def fleet() -> AsyncIterator[Fleet]:
    """A fleet; its servers end with the block."""
    made = Fleet()
    try:
        yield made
    finally:
        await made.close()
