"""Servers that speak the other clouds' protocols: fake-gcs-server from its Go module, and Microsoft's Azurite from npm.

Both are kept in ~/.cache/penstock/bin. They check no tokens as the clouds do; Azurite checks the account's key.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime.models.s3_server import free_port

GCS_VERSION = "v1.56.1"
GCS_MODULE = "github.com/fsouza/fake-gcs-server"
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


@contextmanager
def running_gcs(folder: Path) -> Iterator[Cloud]:
    """Google's, with a bucket `artefacts`, until the block ends."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (folder / "seed" / "artefacts").mkdir(parents=True)
    words = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url]
    words += ["-backend", "memory", "-data", str(folder / "seed")]
    with _running([str(_gcs_binary()), *words], folder / "gcs.log", f"{url}/storage/v1/b/artefacts"):
        yield Cloud("gs", {"STORAGE_EMULATOR_HOST": url})


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
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _gcs_binary() -> Path:
    binary = CACHE / f"fake-gcs-server-{GCS_VERSION}"
    if not binary.is_file():
        with _building("go", "fake-gcs-server") as folder:
            _made(["go", "install", "-ldflags=-s", f"{GCS_MODULE}@{GCS_VERSION}"], {"GOBIN": str(folder)})
            (folder / "fake-gcs-server").replace(binary)
    return binary


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
