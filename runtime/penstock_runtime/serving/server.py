"""The server as a whole: it starts, says that it is ready, and ends without losing what it has accepted.

server = Server(status, settings)          # answers /healthz and /readyz at once
await server.start()
server.serve_with(predictor, plan)         # ready; call again after Predictor.replace with another plan
await server.serve()                       # until SIGTERM, SIGINT or stop()
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from penstock.manifest import Manifest
from penstock.recipe import Plan
from penstock_runtime.http.api.answers import Predicts
from penstock_runtime.http.api.routes import Router
from penstock_runtime.http.api.service import Service
from penstock_runtime.http.application import Application
from penstock_runtime.http.route_table import routes
from penstock_runtime.http.transport.listener import Acceptor
from penstock_runtime.metrics import Metrics
from penstock_runtime.serving.status import Phase, Status
from penstock_runtime.settings import Settings
from penstock_runtime.tasks.limits import Limits

logger = logging.getLogger("penstock.server")

ACCESS_FLUSH_SECONDS = 1.0


def task_limits(settings: Settings) -> Limits:
    """What one request may hold, as `make_task` and the routes take it."""
    limits = settings.limits
    return Limits(items=limits.max_inputs, rows=limits.max_rows, answer_bytes=limits.max_answer_bytes)


class Server:
    """One endpoint on one port."""

    def __init__(self, status: Status, settings: Settings, predictor: Predicts | None = None) -> None:
        self.status = status
        self.settings = settings
        self.metrics = Metrics(status, objective_p95_milliseconds=settings.observation.objective_p95_milliseconds)
        self.service = Service(status, settings, self.metrics)
        table = routes(self.service, task_limits(settings))
        self.application = Application(Router(table, status.task), settings, self.metrics)
        self._acceptor: Acceptor | None = None
        self._stop = asyncio.Event()
        self._was_ready = False
        self._flush: asyncio.TimerHandle | None = None
        if predictor is not None:
            self.serve_with(predictor)

    @property
    def port(self) -> int:
        """The port that is listened on; 0 before `start`."""
        return 0 if self._acceptor is None else self._acceptor.port

    @property
    def url(self) -> str:
        """Such as `http://127.0.0.1:8080`."""
        host = self.settings.http.host
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{shown}:{self.port}"

    def serve_with(self, predictor: Predicts, plan: Plan | None = None, manifest: Manifest | None = None) -> None:
        """Answer with this predictor from now on, and say so in `/info`, `/readyz` and the metrics."""
        self.service.predictor = predictor
        self.metrics.queue_depth = predictor.queue_depth
        self.status.plan = plan or self.status.plan
        self.status.manifest = manifest or self.status.manifest
        if self.status.phase is Phase.LOADING:
            self.status.phase = Phase.READY
            self.status.message = ""
            if self._acceptor is not None:
                logger.info("ready: requests are answered")

    async def start(self) -> None:
        """Listen; HostError when the address cannot be had."""
        self._acceptor = Acceptor(self.application, self.settings.http)
        self.metrics.connections = lambda: 0 if self._acceptor is None else len(self._acceptor.connections)
        await self._acceptor.listen()
        if self.application.access_lines is not None:
            self._write_access_lines()
        if self.status.phase is Phase.LOADING:
            logger.info("listening on %s: %s, /readyz says when it is there", self.url, self.status.message)
        else:
            logger.info("listening on %s", self.url)

    async def serve(self, *, signals: bool = True) -> int:
        """Serve until a signal or `stop`, then drain. Returns how many connections had to be cut off (0: a clean end).

        `signals`: handle SIGTERM and SIGINT (main thread only); a second one ends the process at once.
        """
        if self._acceptor is None:
            await self.start()
        loop = asyncio.get_running_loop()
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled, number)
        try:
            await self._stop.wait()
            return await self._drain()
        finally:
            if signals:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Begin the end; `serve` returns when all is answered."""
        # Nobody sends requests to what was never ready: then there is nobody to wait for.
        self._was_ready |= self.status.phase is Phase.READY
        self.status.phase = Phase.DRAINING
        if self._acceptor is not None:
            self._acceptor.draining = True
        self._stop.set()

    def _signalled(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            logger.warning("%s again: ending at once", number.name)
            sys.stderr.flush()
            # Not sys.exit: that would raise inside the loop and wait for worker threads.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # The first process of a container is not ended by that.
            os._exit(128 + number)
        logger.info("%s: draining", number.name)
        self.stop()

    async def _drain(self) -> int:
        """Everything accepted is answered, within the limit."""
        drain = self.settings.drain
        loop = asyncio.get_running_loop()
        end = loop.time() + drain.drain_limit_seconds
        assert self._acceptor is not None  # noqa: S101 - serve() has started it
        if drain.drain_delay_seconds and self._was_ready:
            await asyncio.sleep(drain.drain_delay_seconds)
        cut = await self._acceptor.close(
            idle_seconds=drain.drain_idle_seconds, limit_seconds=max(0.0, end - loop.time())
        )
        if cut:
            logger.warning("%d connections were cut off after %g s", cut, drain.drain_limit_seconds)
        if self.service.predictor is not None:
            try:
                async with asyncio.timeout(max(0.1, end - loop.time())):
                    await self.service.predictor.drain()
            except TimeoutError:
                logger.warning("the model was still at work after %g s", drain.drain_limit_seconds)
        if self._flush is not None:
            self._flush.cancel()
        self._write_lines()
        logger.info("drained")
        return cut

    def _write_access_lines(self) -> None:
        self._write_lines()
        self._flush = asyncio.get_running_loop().call_later(ACCESS_FLUSH_SECONDS, self._write_access_lines)

    def _write_lines(self) -> None:
        lines = self.application.access_lines
        if lines:
            sys.stderr.write("\n".join(lines) + "\n")
            lines.clear()
