"""Behaviour of object stores that versitygw does not have, in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from penstock.artefact_store import StoreUri
from penstock.errors import PenstockError, SettingError, StoreAccessDenied, StoreError, StoreUnavailable
from penstock.manifest import MANIFEST_NAME
from penstock_runtime.remote import Bucket, Retries, open_bucket
from penstock_runtime.store import ArtefactStore, open_store
from penstock_runtime.store.fetch import digest_of, fault
from penstock_runtime.store.object_store import ObjectStore, store_error
from tests.runtime.store.artefacts import write_artefact

URI = StoreUri.parse("s3://bucket/team")
FEW = Retries(attempts=3, sleep=lambda _: None)


class FaultyStore(MemoryStore):  # type: ignore[misc]
    """A store in memory, with faults on demand."""

    def __init__(self) -> None:
        self.before_create: Callable[[str], None] = lambda _path: None
        self.before_put: Callable[[str], None] = lambda _path: None
        self.modes: list[str] = []
        """Of the writes of manifests."""

    @property
    def store(self) -> ArtefactStore:
        return ArtefactStore(ObjectStore(URI, Bucket(self, "team"), FEW))

    def put(self, path: str, file: Any, *, mode: Any = None, **options: Any) -> Any:
        self.before_put(path)
        if path.endswith(MANIFEST_NAME):
            self.modes.append(mode)
        if mode == "create":
            self.before_create(path)
        return super().put(path, file, mode=mode, **options)


@pytest.fixture
def bucket() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    return write_artefact(tmp_path / "artefact")


def test_a_store_without_conditional_writes_gets_plain_ones(
    bucket: FaultyStore, artefact: Path, tmp_path: Path
) -> None:
    def unknown(_: str) -> None:
        raise GenericError("Server returned non-2xx status code: 501 Not Implemented: a header is not implemented")

    bucket.before_create = unknown
    digest = bucket.store.publish(artefact).digest

    assert bucket.modes == ["create", "overwrite"]
    assert fault(bucket.store.fetch(digest, tmp_path / "cache"), digest) == ""


def test_the_second_publisher_keeps_the_manifest_of_the_first(bucket: FaultyStore, artefact: Path) -> None:
    def first(path: str) -> None:
        MemoryStore.put(bucket, path, (artefact / MANIFEST_NAME).read_bytes())

    bucket.before_create = first
    bucket.store.publish(artefact)

    assert bucket.modes == ["create"]


def test_a_wrong_manifest_is_replaced(bucket: FaultyStore, artefact: Path, tmp_path: Path) -> None:
    bucket.before_create = lambda path: MemoryStore.put(bucket, path, b"garbage")
    digest = bucket.store.publish(artefact).digest

    assert bucket.modes == ["create", "overwrite"]
    assert fault(bucket.store.fetch(digest, tmp_path / "cache"), digest) == ""


def test_a_broken_upload_is_tried_again(bucket: FaultyStore, artefact: Path, tmp_path: Path) -> None:
    failures = [ConnectionResetError("reset"), TimeoutError("slow")]

    def break_off(_: str) -> None:
        if failures:
            raise failures.pop()

    bucket.before_put = break_off
    digest = bucket.store.publish(artefact).digest

    assert failures == []
    assert fault(bucket.store.fetch(digest, tmp_path / "cache"), digest) == ""


def test_an_upload_that_breaks_every_time_leaves_no_complete_artefact(bucket: FaultyStore, artefact: Path) -> None:
    def break_off(path: str) -> None:
        if path.endswith("tokenizer.json"):
            raise ConnectionResetError("reset")

    bucket.before_put = break_off
    with pytest.raises(StoreUnavailable, match="does not answer"):
        bucket.store.publish(artefact)

    assert [stored.complete for stored in bucket.store.entries()] == [False]
    assert not bucket.store.backend.holds(digest_of(artefact), {MANIFEST_NAME: 1})


def test_a_programming_error_is_not_translated(bucket: FaultyStore, artefact: Path) -> None:
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


@pytest.mark.parametrize("address", ["ht!tp", "127.0.0.1:9000", "ftp://host", "http://"])
def test_an_address_that_is_no_url_is_a_wrong_setting(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)

    with pytest.raises(SettingError, match="is not the address of an object store"):
        open_store(URI)


def test_the_keys_of_a_profile_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[profile team]\nregion = eu-west-1\n[profile role]\nrole_arn = arn\n")
    (tmp_path / "credentials").write_text("[team]\naws_access_key_id = key\naws_secret_access_key = a%b\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")

    settings = open_bucket("s3", "bucket").store.config

    assert (settings["access_key_id"], settings["secret_access_key"]) == ("key", "a%b")
    assert settings["region"] == "eu-west-1"
    monkeypatch.setenv("AWS_PROFILE", "role")
    with pytest.raises(SettingError, match="the AWS profile role has no keys"):
        open_bucket("s3", "bucket")


def test_a_connection_string_of_azure_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "DefaultEndpointsProtocol=https;AccountName=account;AccountKey=a2V5;EndpointSuffix=core.windows.net"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)

    settings = open_bucket("az", "container").store.config

    assert settings["endpoint"] == "https://account.blob.core.windows.net"
    assert (settings["account_name"], settings["account_key"]) == ("account", "a2V5")


@pytest.mark.parametrize(
    ("uri", "variable"),
    [
        ("s3://bucket/x", "AWS_EC2_METADATA_DISABLED"),
        ("gs://bucket/x", "NO_GCE_CHECK"),
        ("az://container/x", "AZURE_TOKEN_CREDENTIALS"),
    ],
)
def test_a_pod_without_identity_and_keys_is_refused_at_once(
    uri: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, "true")

    with pytest.raises(StoreAccessDenied, match=f"no credentials, and {variable} is set"):
        open_store(StoreUri.parse(uri))


@pytest.mark.parametrize("account", ["evil.example/", "evil.example#", "a@evil.example", "A", "x" * 25])
def test_an_account_name_cannot_name_another_server(account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", account)

    with pytest.raises(SettingError, match="is not the name of a storage account"):
        open_store(StoreUri.parse("az://artefacts/team"))
