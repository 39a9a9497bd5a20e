"""The store on Google's and Azure's protocols."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import ArtefactError, ArtefactNotFound, PenstockError, StoreAccessDenied, StoreUnavailable
from penstock.manifest import MANIFEST_NAME
from penstock_runtime.models.sources.transfer import FetchProgress
from penstock_runtime.remote import Retries, open_bucket
from penstock_runtime.store import ArtefactStore, open_store
from penstock_runtime.store.fetch import digest_of, fault
from tests.runtime.models.s3_server import free_port
from tests.runtime.store.artefacts import FILES, names, publish_at_once, write_artefact
from tests.runtime.store.clouds import (
    ACCOUNT_KEY,
    Cloud,
    connection_string,
    make_container,
    running_azurite,
    running_gcs,
)

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

FEW = Retries(attempts=2, sleep=lambda _: None)
SERVERS = {"gs": running_gcs, "az": running_azurite}


@pytest.fixture(scope="module", params=["gs", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    pytest.importorskip("obstore")
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as running, ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in running.environment.items():
            patch.setenv(name, value)
        if running.scheme == "az":
            make_container(running, "artefacts")
        yield running


@pytest.fixture
def uri(server: Cloud, request: pytest.FixtureRequest) -> StoreUri:
    """A prefix of this test's own."""
    return StoreUri.parse(f"{server.scheme}://artefacts/{abs(hash(request.node.name))}")


@pytest.fixture
def store(uri: StoreUri) -> ArtefactStore:
    return open_store(uri, retries=FEW)


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    return write_artefact(tmp_path / "artefact")


def test_an_artefact_is_visible_after_publishing_and_is_fetched_unchanged(
    store: ArtefactStore, artefact: Path, tmp_path: Path
) -> None:
    seen: list[tuple[str, bool]] = []

    def look(progress: FetchProgress) -> None:
        seen.append((progress.file, any(one.complete for one in store.entries())))

    assert store.entries() == ()
    published = store.publish(artefact, look)
    folder = store.fetch(published.digest, tmp_path / "cache")

    assert names(folder) == {*FILES, MANIFEST_NAME}
    assert fault(folder, published.digest) == ""
    assert seen[-1] == (MANIFEST_NAME, True)
    assert not any(complete for _, complete in seen[:-1])


def test_publishing_again_finds_the_artefact_and_renews_its_time(store: ArtefactStore, artefact: Path) -> None:
    store.publish(artefact)
    (before,) = store.entries()

    assert store.publish(artefact).found
    (after,) = store.entries()
    assert after.modified >= before.modified
    assert abs(datetime.now(UTC) - after.modified) < timedelta(minutes=5)


def test_concurrent_publishers_leave_one_complete_artefact(uri: StoreUri, artefact: Path, tmp_path: Path) -> None:
    assert publish_at_once(4, lambda: open_store(uri, retries=FEW), artefact) == []
    digest = digest_of(artefact)
    assert fault(open_store(uri, retries=FEW).fetch(digest, tmp_path / "cache"), digest) == ""


@pytest.mark.parametrize("name", ["tokenizer.json", MANIFEST_NAME])
def test_a_damaged_object_is_never_served_and_is_repaired_by_publishing(
    store: ArtefactStore, uri: StoreUri, artefact: Path, tmp_path: Path, name: str
) -> None:
    digest = store.publish(artefact).digest
    open_bucket(uri.scheme.value, f"{uri.location}/{digest.hexadecimal}").write(name, b"damaged")

    with pytest.raises(ArtefactError, match=f"/{name} is not the"):
        store.fetch(digest, tmp_path / "cache")
    assert not store.publish(artefact).found
    assert fault(store.fetch(digest, tmp_path / "cache"), digest) == ""


def test_a_missing_artefact_or_container_is_an_error(
    store: ArtefactStore, uri: StoreUri, artefact: Path, tmp_path: Path
) -> None:
    with pytest.raises(ArtefactNotFound, match="is not in the store"):
        store.fetch(Digest.of(b"nothing"), tmp_path / "cache")
    digest = store.publish(artefact).digest
    open_bucket(uri.scheme.value, f"{uri.location}/{digest.hexadecimal}").delete("tokenizer.json")
    with pytest.raises(ArtefactError, match=r"is incomplete: tokenizer\.json is missing"):
        store.fetch(digest, tmp_path / "cache")


def test_artefacts_that_are_not_kept_are_collected(store: ArtefactStore, tmp_path: Path) -> None:
    kept, gone = (store.publish(write_artefact(tmp_path / key, key=key)).digest for key in "ab")
    later = datetime.now(UTC) + timedelta(hours=2)

    assert store.collect({kept}, older_than_seconds=3600) == ()
    assert [one.digest for one in store.collect({kept}, older_than_seconds=3600, now=later)] == [gone]
    assert [one.digest for one in store.entries()] == [kept]


def failures(uri: StoreUri, artefact: Path, tmp_path: Path) -> Iterator[PenstockError]:
    """Errors of a publisher and a runtime."""
    once = Retries(attempts=1)
    with pytest.raises(PenstockError) as caught:
        open_store(uri, retries=once).publish(artefact)
    yield caught.value
    with pytest.raises(PenstockError) as caught:
        open_store(uri, retries=once).fetch(digest_of(artefact), tmp_path / "cache")
    yield caught.value


def test_an_unreachable_server_is_a_temporary_error(
    server: Cloud, uri: StoreUri, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    nowhere = {"gs": ("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}"),
               "az": ("AZURE_STORAGE_CONNECTION_STRING", connection_string(port))}  # fmt: skip
    monkeypatch.setenv(*nowhere[server.scheme])

    for error in failures(uri, artefact, tmp_path):
        assert type(error) is StoreUnavailable
        assert error.temporary
        assert "AWS_" not in error.remedy


def test_a_wrong_key_is_access_denied(
    server: Cloud, uri: StoreUri, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server.scheme == "gs":
        pytest.skip("the server has no accounts of Google")
    right = server.environment["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", right.replace(ACCOUNT_KEY, "bm90IHRoZSByaWdodCBvbmU="))

    for error in failures(uri, artefact, tmp_path):
        assert type(error) is StoreAccessDenied
        assert not error.temporary
