"""Spans of requests for OpenTelemetry, sent to a collector by OTLP over HTTP. The only importer of `opentelemetry`.

A span for each traced request, as a child of the client's if the request has a `traceparent` (W3C Trace Context), with
four children: tokenise, queue, infer, respond. Their durations are in the response's headers.
They follow one another, although in a request with several rows some rows wait while other rows run.
"""

from __future__ import annotations

import random
import re
import time

from penstock.errors import MissingPackage
from penstock_runtime.http.transport.message import Request
from penstock_runtime.settings import TraceSettings

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_STEPS = {
    "tokenise": re.compile(rb"x-tokenization-time: ([0-9.]+)\r\n"),
    "queue": re.compile(rb"x-queue-time: ([0-9.]+)\r\n"),
    "infer": re.compile(rb"x-inference-time: ([0-9.]+)\r\n"),
}
_TOKENS = re.compile(rb"x-compute-tokens: ([0-9]+)\r\n")
EXPORT_SECONDS = 2
"""Limit of one export, and so of the last one when the server ends."""


class RequestTraces:
    """Records spans of requests. A thread of the SDK sends them; if the collector is too slow, spans are dropped."""

    def __init__(self, service: str, settings: TraceSettings) -> None:
        """`service`: the endpoint's name. MissingPackage without the extra `tracing`."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingPackage(
                f"--trace-endpoint needs OpenTelemetry ({error})",
                remedy="Run pip install 'penstock[tracing]', or build the image with RUNTIME_EXTRAS=tracing",
            ) from error
        self._share = settings.trace_share
        # `is_traced` decides.
        self._provider = TracerProvider(ALWAYS_ON, Resource.create({"service.name": service}), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(settings.trace_endpoint, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock")
        self._propagator = TraceContextTextMapPropagator()
        self._within = set_span_in_context
        self._server = SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)

    def is_traced(self, request: Request) -> bool:
        """By the flag of the client's `traceparent`; without one, by the share of the setting."""
        match = _TRACEPARENT.fullmatch(request.headers.get(b"traceparent", b""))
        if match is not None:
            return bool(int(match[1], 16) & _SAMPLED)
        return random.random() < self._share  # noqa: S311 - no secret depends on it

    def record(self, request: Request, status: int, headers: bytes, seconds: float) -> None:
        """Record a request that has just been answered with this status and these header lines, `seconds` after its
        last byte had arrived."""
        if not self.is_traced(request):
            return
        end = time.time_ns()
        begin = end - round(seconds * 1e9)
        carrier = {
            header: request.headers[header.encode()].decode("latin-1")
            for header in ("traceparent", "tracestate")
            if header.encode() in request.headers
        }
        attributes: dict[str, str | int] = {
            "http.request.method": request.method,
            "url.path": request.path,
            "http.response.status_code": status,
            "penstock.request_id": request.identifier.decode("ascii"),
        }
        name = request.method
        if request.route is not None:
            attributes["http.route"] = request.route.path
            name += f" {request.route.path}"
        tokens = _TOKENS.search(headers)
        if tokens is not None:
            attributes["penstock.tokens"] = int(tokens[1])
        span = self._tracer.start_span(
            name, context=self._propagator.extract(carrier), kind=self._server, attributes=attributes, start_time=begin
        )
        if status >= 500:
            span.set_status(self._error)
        within = self._within(span)
        at = begin
        if tokens is not None:
            for step, pattern in _STEPS.items():
                found = pattern.search(headers)
                until = min(end, at + round(float(found[1]) * 1e6)) if found else at
                self._tracer.start_span(step, context=within, start_time=at).end(until)
                at = until
        self._tracer.start_span("respond", context=within, start_time=at).end(end)
        span.end(end)

    def close(self) -> None:
        """Send the rest, for `EXPORT_SECONDS` at most."""
        self._provider.shutdown()
