"""Liveness and readiness of this process, and the HTTP server of /healthz, /readyz and /metrics.

Liveness is not only that the server answers: it fails when a watch is silent or the queue makes no progress for too
long. A follower is ready too: ready does not mean leading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from penstock.logs import log_event

Ages = Callable[[], dict[str, float]]
"""Name of each supervised activity, and seconds since its last sign of progress."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeResult:
    """The answer to a probe."""

    ok: bool
    message: str

    @property
    def response(self) -> web.Response:
        """200 or 503, with the message as the body."""
        return web.Response(status=200 if self.ok else 503, text=self.message + "\n")


class HealthChecks:
    """The checks behind liveness and readiness."""

    def __init__(self, *, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._ages: list[Ages] = []
        self._ready: Callable[[], str] = lambda: "starting"

    def add_ages(self, ages: Ages) -> None:
        """Include these activities in liveness."""
        self._ages.append(ages)

    def set_readiness(self, missing: Callable[[], str]) -> None:
        """Set the check for readiness: it returns what is missing; empty: ready."""
        self._ready = missing

    def ages(self) -> dict[str, float]:
        """Seconds since the last progress of each activity."""
        return {name: age for ages in self._ages for name, age in ages().items()}

    def live(self) -> ProbeResult:
        """Liveness: when it fails, the process must be restarted."""
        late = {name: age for name, age in self.ages().items() if age > self._limit_seconds}
        if late:
            return ProbeResult(
                False, "; ".join(f"{name}: nothing for {age:.0f} s" for name, age in sorted(late.items()))
            )
        return ProbeResult(True, "ok")

    def ready(self) -> ProbeResult:
        """Readiness: fails until the process has started."""
        missing = self._ready()
        return ProbeResult(not missing, missing or "ok")


async def serve(health: HealthChecks, registry: CollectorRegistry, *, host: str, port: int) -> web.AppRunner:
    """Start the server; `await runner.cleanup()` ends it. OSError when the address is in use."""

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
    logger.info("serving metrics and health on http://%s:%s", *address[:2], extra=log_event("HealthServed"))
    return runner
