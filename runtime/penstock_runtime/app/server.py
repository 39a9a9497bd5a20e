"""The HTTP server of one endpoint: starts, reports readiness, and drains without losing accepted requests.

server = Server(status, settings)          # answers /healthz and /readyz from `start` on
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
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import HostError, PenstockError
from penstock.logs import log_event
from penstock.manifest import Manifest
from penstock.recipe import Plan
from penstock_runtime.errors import NotReady
from penstock_runtime.http.api.core.service import ModelService, PredictorLike
from penstock_runtime.http.application import Application, Router
from penstock_runtime.http.route_table import internal_routes, public_routes, routes
from penstock_runtime.http.tracing import RequestTraces
from penstock_runtime.http.transport.listener import Listener
from penstock_runtime.http.transport.tls import TlsFiles
from penstock_runtime.rpc.grpc_server import RpcServer
from penstock_runtime.serving.generator import Generator
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.serving.status import ServerPhase, ServerStatus
from penstock_runtime.settings import HttpSettings, Settings
from penstock_runtime.tasks.base import RequestLimits

if TYPE_CHECKING:  # servers of one model do not load it
    from penstock_runtime.batching.shared_cores import CoreShare

logger = logging.getLogger("penstock.server")

ACCESS_FLUSH_SECONDS = 1.0
REFRESH_SECONDS = 2.0
"""Interval between two looks at the files of tokens and of the certificate."""
STREAM_END_SECONDS = 1.0
"""How long before the limit of the drain streams are ended, so that their last event still arrives."""
GIL_SECONDS = 0.0005
"""How long the event loop waits for Python's lock while a thread tokenises: by default 5 ms."""
INTERNAL_CONNECTIONS = 64
"""Open connections of the internal port: kubelet, operator, and some Prometheus servers."""
INTERNAL_DRAIN_SECONDS = 0.5
"""How long the internal port waits for requests in progress at the end. Scrapes take milliseconds."""


def request_limits(settings: Settings) -> RequestLimits:
    """The limits of one request, for `make_task` and the routes."""
    limits = settings.limits
    return RequestLimits(
        items=limits.max_inputs,
        rows=limits.max_rows,
        tokens=settings.queue.max_queue_tokens,
        answer_bytes=limits.max_answer_bytes,
    )


def _internal_settings(http: HttpSettings) -> HttpSettings:
    return http.model_copy(
        update={
            "port": http.internal_port,
            "internal_port": None,
            "tls_certificate": None,
            "tls_key": None,
            "max_connections": INTERNAL_CONNECTIONS,
            "per_client_share": 1.0,
        }
    )


class Server:
    """One endpoint on one port, or on one for requests and one for probes and monitoring; or several on one port."""

    def __init__(
        self,
        status: ServerStatus,
        settings: Settings,
        predictor: PredictorLike | None = None,
        *,
        members: Sequence[Server] = (),
        share: CoreShare | None = None,
    ) -> None:
        """`members`: servers of one model each, which are not started: this one answers their requests. `share`: of the
        cores, for such a server."""
        self.status = status
        self.settings = settings
        self.share = share
        self._members = tuple(members)
        self.metrics = ServerMetrics(status, objective_p95_milliseconds=settings.observation.objective_p95_milliseconds)
        self.service = ModelService(status, settings, self.metrics)
        self._internal_application: Application | None = None
        table = () if members else routes(self.service, request_limits(settings))
        if members:
            self.application = self._of_members()
        elif settings.http.internal_port is None:
            self.application = Application(Router(table, status.task), settings, self.metrics)
        else:
            internal = Router(internal_routes(table), status.task)
            self._internal_application = Application(internal, settings, self.metrics, wants_token=False)
            router = Router(public_routes(table), status.task, on_internal_port=internal.routes)
            self.application = Application(router, settings, self.metrics)
        traces = settings.traces
        self.application.traces = None if traces.trace_endpoint is None else RequestTraces(status.name, traces)
        certificate, key = settings.http.tls_certificate, settings.http.tls_key
        self._tls = None if certificate is None or key is None else TlsFiles(certificate, key)
        self._rpc = None if settings.http.grpc_port is None else RpcServer(self.application, settings)
        self._listener: Listener | None = None
        self._internal_listener: Listener | None = None
        self.failure: PenstockError | None = None
        """Why it stops serving, if that is not a signal."""
        self._stop = asyncio.Event()
        self._was_ready = False
        self._flush: asyncio.TimerHandle | None = None
        self._refresh: asyncio.TimerHandle | None = None
        if predictor is not None:
            self.serve_with(predictor)

    def _of_members(self) -> Application:
        from penstock_runtime.http.members import Member, MembersApplication  # servers of one model do not need it

        members = {one.status.name: Member(one.service, one.application) for one in self._members}
        return MembersApplication(members, self.settings, self.metrics, self.status.task)

    @property
    def _predictors(self) -> list[PredictorLike]:
        found = (one.service.predictor for one in self._members or (self,))
        return [predictor for predictor in found if predictor is not None]

    @property
    def has_model(self) -> bool:
        """Whether it has its model, or all of them."""
        return len(self._predictors) == max(1, len(self._members))

    @property
    def port(self) -> int:
        """The port; 0 before `start`."""
        return 0 if self._listener is None else self._listener.port

    @property
    def internal_port(self) -> int:
        """The port for probes and monitoring; 0 before `start`, or if the server has none."""
        return 0 if self._internal_listener is None else self._internal_listener.port

    @property
    def grpc_port(self) -> int:
        """The port of gRPC; 0 before `start`, or if the server has none."""
        return 0 if self._rpc is None else self._rpc.port

    @property
    def url(self) -> str:
        """Such as `http://127.0.0.1:8080`, or with https."""
        host = self.settings.http.host
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http{'' if self._tls is None else 's'}://{shown}:{self.port}"

    def serve_with(self, predictor: PredictorLike, plan: Plan | None = None, manifest: Manifest | None = None) -> None:
        """Answer with this predictor from now on, and show it in `/info`, `/readyz` and the metrics."""
        self.service.predictor = predictor
        self.metrics.queue_depth = predictor.queue_depth
        if isinstance(predictor, Generator):
            self.metrics.generation.state = predictor.state
        if isinstance(predictor, Predictor):
            self.metrics.device = predictor.device
            self.metrics.bulk_depth = predictor.bulk_depth
            self.metrics.live_guard = predictor.live_guard
        self.status.plan = plan or self.status.plan
        self.status.manifest = manifest or self.status.manifest
        self.set_ready()

    def set_ready(self) -> None:
        """Every model that it answers with is loaded."""
        if self.status.phase is ServerPhase.LOADING:
            self.status.phase = ServerPhase.READY
            self.status.message = ""
            if self._listener is not None:
                logger.info("ready: requests are answered", extra=log_event("ServerReady", object=self.status.name))

    async def start(self) -> None:
        """Listen; HostError if the address is not available."""
        sys.setswitchinterval(GIL_SECONDS)
        self._listener = Listener(self.application, self.settings.http, self._tls)
        self.metrics.connections = lambda: 0 if self._listener is None else len(self._listener.connections)
        await self._listener.listen()
        if self._internal_application is not None:
            self._internal_listener = Listener(self._internal_application, _internal_settings(self.settings.http))
            try:
                await self._internal_listener.listen()
            except HostError as error:
                self._listener.stop_accepting()
                remedy = "Choose another --internal-port or --host (PENSTOCK_INTERNAL_PORT, PENSTOCK_HOST)"
                raise HostError(error.message, remedy=remedy) from error
            logger.info(
                "probes, /metrics and /info are on port %d",
                self.internal_port,
                extra=log_event("InternalPortListening", object=self.status.name),
            )
        if self._rpc is not None:
            await self._rpc.start()
            logger.info(
                "gRPC is on port %d", self.grpc_port, extra=log_event("GrpcPortListening", object=self.status.name)
            )
        if self.application.access_lines is not None:
            self._write_access_lines()
        self._refresh_files()
        if self.status.phase is ServerPhase.LOADING:
            logger.info(
                "listening on %s: %s; /readyz reports readiness",
                self.url,
                self.status.message,
                extra=log_event("ServerListening", object=self.status.name),
            )
        else:
            logger.info("listening on %s", self.url, extra=log_event("ServerListening", object=self.status.name))

    async def serve(self, *, signals: bool = True) -> int:
        """Serve until a signal or `stop`, then drain. Returns how many connections were cut off (0: none).

        `signals`: handle SIGTERM and SIGINT (main thread only); a second one ends the process at once.
        """
        if self._listener is None:
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
        """Start draining; `serve` returns when all requests are answered."""
        # A server that was never ready has no clients to wait for.
        self._was_ready |= self.status.phase is ServerPhase.READY
        for one in (self, *self._members):
            one.status.phase = ServerPhase.DRAINING
        if self._listener is not None:
            self._listener.draining = True
        self._stop.set()

    def fail(self, error: PenstockError) -> None:
        """Stop, because the model cannot run any longer: `/readyz` has the reason from now on."""
        if self.failure is None:
            self.failure = error
            self.status.failure = error.message
            logger.error(
                "%s: draining", error.message, extra=log_event("ServerFailed", object=self.status.name, reason=error)
            )
            self.stop()

    def _signalled(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            logger.warning(
                "%s again: ending at once",
                number.name,
                extra=log_event("SecondSignal", object=self.status.name, reason=number.name),
            )
            sys.stderr.flush()
            # Not sys.exit: that would raise inside the loop and wait for worker threads.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # That does not end the first process of a container.
            os._exit(128 + number)
        logger.info(
            "%s: draining", number.name, extra=log_event("ServerDraining", object=self.status.name, reason=number.name)
        )
        self.stop()

    async def _drain(self) -> int:
        """Answer all accepted requests, within the limit."""
        drain = self.settings.drain
        loop = asyncio.get_running_loop()
        end = loop.time() + drain.drain_limit_seconds
        assert self._listener is not None  # noqa: S101 - serve() has started it
        if drain.drain_delay_seconds and self._was_ready:
            await asyncio.sleep(drain.drain_delay_seconds)
        streams = loop.call_at(end - STREAM_END_SECONDS, self._end_streams)
        left = max(0.0, end - loop.time())
        closing = asyncio.gather(*([] if self._rpc is None else [self._rpc.stop(left)]))
        cut = await self._listener.close(idle_seconds=drain.drain_idle_seconds, limit_seconds=left)
        await closing
        if cut:
            logger.warning(
                "%d connections were cut off after %g s",
                cut,
                drain.drain_limit_seconds,
                extra=log_event("ConnectionsCutOff", object=self.status.name),
            )
        if self._predictors:
            try:
                async with asyncio.timeout(max(0.1, end - loop.time())):
                    await asyncio.gather(*(predictor.drain() for predictor in self._predictors))
            except TimeoutError:
                logger.warning(
                    "the model was still running after %g s",
                    drain.drain_limit_seconds,
                    extra=log_event("ModelStillRunning", object=self.status.name),
                )
        streams.cancel()
        if self._internal_listener is not None:
            # Last, so that probes are answered as long as requests are.
            left = min(INTERNAL_DRAIN_SECONDS, max(0.0, end - loop.time()))
            await self._internal_listener.close(idle_seconds=0.0, limit_seconds=left)
        for one in (self, *self._members):
            if one.application.traces is not None:
                await asyncio.to_thread(one.application.traces.close)
        for timer in (self._flush, self._refresh):
            if timer is not None:
                timer.cancel()
        self._write_lines()
        logger.info("drained", extra=log_event("ServerDrained", object=self.status.name))
        return cut

    def _end_streams(self) -> None:
        """End the texts that are still being generated, with an error that their clients can read."""
        for predictor in self._predictors:
            if isinstance(predictor, Generator):
                error = NotReady("the server ended before the text was complete", remedy="Send the request again")
                predictor.interrupt(error)

    def _refresh_files(self) -> None:
        """Read tokens and certificate again that have changed, from now on until the end."""
        tokens, tls = self.application.tokens, self._tls
        if tokens is not None:
            tokens.refresh()
            self.status.tokens = tokens.count
        if tls is not None:
            tls.refresh()
        if tokens is not None or tls is not None:
            self._refresh = asyncio.get_running_loop().call_later(REFRESH_SECONDS, self._refresh_files)

    def _write_access_lines(self) -> None:
        self._write_lines()
        self._flush = asyncio.get_running_loop().call_later(ACCESS_FLUSH_SECONDS, self._write_access_lines)

    def _write_lines(self) -> None:
        lines = self.application.access_lines
        if lines:
            sys.stderr.write("\n".join(lines) + "\n")
            lines.clear()
