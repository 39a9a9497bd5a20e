"""A store in a real S3 server (versitygw)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from obstore.exceptions import PermissionDeniedError

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import (
    ArtefactError,
    ArtefactNotFound,
    MissingPackage,
    PenstockError,
    StoreAccessDenied,
    StoreError,
    StoreUnavailable,
)
from penstock.manifest import MANIFEST_NAME
from penstock_runtime import remote
from penstock_runtime.models.sources.transfer import FetchProgress
from penstock_runtime.remote import Retries
from penstock_runtime.store import ArtefactStore, fetch, open_store
from penstock_runtime.store.__main__ import main
from penstock_runtime.store.fetch import digest_of, fault
from tests.runtime.models.s3_server import S3, running_s3
from tests.runtime.store.artefacts import FILES, names, publish_at_once, write_artefact

URI = StoreUri.parse("s3://artefacts/team/penstock")
FEW = Retries(attempts=2, sleep=lambda _: None)


@pytest.fixture
def store(s3: S3) -> ArtefactStore:
    return open_store(URI, retries=FEW)


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    return write_artefact(tmp_path / "artefact")


def age(folder: Path) -> None:
    """As if it had been published a day ago."""
    yesterday = (datetime.now(UTC) - timedelta(days=1)).timestamp()
    for path in folder.rglob("*"):
        os.utime(path, (yesterday, yesterday))


def stored(s3: S3, digest: Digest) -> Path:
    """The server keeps objects as files."""
    return s3.root / "artefacts" / "team" / "penstock" / digest.hexadecimal


def test_a_fetched_artefact_equals_the_published_one(
    s3: S3, store: ArtefactStore, artefact: Path, tmp_path: Path
) -> None:
    published = store.publish(artefact)
    seen: list[FetchProgress] = []
    folder = store.fetch(published.digest, tmp_path / "cache", seen.append)

    assert published.uri == f"s3://artefacts/team/penstock/{digest_of(artefact).hexadecimal}"
    assert names(stored(s3, published.digest)) == names(artefact)
    assert names(folder) == {*FILES, MANIFEST_NAME}
    assert fault(folder, published.digest) == ""
    assert seen[-1].bytes_done == seen[-1].bytes_total == sum(FILES.values())


def test_a_file_of_many_parts_is_published_and_fetched_completely(
    s3: S3, store: ArtefactStore, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # S3 takes parts from 5 MiB on.
    monkeypatch.setattr(remote, "PART_BYTES", 5 * 2**20)
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 3_000_000)
    big = artefact / "model/onnxruntime-fp32/model.onnx"
    big.write_bytes(os.urandom(12_000_000))
    artefact = _resigned(artefact)

    published = store.publish(artefact)

    assert fault(store.fetch(published.digest, tmp_path / "cache"), published.digest) == ""


def _resigned(artefact: Path) -> Path:
    """The manifest as it has to be for the files that are there."""
    import hashlib

    from penstock.manifest import Manifest

    manifest = Manifest.load(artefact)
    files = {name: hashlib.sha256((artefact / name).read_bytes()).hexdigest() for name in manifest.files}
    (artefact / MANIFEST_NAME).write_text(manifest.model_copy(update={"files": files}).model_dump_json())
    return artefact


def test_publishing_again_sends_only_the_manifest_to_renew_its_time(
    s3: S3, store: ArtefactStore, artefact: Path
) -> None:
    published = store.publish(artefact)
    folder = stored(s3, published.digest)
    age(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != MANIFEST_NAME}

    assert store.publish(artefact).found
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert store.collect(set(), older_than_seconds=3600) == ()


def test_an_artefact_published_again_during_a_collection_is_kept(
    s3: S3, store: ArtefactStore, artefact: Path, tmp_path: Path
) -> None:
    digest = store.publish(artefact).digest
    age(stored(s3, digest))
    (before,) = store.entries()
    assert store.publish(artefact).found

    assert store.backend.delete(before) is False
    assert fault(store.fetch(digest, tmp_path / "cache"), digest) == ""


def test_concurrent_publishers_leave_one_complete_artefact(s3: S3, artefact: Path, tmp_path: Path) -> None:
    assert publish_at_once(4, lambda: open_store(URI, retries=FEW), artefact) == []
    digest = digest_of(artefact)
    assert fault(open_store(URI).fetch(digest, tmp_path / "cache"), digest) == ""


def test_readers_do_not_see_an_artefact_before_its_manifest(s3: S3, store: ArtefactStore, artefact: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def look(progress: FetchProgress) -> None:
        seen.append((progress.file, any(one.complete for one in store.entries())))

    store.publish(artefact, look)

    assert seen[-1] == (MANIFEST_NAME, True)
    assert not any(complete for _, complete in seen[:-1])


def test_the_partial_upload_of_a_killed_publisher_is_completed(
    s3: S3, store: ArtefactStore, artefact: Path, tmp_path: Path
) -> None:
    published = store.publish(artefact)
    folder = stored(s3, published.digest)
    (folder / MANIFEST_NAME).unlink()
    (folder / "config.json").unlink()
    with pytest.raises(ArtefactNotFound, match="it is being published, or was given up"):
        store.fetch(published.digest, tmp_path / "cache")

    store.publish(artefact)

    assert fault(store.fetch(published.digest, tmp_path / "cache"), published.digest) == ""


@pytest.mark.parametrize("name", ["model/onnxruntime-fp32/model.onnx", MANIFEST_NAME])
@pytest.mark.parametrize("how", ["truncated", "corrupted"])
def test_a_damaged_object_is_never_served_and_can_be_repaired(
    how: str, name: str, s3: S3, artefact: Path, tmp_path: Path
) -> None:
    store = open_store(URI, retries=FEW)
    published = store.publish(artefact)
    path = stored(s3, published.digest) / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if how == "truncated" else content[:-3] + b"xyz")

    with pytest.raises(ArtefactError, match=f"/{name} is not the") as caught:
        store.fetch(published.digest, tmp_path / "cache")

    assert not caught.value.temporary
    assert not (tmp_path / "cache" / published.digest.hexadecimal).exists()
    if how == "truncated" or name == MANIFEST_NAME:
        assert not store.publish(artefact).found
        assert fault(store.fetch(published.digest, tmp_path / "cache"), published.digest) == ""


def test_a_missing_object_makes_an_artefact_incomplete(
    s3: S3, store: ArtefactStore, artefact: Path, tmp_path: Path
) -> None:
    published = store.publish(artefact)
    (stored(s3, published.digest) / "tokenizer.json").unlink()

    with pytest.raises(ArtefactError, match=r"is incomplete: tokenizer\.json is missing"):
        store.fetch(published.digest, tmp_path / "cache")


def test_an_unpublished_artefact_is_not_found(store: ArtefactStore, tmp_path: Path) -> None:
    with pytest.raises(ArtefactNotFound, match="is not in the store"):
        store.fetch(Digest.of(b"nothing"), tmp_path / "cache")
    assert store.entries() == ()
    assert not store.delete(Digest.of(b"nothing"))


def test_artefacts_that_are_not_kept_are_collected(s3: S3, store: ArtefactStore, tmp_path: Path) -> None:
    kept, gone = (store.publish(write_artefact(tmp_path / key, key=key)).digest for key in "ab")
    other = s3.root / "artefacts" / "team" / "penstock" / "notes"
    other.mkdir()
    (other / "x.txt").write_text("not ours")
    now = datetime.now(UTC)

    assert store.collect({kept}, older_than_seconds=3600, now=now) == ()
    assert [one.digest for one in store.collect({kept}, older_than_seconds=3600, now=now + timedelta(hours=2))] == [
        gone
    ]
    assert [one.digest for one in store.entries()] == [kept]
    assert not names(stored(s3, gone)) if stored(s3, gone).exists() else True
    assert (other / "x.txt").exists()


def test_a_store_is_backed_up_from_a_folder_to_a_bucket_and_restored_from_there(
    s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = StoreUri.parse(f"file://{tmp_path}/store")
    digests = {
        namespace: open_store(lost).of_namespace(namespace).publish(write_artefact(tmp_path / key, key=key)).digest
        for namespace, key in (("", "a"), ("team-a", "b"), ("team-b", "b"))
    }
    (tmp_path / "store" / f".{'0' * 64}-draft").mkdir()

    def copied(source: StoreUri, target: StoreUri) -> list[tuple[str, str]]:
        assert main(["--store", str(source), "copy", "--to", str(target)]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(line.get("namespace", ""), line["digest"]) for line in lines]

    expected = [(namespace, str(digest)) for namespace, digest in digests.items()]
    assert copied(lost, URI) == expected
    assert copied(lost, URI) == []
    before = {path.name: names(path) for path in (tmp_path / "store").iterdir() if len(path.name) == 64}
    shutil.rmtree(tmp_path / "store")

    assert copied(URI, lost) == expected

    for namespace, digest in digests.items():
        folder = open_store(lost).of_namespace(namespace).fetch(digest, tmp_path / f"cache-{namespace}")
        assert fault(folder, digest) == ""
    assert {path.name: names(path) for path in (tmp_path / "store").iterdir() if len(path.name) == 64} == before
    assert "report.html" in before[digests[""].hexadecimal]


def test_a_backup_reports_a_damaged_artefact_and_copies_the_others(
    s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = open_store(StoreUri.parse(f"file://{tmp_path}/store"))
    good, bad = (source.publish(write_artefact(tmp_path / key, key=key)).digest for key in "ab")
    (tmp_path / "store" / bad.hexadecimal / "tokenizer.json").write_text("altered")

    assert main(["--store", str(source.uri), "copy", "--to", str(URI)]) == 1

    shown = capsys.readouterr()
    assert [json.loads(line)["digest"] for line in shown.out.splitlines()] == [str(good)]
    assert f"{bad.hexadecimal}/tokenizer.json is not the file that was published" in shown.err
    assert [one.digest for one in open_store(URI, retries=FEW).entries()] == [good]


def errors_of_both(tmp_path: Path, artefact: Path) -> Iterator[PenstockError]:
    """Errors of a publisher and a runtime."""
    with pytest.raises(PenstockError) as caught:
        open_store(URI, retries=FEW).publish(artefact)
    yield caught.value
    with pytest.raises(PenstockError) as caught:
        open_store(URI, retries=FEW).fetch(digest_of(artefact), tmp_path / "cache")
    yield caught.value


def test_a_wrong_secret_is_access_denied(
    s3: S3, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-one")
    for error in errors_of_both(tmp_path, artefact):
        assert type(error) is StoreAccessDenied
        assert not error.temporary
        assert "docs/reference/artefact-store.md#object-stores" in error.remedy
        assert "not-the-right-one" not in str(error)


def test_no_credentials_at_all_are_access_denied(
    s3: S3, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for error in errors_of_both(tmp_path, artefact):
        assert type(error) is StoreAccessDenied


def test_the_error_for_an_unknown_key_has_the_servers_message(
    s3: S3, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS answers it with 403, versitygw with 404 and a code of its own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    for error in errors_of_both(tmp_path, artefact):
        assert type(error) is StoreError
        assert "No user exists with the provided access key" in error.message


def test_a_key_that_may_only_list_and_read_fetches_and_changes_nothing(
    artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the policy of docs/how-to/use-an-object-store.md for serving pods."""
    root = tmp_path / "own" / "buckets"
    (root / "artefacts").mkdir(parents=True)
    with running_s3(root, users={"reader": "reader-secret"}) as own:
        for name, value in own.environment().items():
            monkeypatch.setenv(name, value)
        writer = open_store(URI, retries=FEW)
        published = writer.publish(artefact)
        objects = "artefacts/team/penstock/*"
        own.allow("artefacts", (["reader"], "s3:ListBucket", "artefacts"), (["reader"], "s3:GetObject", objects))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "reader-secret")
        reader = open_store(URI, retries=FEW)

        assert fault(reader.fetch(published.digest, tmp_path / "cache"), published.digest) == ""

        before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        with pytest.raises(StoreAccessDenied):
            reader.publish(artefact)
        with pytest.raises(StoreAccessDenied):
            reader.collect(set(), older_than_seconds=0)
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def use(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Use the key of a user of the server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{key}-secret")


def test_the_key_of_a_namespace_cannot_change_or_read_artefacts_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the policy of docs/how-to/use-an-object-store.md for the keys of two namespaces."""
    root = tmp_path / "own" / "buckets"
    (root / "artefacts").mkdir(parents=True)
    rules = [(["a", "b"], "s3:ListBucket", "artefacts")] + [
        ([name], action, f"artefacts/team/penstock/namespaces/{name}/*")
        for name in ("a", "b")
        for action in ("s3:GetObject", "s3:PutObject")
    ]
    with running_s3(root, users={"a": "a-secret", "b": "b-secret"}) as own:
        for name, value in own.environment().items():
            monkeypatch.setenv(name, value)
        own.allow("artefacts", *rules)
        use(monkeypatch, "a")
        digest = open_store(URI.of_namespace("a"), retries=FEW).publish(write_artefact(tmp_path / "a")).digest
        before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}

        use(monkeypatch, "b")
        target = open_store(URI.of_namespace("a"), retries=FEW)
        with pytest.raises(StoreAccessDenied):
            target.publish(write_artefact(tmp_path / "b", key="b"))
        with pytest.raises(StoreAccessDenied):
            target.delete(digest)
        with pytest.raises(StoreAccessDenied):
            target.fetch(digest, tmp_path / "cache")
        with pytest.raises(PermissionDeniedError):
            remote.open_bucket("s3", f"{target.uri.location}/{digest.hexadecimal}").write(MANIFEST_NAME, b"{}")
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before

        same = open_store(URI.of_namespace("b"), retries=FEW)
        assert same.publish(tmp_path / "a").digest == digest
        assert fault(same.fetch(digest, tmp_path / "cache"), digest) == ""

        # The collection has a key for all namespaces.
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", own.environment()["AWS_ACCESS_KEY_ID"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", own.environment()["AWS_SECRET_ACCESS_KEY"])
        assert main(["--store", str(URI), "collect", f"--keep=a/{digest}", "--older-than-seconds=-60"]) == 0
        assert [json.loads(line)["namespace"] for line in capsys.readouterr().out.splitlines()] == ["b"]
        use(monkeypatch, "a")
        assert fault(open_store(URI.of_namespace("a")).fetch(digest, tmp_path / "cache-a"), digest) == ""


def test_a_missing_bucket_is_an_error(s3: S3, artefact: Path, tmp_path: Path) -> None:
    nowhere = open_store(StoreUri.parse("s3://no-such-bucket/x"), retries=FEW)
    with pytest.raises(StoreError, match="there is no bucket no-such-bucket"):
        nowhere.publish(artefact)
    with pytest.raises(StoreError, match="there is no bucket no-such-bucket"):
        nowhere.fetch(digest_of(artefact), tmp_path / "cache")


def test_an_unreachable_server_is_a_temporary_error(
    s3: S3, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        for error in errors_of_both(tmp_path, artefact):
            assert type(error) is StoreUnavailable
            assert error.temporary
            assert "AWS_ENDPOINT_URL" in error.remedy


def test_a_fetch_waits_for_a_server_that_returns(
    artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "own" / "buckets"
    (root / "artefacts").mkdir(parents=True)
    with ExitStack() as running:
        first = running.enter_context(running_s3(root))
        for name, value in first.environment().items():
            monkeypatch.setenv(name, value)
        digest = open_store(URI).publish(artefact).digest
    failures: list[str] = []
    with ExitStack() as running:

        def start(error: PenstockError, _: float) -> None:
            failures.append(type(error).__name__)
            if len(failures) == 2:
                running.enter_context(running_s3(root, port=int(first.url.rpartition(":")[2])))

        patient = Retries(attempts=6, first_wait_seconds=0.01, on_failure=start)
        folder = open_store(URI, retries=patient).fetch(digest, tmp_path / "cache")

    assert failures[:2] == ["StoreUnavailable", "StoreUnavailable"]
    assert fault(folder, digest) == ""


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingPackage, match=r"Run pip install 'penstock\[stores\]'"):
        open_store(StoreUri.parse("gs://bucket/x"))
