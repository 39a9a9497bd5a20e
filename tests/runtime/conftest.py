"""Fixtures of the runtime's tests: a real S3 server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.runtime.models.s3_server import S3, running_s3


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A server with the buckets `models` and `artefacts`."""
    pytest.importorskip("obstore")
    root = tmp_path_factory.mktemp("s3") / "buckets"
    for bucket in ("models", "artefacts"):
        (root / bucket).mkdir(parents=True)
    with running_s3(root) as server:
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """The same with its address and keys in the environment. Its buckets are empty."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    yield s3_server
    for bucket in ("models", "artefacts"):
        for child in (s3_server.root / bucket).iterdir():
            shutil.rmtree(child)
