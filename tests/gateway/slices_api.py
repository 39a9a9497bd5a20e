"""The part of the API server that the gateway uses: the EndpointSlices of a Service, listed and watched over HTTP."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock_gateway.slices import CANARY_PERCENT

Json = dict[str, Any]


class SlicesApi:
    """`put` changes the slices; every watch gets the event."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 1
        self.slice = slice_of({}, 1)
        self.names: dict[int, set[str]] = {1: names_of(self.slice)}
        """Changes of the slices, by version, for watches."""
        self.queries: list[dict[str, list[str]]] = []
        self.failing = False
        self.over = False
        self.expire = 0
        """The number of watches that are refused because their version is too old."""

    def put(self, ready: dict[str, int], terminating: dict[str, int] | None = None, *, canary_percent: int = 0) -> None:
        """Names and ports of the replicas, all on loopback; the share of a canary is in the label of the slices."""
        self._becomes({**slice_of(ready, self.version + 1, terminating or {}), "percent": canary_percent})

    def remove(self) -> None:
        """Delete the Service with all its slices."""
        self._becomes({**slice_of({}, self.version + 1), "gone": True})

    def _becomes(self, value: Json) -> None:
        with self.changed:
            self.version += 1
            self.slice = value
            self.names[self.version] = names_of(value)
            self.changed.notify_all()

    def fail(self, failing: bool) -> None:
        """From now on answer no request, and cut open watches off."""
        with self.changed:
            self.failing = failing
            self.changed.notify_all()


def slice_of(ready: dict[str, int], version: int, terminating: dict[str, int] | None = None) -> Json:
    """A slice for each port would be usual; the tests' replicas share an address and differ in the port."""
    return {
        "metadata": {"name": "emotion-pods-1", "resourceVersion": str(version)},
        "ready": ready,
        "ends": terminating,
    }


def real_slices(value: Json) -> list[Json]:
    """The list of slices: replicas of different ports are in different slices, a Service without any has one."""
    made: list[Json] = []
    version = value["metadata"]["resourceVersion"]
    labels = {CANARY_PERCENT: str(value["percent"])} if value.get("percent") else {}
    for ends, group in ((False, value["ready"]), (True, value["ends"] or {})):
        for name, port in group.items():
            conditions = {"ready": not ends, "serving": True, "terminating": ends}
            made.append(
                {
                    "metadata": {"name": f"slice-{name}", "resourceVersion": version, "labels": labels},
                    "ports": [{"name": "http", "port": port}],
                    "endpoints": [{"addresses": ["127.0.0.1"], "conditions": conditions, "targetRef": {"name": name}}],
                }
            )
    if not made and not value.get("gone"):
        made.append({"metadata": {"name": "slice-empty", "resourceVersion": version}, "ports": None, "endpoints": None})
    return made


def names_of(value: Json) -> set[str]:
    """Start a watch of its slices."""
    return {piece["metadata"]["name"] for piece in real_slices(value)}


@contextmanager
def serving_slices() -> Iterator[tuple[SlicesApi, str]]:
    """The server and its URL."""
    api = SlicesApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            with api.changed:
                api.queries.append(query)
                if api.failing:
                    self.send_error(500)
                    return
                if "watch" not in query:
                    body = {
                        "metadata": {"resourceVersion": str(api.version)},
                        "items": real_slices(api.slice),
                    }
                    self.answer(json.dumps(body).encode())
                    return
                if api.expire:
                    api.expire -= 1
                    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
                    self.answer(json.dumps(gone).encode() + b"\n")
                    return
            self.watch(int(query["resourceVersion"][0]))

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def watch(self, since: int) -> None:
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            before = api.names[since]
            while True:
                with api.changed:
                    while not (api.version > since or api.failing or api.over):
                        api.changed.wait()
                    if api.failing or api.over:
                        self.close_connection = True
                        return
                    since = api.version
                    pieces = real_slices(api.slice)
                names = {piece["metadata"]["name"] for piece in pieces}
                lines = [{"type": "MODIFIED", "object": piece} for piece in pieces]
                for name in before - names:
                    metadata = {"name": name, "resourceVersion": str(since)}
                    lines.append({"type": "DELETED", "object": {"metadata": metadata}})
                before = names
                for line in lines:
                    data = json.dumps(line).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
                self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="slices", daemon=True)
    thread.start()
    try:
        yield api, f"http://127.0.0.1:{server.server_port}"
    finally:
        with api.changed:
            api.over = True
            api.changed.notify_all()
        server.shutdown()
        server.server_close()
        thread.join(5)
