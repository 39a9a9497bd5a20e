"""A small HTTP server that speaks the part of the Hugging Face hub's API that huggingface_hub calls to fetch a model.

Not the hub: it knows `/api/models/<repo>/revision/<revision>` and `/<repo>/resolve/<revision>/<file>` with ranges, the
error codes that the hub documents in its `X-Error-Code` header, tokens, and faults on demand.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

PATIENCE_SECONDS = 8.0
"""Less than the library's for a download that stalls (10 s)."""


@dataclass
class Repository:
    """One repository at one commit, reachable as `main` and by its commit."""

    files: dict[str, bytes]
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    token: str | None = None
    """The token that may read it; None: no token is needed."""
    gated: bool = False
    listed: dict[str, int] = field(default_factory=dict)
    """Sizes in the listing that differ from those of the files."""
    endless: str = ""
    """The file that does not end, whatever size is listed and stated."""


@dataclass
class Hub:
    """The server's state; tests change it while it runs."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    """Statuses that the next calls are answered with."""
    cut_after: int | None = None
    """Bytes after which the next download breaks off, once."""
    pause_after: int | None = None
    """Bytes after which the next download stalls, once, until `go_on`."""
    go_on: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    """Method, path and headers of every call."""
    url: str = ""

    def add(self, name: str, folder: Path, **options: object) -> Repository:
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[name] = Repository(files=files, **options)  # type: ignore[arg-type]
        return self.repositories[name]

    def fetched(self) -> list[str]:
        """Names of the files that were downloaded, in order."""
        return [path.split("/resolve/")[1].split("/", 1)[1] for method, path, _ in self.requests
                if method == "GET" and "/resolve/" in path]  # fmt: skip


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve on a free loopback port until the block ends."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append((self.command, path, dict(self.headers)))
        if self.state.failures:
            self._error(self.state.failures.pop(0))
            return
        match = re.fullmatch(r"/api/models/(.+)/revision/(.+)", path) or re.fullmatch(
            r"/(.+)/resolve/([^/]+)/(.+)", path
        )
        name = match[1] if match is not None else ""
        repository = self.state.repositories.get(name)
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if match is None or repository is None:
            # The hub does not reveal private repositories: without a token every unknown one is a 401.
            self._error(404 if given else 401, "RepoNotFound")
        elif repository.gated and given != repository.token:
            self._error(403, "GatedRepo")
        elif repository.token is not None and given != repository.token:
            self._error(401, None if given else "RepoNotFound", "Invalid credentials in Authorization header")
        elif match[2] not in {"main", repository.commit}:
            self._error(404, "RevisionNotFound")
        elif match.re.groups == 2:
            self._send(json.dumps(_info(name, repository)).encode(), {"Content-Type": "application/json"}, body=body)
        elif match[3] not in repository.files:
            self._error(404, "EntryNotFound")
        else:
            self._file(repository, repository.files[match[3]], body=body, endless=match[3] == repository.endless)

    def _file(self, repository: Repository, content: bytes, *, body: bool, endless: bool) -> None:
        if body and endless:
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            with suppress(ConnectionError):
                while True:
                    self.wfile.write(bytes(65536))
            return
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(span[1]) if span else 0
        if span:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(content[start:], headers, body=body, status=206 if span else 200, may_break=True)

    def _send(
        self, content: bytes, headers: Mapping[str, str], *, body: bool, status: int = 200, may_break: bool = False
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cut = self.state.cut_after if may_break and body else None
        if cut is not None and len(content) > cut:
            self.state.cut_after = None
            content = content[:cut]
            self.close_connection = True
        pause = self.state.pause_after if may_break and body else None
        if pause is not None and len(content) > pause:
            self.state.pause_after = None
            self.wfile.write(content[:pause])
            self.state.go_on.wait(PATIENCE_SECONDS)
            content = content[pause:]
        if body:
            self.wfile.write(content)

    def _error(self, status: int, code: str | None = None, message: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if message is not None:
            self.send_header("X-Error-Message", message)
        if status == 429:
            self.send_header("Retry-After", "7")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


def _info(name: str, repository: Repository) -> dict[str, object]:
    siblings = [
        {"rfilename": path, "size": repository.listed.get(path, len(content))}
        for path, content in repository.files.items()
    ]
    return {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings, "tags": [], "private": False}
