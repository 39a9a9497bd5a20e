"""Whether this process does its work, and the small HTTP server that says so: /healthz, /readyz, /metrics.

Alive is not "the server answers": a process whose watches have fallen silent, or whose queue does not move, answers as
well. Ready does not mean leading: a follower is ready to take over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

Ages = Callable[[], dict[str, float]]
"""What is watched over, and for how many seconds nothing has been heard of it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What a probe is answered."""

    well: bool
    message: str

    @property
    def response(self) -> web.Response:
        """200 or 503, with the message as the body."""
        return web.Response(status=200 if self.well else 503, text=self.message + "\n")


class Health:
    """Collects what is known."""

    def __init__(self, *, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._ages: list[Ages] = []
        self._ready: Callable[[], str] = lambda: "starting"

    def watch_over(self, ages: Ages) -> None:
        """Include these in liveness."""
        self._ages.append(ages)

    def ready_when(self, missing: Callable[[], str]) -> None:
        """What readiness waits for, in words; empty: ready."""
        self._ready = missing

    def ages(self) -> dict[str, float]:
        """All that is watched over, seconds."""
        return {name: age for ages in self._ages for name, age in ages().items()}

    def live(self) -> Verdict:
        """Not alive: end this process and start another."""
        late = {name: age for name, age in self.ages().items() if age > self._limit_seconds}
        if late:
            return Verdict(False, "; ".join(f"{name}: nothing for {age:.0f} s" for name, age in sorted(late.items())))
        return Verdict(True, "ok")

    def ready(self) -> Verdict:
        """Not ready: has not begun yet."""
        missing = self._ready()
        return Verdict(not missing, missing or "ok")


class Progress:
    """Moves as long as there is nothing to do or something gets done."""

    def __init__(self, waiting_seconds: Callable[[], float]) -> None:
        self._waiting_seconds = waiting_seconds
        self._moved = time.monotonic()

    def moved(self) -> None:
        """Something got done."""
        self._moved = time.monotonic()

    @property
    def age_seconds(self) -> float:
        """For how long work has waited with none being done."""
        return min(self._waiting_seconds(), time.monotonic() - self._moved)


async def serve(health: Health, registry: CollectorRegistry, *, host: str, port: int) -> web.AppRunner:
    """Start the server; `await runner.cleanup()` ends it. OSError when the address is taken."""

    async def live(_: web.Request) -> web.Response:
        return health.live().response

    async def ready(_: web.Request) -> web.Response:
        return health.ready().response

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", live), web.get("/readyz", ready), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    address = runner.addresses[0]
    logger.info("metrics and health on http://%s:%s", address[0], address[1])
    return runner
