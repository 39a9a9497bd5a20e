"""A receiver of OTLP over HTTP, as an OpenTelemetry collector has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What has arrived."""

    url: str
    services: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def wait(self, count: int) -> list[Span]:
        """The spans, once there are as many."""
        deadline = time.monotonic() + 60
        while len(self.spans) < count:
            assert time.monotonic() < deadline, f"{len(self.spans)} spans have arrived, not {count}"
            time.sleep(0.02)
        return self.spans


def attributes(span: Span) -> dict[str, Any]:
    """Of a span, as Python values."""
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for resource in request.resource_spans:
                found.services += [
                    one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
                ]
                found.spans += [span for scope in resource.scope_spans for span in scope.spans]
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
