"""Behaviour of object stores that versitygw does not have, in memory."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from penstock.artefact_store import StoreUri
from penstock.errors import OutOfDisk, PenstockError, SettingError, StoreAccessDenied, StoreError, StoreUnavailable
from penstock.manifest import MANIFEST_NAME
from penstock_runtime.remote import Retries
from penstock_runtime.store import ArtefactStore, open_store
from penstock_runtime.store.fetch import digest_of, fault
from penstock_runtime.store.object_store import ObjectStore, store_error
from tests.runtime.store.artefacts import write_artefact

fsspec = pytest.importorskip("fsspec")

FEW = Retries(attempts=3, sleep=lambda _: None)


class Bucket:
    """fsspec's memory file system as `s3://` would answer, with faults on demand."""

    def __init__(self) -> None:
        self.files = fsspec.filesystem("memory")
        self.uri = StoreUri.parse(f"s3://bucket-{uuid4().hex}/team")
        self.files.mkdir(f"/{self.uri.location.partition('/')[0]}")
        self.before_create: Callable[[str], None] = lambda _path: None
        self.before_put: Callable[[str], None] = lambda _path: None
        self.modes: list[str] = []

    @property
    def store(self) -> ArtefactStore:
        return ArtefactStore(ObjectStore(self.uri, self, FEW))

    def ls(self, path: str, detail: bool = True) -> Any:
        return self.files.ls(path, detail=detail)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        content: bytes = self.files.cat_file(path, start=start, end=end)
        return content

    def invalidate_cache(self, path: str | None = None) -> None:
        self.files.invalidate_cache(path)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.before_put(rpath)
        self.files.put_file(lpath, rpath)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        self.modes.append(mode)
        if mode == "create":
            self.before_create(path)
        self.files.pipe_file(path, value, mode=mode)

    def rm_file(self, path: str) -> None:
        self.files.rm_file(path)


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    return write_artefact(tmp_path / "artefact")


def test_a_store_without_conditional_writes_gets_plain_ones(bucket: Bucket, artefact: Path, tmp_path: Path) -> None:
    def unknown(_: str) -> None:
        raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")

    bucket.before_create = unknown
    digest = bucket.store.publish(artefact).digest

    assert bucket.modes == ["create", "overwrite"]
    assert fault(bucket.store.fetch(digest, tmp_path / "cache"), digest) == ""


def test_the_second_publisher_keeps_the_manifest_of_the_first(bucket: Bucket, artefact: Path) -> None:
    def first(path: str) -> None:
        bucket.files.pipe_file(path, (artefact / MANIFEST_NAME).read_bytes())

    bucket.before_create = first
    bucket.store.publish(artefact)

    assert bucket.modes == ["create"]


def test_a_wrong_manifest_is_replaced(bucket: Bucket, artefact: Path, tmp_path: Path) -> None:
    bucket.before_create = lambda path: bucket.files.pipe_file(path, b"garbage")
    digest = bucket.store.publish(artefact).digest

    assert bucket.modes == ["create", "overwrite"]
    assert fault(bucket.store.fetch(digest, tmp_path / "cache"), digest) == ""


def test_a_broken_upload_is_tried_again(bucket: Bucket, artefact: Path, tmp_path: Path) -> None:
    failures = [ConnectionResetError("reset"), TimeoutError("slow")]

    def break_off(_: str) -> None:
        if failures:
            raise failures.pop()

    bucket.before_put = break_off
    digest = bucket.store.publish(artefact).digest

    assert failures == []
    assert fault(bucket.store.fetch(digest, tmp_path / "cache"), digest) == ""


def test_an_upload_that_breaks_every_time_leaves_no_complete_artefact(bucket: Bucket, artefact: Path) -> None:
    def break_off(path: str) -> None:
        if path.endswith("tokenizer.json"):
            raise ConnectionResetError("reset")

    bucket.before_put = break_off
    with pytest.raises(StoreUnavailable, match="does not answer"):
        bucket.store.publish(artefact)

    assert [stored.complete for stored in bucket.store.entries()] == [False]
    assert not bucket.store.backend.holds(digest_of(artefact), {MANIFEST_NAME: 1})


def test_a_programming_error_is_not_translated(bucket: Bucket, artefact: Path) -> None:
    def defect(_: str) -> None:
        raise TypeError("a defect")

    bucket.before_put = defect
    with pytest.raises(TypeError, match="a defect"):
        bucket.store.publish(artefact)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("no bucket"), StoreError),
        (PermissionError("denied"), StoreAccessDenied),
        (OSError(errno.ENOSPC, "No space left on device"), OutOfDisk),
        (ValueError("Invalid endpoint: ht!tp"), StoreError),
        (ConnectionRefusedError("refused"), StoreUnavailable),
        (TimeoutError(), StoreUnavailable),
    ],
)
def test_every_error_has_a_remedy(error: Exception, kind: type[PenstockError]) -> None:
    known = store_error(error, StoreUri.parse("s3://bucket/x"))

    assert type(known) is kind
    assert known.remedy
    assert "\n" not in str(known)
    assert "s3://bucket/x" in known.message


@pytest.mark.parametrize("account", ["evil.example/", "evil.example#", "a@evil.example", "A", "x" * 25])
def test_an_account_name_cannot_name_another_server(account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", account)

    with pytest.raises(SettingError, match="is not the name of a storage account"):
        open_store(StoreUri.parse("az://artefacts/team"))
