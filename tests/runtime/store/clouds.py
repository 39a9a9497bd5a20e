"""Servers for the protocols of the other clouds: versitygw in place of Google, and Azurite of Microsoft, from npm.

Azurite is kept in ~/.cache/penstock/bin. It checks the key of the account; Google is simulated without credentials.
"""

from __future__ import annotations

import base64
import hmac
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.runtime.models.s3_server import free_port, running_s3

AZURITE_VERSION = "3.35.0"
AZURITE_MAIN = "node_modules/azurite/dist/src/blob/main.js"
ACCOUNT = "devstoreaccount1"
# Azurite's own, the same everywhere, and in its documentation.
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
START_SECONDS = 60
CACHE = Path.home() / ".cache" / "penstock" / "bin"


@dataclass(frozen=True)
class Cloud:
    """A running server."""

    scheme: str
    environment: Mapping[str, str]
    """What the store's own library reads."""


def connection_string(port: int, key: str = ACCOUNT_KEY) -> str:
    """Of an Azurite at this port."""
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={key};BlobEndpoint={endpoint};"


def make_container(cloud: Cloud, name: str) -> None:
    """Make a container of an Azurite. obstore has no such call."""
    facts = dict(part.split("=", 1) for part in cloud.environment["AZURE_STORAGE_CONNECTION_STRING"].split(";") if part)
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    signed = "".join(f"{key}:{headers[key]}\n" for key in ("x-ms-date", "x-ms-version"))
    text = f"PUT{chr(10) * 12}{signed}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.digest(base64.b64decode(facts["AccountKey"]), text.encode(), "sha256")
    headers["authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{facts['BlobEndpoint']}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, headers=headers, method="PUT")).close()


class GoogleFront(BaseHTTPRequestHandler):
    """Forwards requests of Google's XML protocol to an S3 server, which differs in paths and credentials."""

    protocol_version = "HTTP/1.1"
    port: int
    """Of the S3 server."""

    def do_GET(self) -> None:
        path, mark, query = self.path.partition("?")
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {key: value for key, value in self.headers.items() if key.lower() not in {"authorization", "host"}}
        with closing(HTTPConnection("127.0.0.1", self.port)) as server:
            server.request(self.command, unquote(path) + mark + query, content, headers)
            answer = server.getresponse()
            body = answer.read()
        self.send_response_only(answer.status)
        for key, value in answer.headers.items():
            if key.lower() not in {"transfer-encoding", "content-length"}:
                self.send_header(key, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_DELETE = do_GET  # noqa: N815 - the names that the library calls

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def running_gcs(folder: Path) -> Iterator[Cloud]:
    """An S3 server in place of Google's, with a public bucket `artefacts`, until the block ends."""
    (folder / "buckets" / "artefacts").mkdir(parents=True)
    with running_s3(folder / "buckets") as server, ExitStack() as stack:
        objects = [(["*"], action, "artefacts/*") for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject")]
        server.allow("artefacts", (["*"], "s3:ListBucket", "artefacts"), *objects)
        port = int(server.url.rpartition(":")[2])
        front = stack.enter_context(
            ThreadingHTTPServer(("127.0.0.1", 0), type("Front", (GoogleFront,), {"port": port}))
        )
        thread = threading.Thread(target=front.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(front.shutdown)
        yield Cloud("gs", {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{front.server_port}"})


@contextmanager
def running_azurite(folder: Path) -> Iterator[Cloud]:
    """Azure's, with an account and no container, until the block ends."""
    port = free_port()
    words = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck"]
    with _running(["node", str(_azurite()), *words, "--silent"], folder / "azurite.log", f"http://127.0.0.1:{port}/"):
        yield Cloud("az", {"AZURE_STORAGE_CONNECTION_STRING": connection_string(port)})


@contextmanager
def _running(command: list[str], log: Path, url: str) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)  # an answer is its only sign of readiness
            yield
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False


def _azurite() -> Path:
    home = CACHE / f"azurite-{AZURITE_VERSION}"
    if not home.is_dir():
        with _building("npm", "Azurite") as folder:
            _made(
                ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", f"azurite@{AZURITE_VERSION}"], {}
            )
            folder.rename(home)
    return home / AZURITE_MAIN


@contextmanager
def _building(tool: str, what: str) -> Iterator[Path]:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here to get {what}, the server of these tests")
    CACHE.mkdir(parents=True, exist_ok=True)
    # The build product may be the folder itself, which has then been moved.
    with tempfile.TemporaryDirectory(dir=CACHE, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _made(command: list[str], more: Mapping[str, str]) -> None:
    made = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.fail(f"{' '.join(command)}:\n{made.stderr[-2000:]}")
