"""Answers requests: finds the route, checks the token, makes responses of exceptions, counts for the metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

from penstock.errors import closest
from penstock.logs import log_event
from penstock.tasks import TaskName
from penstock_runtime.admission import FairLine, client_of
from penstock_runtime.coverage import Coverage
from penstock_runtime.errors import (
    ClientGone,
    MalformedBody,
    MethodNotAllowed,
    RequestError,
    UnsupportedRoute,
    for_gateway,
)
from penstock_runtime.http.access import AccessTokens
from penstock_runtime.http.api.core.bodies import LargeResponse, error_response
from penstock_runtime.http.api.guard.verdicts import VerdictOutcome
from penstock_runtime.http.tracing import RequestTraces
from penstock_runtime.http.transport.message import (
    ErrorFormat,
    Request,
    Response,
    Route,
    StreamingResponse,
    body_too_large,
)
from penstock_runtime.http.transport.streaming import ByteStream
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.settings import Settings

logger = logging.getLogger("penstock.http")

T = TypeVar("T")

UNKNOWN = "(unknown)"
"""The route label of requests without a route: paths of clients must not become label values."""
OWN_HEADERS = b"authorization, content-type, x-deadline-ms, x-request-id"
"""Request headers that pages may send, if the browser names none."""
BELOW_OPENAI = "/openai"
"""Where KServe's runtime for Hugging Face models has OpenAI's API."""
WITHOUT_VERSION = frozenset({"/embeddings", "/models", "/completions", "/chat/completions"})
"""Paths of OpenAI's API as text-embeddings-inference, infinity and llama.cpp have them."""
LONGEST_SHOWN_PATH = 100
"""Characters."""
HEADER_NAMES = re.compile(rb"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+)*")


class Router:
    """The routes of one endpoint. Paths of other tasks are known as well, so that a 404 can name the task."""

    def __init__(self, routes: Iterable[Route], task: TaskName, *, on_internal_port: Iterable[Route] = ()) -> None:
        """`on_internal_port`: routes that another router serves on the internal port, so that a 404 can say where."""
        self.task = task
        self._on_internal_port = frozenset(route.path for route in on_internal_port)
        every = tuple(routes)
        self.routes = tuple(route for route in every if route.tasks is None or task in route.tasks)
        self._elsewhere = {
            route.path: route.tasks for route in every if route.tasks is not None and task not in route.tasks
        }
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        by_path: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            by_path.setdefault(route.path, {}).setdefault(route.method, route)
        for path, methods in by_path.items():
            if "{" in path:
                pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path))
                self._patterns.append((re.compile(pattern), methods))
            else:
                self._exact[path] = methods

    def methods(self, path: str) -> tuple[dict[str, Route], dict[str, str]]:
        """Routes by method for this path, and the path's parameters; both empty for an unknown path."""
        found = self._exact.get(path)
        if found is not None:
            return found, {}
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                return methods, {name: unquote(value) for name, value in match.groupdict().items()}
        if len(path) > 1 and path.endswith("/"):
            return self.methods(path.rstrip("/") or "/")
        usual = usual_path(path)
        return ({}, {}) if usual == path else self.methods(usual)

    def resolve(self, request: Request) -> None:
        """Set the request's route and parameters.

        UnsupportedRoute (404) names the existing routes; MethodNotAllowed (405) names the methods.
        """
        methods, request.parameters = self.methods(request.path)
        if not methods:
            raise self._missing(request.path)
        route = methods.get(request.method)
        if route is None and request.method == "HEAD":
            route = methods.get("GET")
        if route is None:
            allow = allowed(methods)
            raise MethodNotAllowed(f"{request.path} does not take {request.method}", allow=allow)
        request.route = route

    def _missing(self, path: str) -> UnsupportedRoute:
        posts = sorted({route.path for route in self.routes if route.method == "POST" and "{" not in route.path})
        if not posts:
            paths = ", ".join(route.path for route in self.routes)
            return UnsupportedRoute("this port is for probes and monitoring", remedy=f"GET one of {paths}")
        if path in self._on_internal_port:
            return UnsupportedRoute(
                f"{path} is served on the internal port only",
                remedy="Ask that port (--internal-port, PENSTOCK_INTERNAL_PORT) from inside the cluster or the host",
            )
        remedy = f"POST to {', '.join(posts)}; /docs describes them"
        tasks = self._elsewhere.get(usual_path(path))
        if tasks is not None:
            wanted = " or ".join(sorted(tasks))
            return UnsupportedRoute(f"{path} is for {wanted}, and this endpoint does {self.task.value}", remedy=remedy)
        if len(path) > LONGEST_SHOWN_PATH:
            # No hint: comparing a path of 30 KB with all routes blocks the event loop for 9 ms.
            return UnsupportedRoute(f"there is no {path[:LONGEST_SHOWN_PATH]}…", remedy=remedy)
        close = closest(path, (route.path for route in self.routes), cutoff=0.75)
        hint = f"; did you mean {close}?" if close else ""
        return UnsupportedRoute(f"there is no {path}{hint}", remedy=remedy)


def usual_path(path: str) -> str:
    """The path of OpenAI's API for one that other servers have it below; others as they are."""
    if path.startswith(f"{BELOW_OPENAI}/v1/"):
        return path.removeprefix(BELOW_OPENAI)
    return f"/v1{path}" if path in WITHOUT_VERSION else path


def allowed(methods: Mapping[str, Route]) -> tuple[str, ...]:
    """The value of an Allow header."""
    names = {*methods, "OPTIONS"}
    if "GET" in names:
        names.add("HEAD")
    return tuple(sorted(names))


class _CountedStream:
    """A stream that reports its end: 499 if the client had gone by then, 500 if it failed, else 200; and the bytes that
    were sent."""

    def __init__(self, stream: ByteStream, ended: Callable[[int, int], None]) -> None:
        self._stream = stream
        self._ended = ended
        self._bytes = 0
        self._status = ClientGone.status

    async def read(self) -> bytes:
        """The next piece."""
        try:
            piece = await self._stream.read()
        except Exception:
            self._status = RequestError.status
            raise
        self._bytes += len(piece)
        if not piece:
            self._status = 200
        return piece

    def close(self) -> None:
        """No more is read."""
        self._stream.close()
        self._ended(self._status, self._bytes)


def takes_api_key(route: Route | None) -> bool:
    """Whether the clients of a route send their key in x-api-key."""
    return route is not None and (route.guards or route.error_format is ErrorFormat.ANTHROPIC)


class Suspended(Generic[T]):
    """A coroutine at its first wait, to be continued in a task.

    The request of a single client is often answered without waiting. A task and the iteration of the event loop that
    starts it would cost about as much as reading the request. (asyncio has eager tasks from Python 3.12 on.)
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:
        """`coroutine` must have run up to a wait: one that has not started could not clean up if it is cancelled before
        its task starts."""
        self._coroutine = coroutine
        self._waits_for = waits_for
        self._task: asyncio.Task[None] | None = None

    def resume(self, loop: asyncio.AbstractEventLoop, done: Callable[[T], None]) -> None:
        """Continue in a task, which calls `done` with the result."""
        self._task = loop.create_task(self._run(done))

    async def _run(self, done: Callable[[T], None]) -> None:
        done(await self)

    def cancel(self) -> None:
        """Let the coroutine clean up if it has not ended: with CancelledError, or with GeneratorExit if its task has
        not started."""
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()
            # A task that is cancelled before it starts does not close the coroutine.
            self._task.add_done_callback(self._close)

    def _close(self, _task: object) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        """Continue as if the task had run the coroutine from the start."""
        step: Callable[[], Any]
        while True:
            try:
                sent = yield self._waits_for
            except BaseException as error:  # passed on to the coroutine, also a cancellation
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, sent)
            try:
                self._waits_for = step()
            except StopIteration as done:
                result: T = done.value
                return result


def run_eagerly(coroutine: Coroutine[Any, Any, T]) -> T | Suspended[T]:
    """Run a coroutine until its first wait: its result if it never waits, else the suspended coroutine.

    Raises the exceptions of the coroutine until then.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    return Suspended(coroutine, waits_for)


class Application:
    """Answers requests with the handlers of a router."""

    def __init__(self, router: Router, settings: Settings, metrics: ServerMetrics, *, wants_token: bool = True) -> None:
        """`wants_token`: false for the internal port, which the network protects."""
        self.router = router
        self.metrics = metrics
        self.body_limit = settings.limits.max_body_bytes
        self.tokens = AccessTokens(settings.access) if wants_token and settings.access.wants_token else None
        """None: no request needs a token."""
        self._origins = frozenset(settings.access.cors_origins)
        self.access_lines: list[str] | None = [] if settings.log.access_log else None
        """Lines for the access log; the server writes them once a second."""
        self._writing = FairLine(1, settings.queue, "the writing of large answers")
        self.traces: RequestTraces | None = None
        """Set by the server if requests are traced."""

    # Before the body is read

    def admit(self, request: Request, body_bytes: int | None) -> None:
        """Find the route, check token and length; RequestError to refuse the request before its body is read."""
        if request.method == "OPTIONS":
            return
        self.router.resolve(request)
        if self.tokens is not None and not (request.route is not None and request.route.public):
            request.token = self.tokens.name_in(request.headers, takes_api_key=takes_api_key(request.route))
        if body_bytes is not None and body_bytes > self.body_limit:
            raise body_too_large(self.body_limit)

    @property
    def admission_version(self) -> int:
        """Changes when a request that was admitted before may be refused now."""
        return 0 if self.tokens is None else self.tokens.version

    # After the body is read

    def answer(self, request: Request) -> Response | Suspended[Response]:
        """Run the handler up to its first wait: the response if it has made it, else the suspended handler, which
        raises only when it is cancelled."""
        self.metrics.in_flight += 1
        route = request.route
        if route is None:
            return self._finish(request, self._options(request))
        try:
            result = route.handler(request)
        except Exception as error:
            return self._finish(request, self._failed(request, error))
        if isinstance(result, Response):
            return self._finish(request, result)
        return run_eagerly(self._await(request, result))

    async def _await(self, request: Request, result: Awaitable[Response]) -> Response:
        try:
            response = await result
            if isinstance(response, LargeResponse):
                async with self._writing.slot(client_of(request.token, request.client)):
                    await response.write()
        except (asyncio.CancelledError, GeneratorExit):  # the latter: cancelled before its task started
            self._finish(request, Response(status=ClientGone.status))
            raise
        except Exception as error:
            response = self._failed(request, error)
        return self._finish(request, response)

    def refuse(self, request: Request | None, error: RequestError) -> Response:
        """The error response to a request that was refused before its body was read, or is not HTTP."""
        self.metrics.in_flight += 1
        request = request or Request("", "")
        request.received = request.received or time.perf_counter()
        return self._finish(request, self._error(request, error))

    def _finish(self, request: Request, response: Response) -> Response:
        """Count a response, a streaming one at its end; called once for each request."""
        if isinstance(response, StreamingResponse):
            response.stream = _CountedStream(response.stream, partial(self._count, request, response.headers))
        else:
            self._count(request, response.headers, response.status, len(response.body))
        if self._origins:
            response.headers += self._cors(request)
        return response

    def _count(self, request: Request, headers: bytes, status: int, sent_bytes: int) -> None:
        route = request.route
        seconds = time.perf_counter() - request.received
        metrics = self.metrics
        if request.is_bulk:
            metrics.bulk_finished(status)
        else:
            metrics.in_flight -= 1
            label = UNKNOWN if route is None else route.path
            metrics.finished(label, status, seconds, inference=route is not None and route.inference)
        if route is not None and route.classifies:
            metrics.guard.classified(request.coverage, status)
        if self.traces is not None:
            self.traces.record(request, status, headers, seconds)
        if self.access_lines is not None:
            self.access_lines.append(
                f"{request.method} {request.path} {status} {seconds * 1000:.3f}ms "
                f"{len(request.body)}B>{sent_bytes}B {request.identifier.decode('ascii')} "
                f"{request.address or '-'} {request.token or '-'}"
            )

    def _failed(self, request: Request, error: Exception) -> Response:
        if isinstance(error, RecursionError):
            # JSON may be nested as deeply as Python's calls, of which some were made when its values are used.
            error = MalformedBody("the body is nested too deeply", remedy="Send a flatter one")
        if isinstance(error, RequestError):
            if error.status == RequestError.status:  # an internal error; all other errors are in the metrics
                identifier = request.identifier.decode("ascii")
                logger.error(
                    "request %s: %s",
                    identifier,
                    error.message,
                    extra=log_event("RequestFailed", object=identifier, reason=error),
                )
            return self._error(request, error)
        identifier = request.identifier.decode("ascii")
        logger.error(
            "request %s failed",
            identifier,
            exc_info=error,
            extra=log_event("RequestDefect", object=identifier, reason=error),
        )
        return self._error(
            request,
            RequestError(
                "the server failed on this request",
                remedy=f"Its log has the details under the request id {identifier}",
            ),
        )

    def _error(self, request: Request, error: RequestError) -> Response:
        route = request.route
        if route is not None and route.guards:
            if error.status == RequestError.status:
                request.coverage = Coverage.FAILED
            error = for_gateway(error)
            if error.status >= RequestError.status:
                self.metrics.guard.verdict(VerdictOutcome.UNAVAILABLE)
        if not request.is_bulk:
            self.metrics.refused(error.error_type)
        return error_response(error, self._error_format(request.path) if route is None else route.error_format)

    @staticmethod
    def _error_format(path: str) -> ErrorFormat:
        """For paths without a route: clients of OpenAI use paths below /v1."""
        path = usual_path(path)
        return ErrorFormat.OPENAI if path.startswith("/v1/") and path != "/v1/rerank" else ErrorFormat.PENSTOCK

    def _options(self, request: Request) -> Response:
        methods, _ = self.router.methods(request.path)
        names = allowed(methods) if methods else ("GET", "HEAD", "OPTIONS", "POST")
        headers = b"allow: %b\r\n" % ", ".join(names).encode()
        if self._origins and b"access-control-request-method" in request.headers:
            # SDKs add headers such as x-stainless-os to every request; they are allowed and ignored.
            asked = request.headers.get(b"access-control-request-headers", b"")
            headers += (
                b"access-control-allow-methods: %b\r\naccess-control-allow-headers: %b\r\n"
                b"access-control-max-age: 600\r\n"
                % (", ".join(names).encode(), asked if HEADER_NAMES.fullmatch(asked) else OWN_HEADERS)
            )
        return Response(status=204, headers=headers)

    def _cors(self, request: Request) -> bytes:
        origin = request.headers.get(b"origin", b"")
        if "*" in self._origins:
            allow = b"*"
        elif origin.decode("latin-1") in self._origins:
            allow = origin
        else:
            return b"vary: origin\r\n"
        return (
            b"access-control-allow-origin: %b\r\nvary: origin\r\n"
            b"access-control-expose-headers: inference-header-content-length, retry-after, x-compute-time, "
            b"x-compute-tokens, x-inference-time, x-queue-time, x-request-id, x-tokenization-time, x-truncated, "
            b"x-artefact, x-vector-space\r\n" % allow
        )
