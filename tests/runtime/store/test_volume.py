"""A store in a folder, as a hostPath or a volume of the cluster is one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import (
    ArtefactError,
    ArtefactNotFound,
    HostError,
    OutOfDisk,
    StoreAccessDenied,
    StoreError,
    StoreUnavailable,
)
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock_runtime.models.sources.transfer import FetchProgress
from penstock_runtime.store import ArtefactStore, fetch, open_store, volume
from penstock_runtime.store.__main__ import main
from penstock_runtime.store.fetch import digest_of, fault
from penstock_runtime.store.volume import Volume
from tests.runtime.store.artefacts import FILES, names, write_artefact

UNPRIVILEGED = 65532


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    return write_artefact(tmp_path / "artefact")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> ArtefactStore:
    return open_store(StoreUri.parse(f"file://{root}"))


def age(folder: Path) -> None:
    """As if it had been published a day ago."""
    yesterday = (datetime.now(UTC) - timedelta(days=1)).timestamp()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (yesterday, yesterday))


def damage(path: Path) -> None:
    """Change a byte in the middle: the size stays."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


class TestPublishing:
    def test_everything_is_on_the_disk_before_it_gets_its_name(
        self, artefact: Path, store: ArtefactStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        happened: list[Path | str] = []
        fsync, rename = os.fsync, Path.rename

        def watched_fsync(descriptor: int) -> None:
            happened.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            fsync(descriptor)

        def watched_rename(self: Path, target: Path) -> Path:
            happened.append("renamed")
            return rename(self, target)

        monkeypatch.setattr(os, "fsync", watched_fsync)
        monkeypatch.setattr(Path, "rename", watched_rename)
        folder = root / store.publish(artefact).digest.hexadecimal
        before = happened[: happened.index("renamed")]
        (draft,) = {path for path in before if isinstance(path, Path) and path.parent == root}

        assert set(before) == {draft, *(draft / path.relative_to(folder) for path in folder.rglob("*"))}
        assert before[-1] == draft
        assert happened[len(before) :] == ["renamed", root]

    def test_a_published_artefact_is_stored_under_its_digest(
        self, artefact: Path, store: ArtefactStore, root: Path
    ) -> None:
        published = store.publish(artefact)
        folder = root / published.digest.hexadecimal

        assert published.digest == digest_of(artefact)
        assert published.uri == f"file://{folder}"
        assert published.bytes == sum(path.stat().st_size for path in artefact.rglob("*") if path.is_file())
        assert not published.found
        assert names(folder) == names(artefact)
        assert fault(folder, published.digest) == ""

    def test_publishing_again_writes_nothing_and_renews_the_time(
        self, artefact: Path, store: ArtefactStore, root: Path
    ) -> None:
        first = store.publish(artefact)
        folder = root / first.digest.hexadecimal
        age(folder)
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

        again = store.publish(artefact)

        assert again.found
        assert (again.digest, again.bytes) == (first.digest, first.bytes)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
        assert [datetime.now(UTC) - one.modified < timedelta(minutes=1) for one in store.entries()] == [True]

    def test_a_damaged_copy_in_the_store_is_repaired(self, artefact: Path, store: ArtefactStore, root: Path) -> None:
        published = store.publish(artefact)
        folder = root / published.digest.hexadecimal
        damage(folder / "tokenizer.json")
        assert fault(folder, published.digest) == "tokenizer.json has changed"

        store.publish(artefact)

        assert fault(folder, published.digest) == ""
        assert [path.name for path in root.iterdir()] == [published.digest.hexadecimal]

    def test_concurrent_publishers_publish_an_artefact_once(
        self, artefact: Path, store: ArtefactStore, root: Path
    ) -> None:
        together = threading.Barrier(6)
        failures: list[BaseException] = []

        def publish() -> None:
            together.wait()
            try:
                store.publish(artefact)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=publish) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert failures == []
        assert [path.name for path in root.iterdir()] == [digest_of(artefact).hexadecimal]
        assert fault(root / digest_of(artefact).hexadecimal, digest_of(artefact)) == ""

    def test_readers_do_not_see_an_incomplete_artefact(self, artefact: Path, store: ArtefactStore, root: Path) -> None:
        seen: list[tuple[bool, bool]] = []

        def look(_: FetchProgress) -> None:
            seen.append(
                ((root / digest_of(artefact).hexadecimal).exists(), any(one.complete for one in store.entries()))
            )

        store.publish(artefact, look)

        assert len(seen) == len(FILES) + 2
        assert set(seen) == {(False, False)}

    def test_a_publisher_that_fails_leaves_nothing(
        self, artefact: Path, store: ArtefactStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_space(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("penstock_runtime.store.volume.shutil.copyfileobj", no_space)
        with pytest.raises(OutOfDisk, match="no space is left in the artefact store file://"):
            store.publish(artefact)

        assert list(root.iterdir()) == []

    def test_a_folder_that_is_not_a_complete_artefact_is_refused(self, artefact: Path, store: ArtefactStore) -> None:
        damage(artefact / "config.json")
        with pytest.raises(ArtefactError, match=r"cannot be published: config\.json has changed"):
            store.publish(artefact)
        (artefact / MANIFEST_NAME).unlink()
        with pytest.raises(ArtefactError, match=r"has no manifest\.json"):
            store.publish(artefact)

    def test_all_users_may_read_and_the_group_may_delete_whatever_the_umask(
        self, artefact: Path, store: ArtefactStore, root: Path
    ) -> None:
        root.mkdir()
        root.chmod(0o2775)
        before = os.umask(0o077)
        try:
            published = store.publish(artefact)
        finally:
            os.umask(before)
        folder = root / published.digest.hexadecimal

        for path in (folder, *folder.rglob("*")):
            mode = path.stat().st_mode & 0o7777
            assert mode & 0o775 == 0o775 if path.is_dir() else mode & 0o644 == 0o644, (path, oct(mode))
        assert folder.stat().st_mode & 0o2000, "new folders have the group of the volume"


class TestFetching:
    def test_an_artefact_is_fetched_without_its_report(
        self, artefact: Path, store: ArtefactStore, tmp_path: Path
    ) -> None:
        published = store.publish(artefact)
        seen: list[FetchProgress] = []
        folder = store.fetch(published.digest, tmp_path / "cache", seen.append)

        assert folder == tmp_path / "cache" / published.digest.hexadecimal
        assert names(folder) == {*FILES, MANIFEST_NAME}
        assert Manifest.load(folder) == Manifest.load(artefact)
        assert fault(folder, published.digest) == ""
        assert seen[-1].bytes_done == seen[-1].bytes_total == sum(FILES.values())

    def test_a_second_fetch_reads_the_cache_alone(self, artefact: Path, store: ArtefactStore, tmp_path: Path) -> None:
        published = store.publish(artefact)
        first = store.fetch(published.digest, tmp_path / "cache")
        shutil.rmtree(store.uri.location)

        assert store.fetch(published.digest, tmp_path / "cache") == first

    def test_a_damaged_cache_is_fetched_again(self, artefact: Path, store: ArtefactStore, tmp_path: Path) -> None:
        published = store.publish(artefact)
        folder = store.fetch(published.digest, tmp_path / "cache")
        damage(folder / "tokenizer.json")
        seen: list[FetchProgress] = []

        store.fetch(published.digest, tmp_path / "cache", seen.append)

        assert fault(folder, published.digest) == ""
        assert "tokenizer.json has changed" in seen[0].note

    def test_an_added_file_that_would_be_read_counts_as_damage(
        self, artefact: Path, store: ArtefactStore, root: Path, tmp_path: Path
    ) -> None:
        published = store.publish(artefact)
        folder = store.fetch(published.digest, tmp_path / "cache")
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
        seen: list[FetchProgress] = []

        store.fetch(published.digest, tmp_path / "cache", seen.append)

        assert "sentence_bert_config.json was added" in seen[0].note
        assert names(folder) == {*FILES, MANIFEST_NAME}
        added = "config_sentence_transformers.json"
        (root / published.digest.hexadecimal / added).write_text("{}")
        store.publish(artefact)
        assert names(root / published.digest.hexadecimal) == names(artefact)
        (artefact / added).write_text("{}")
        with pytest.raises(ArtefactError, match=rf"cannot be published: {added} was added"):
            store.publish(artefact)

    def test_an_added_file_that_is_never_read_is_ignored(self, artefact: Path) -> None:
        """Folders that are volumes of their own have such."""
        (artefact / "lost+found").mkdir()
        (artefact / "..2026_11_26").mkdir()
        (artefact / "..2026_11_26" / "modules.json").write_text("[]")
        (artefact / "..data").symlink_to("..2026_11_26")
        (artefact / ".nfs0001").touch()
        (artefact / "README.md").touch()
        assert fault(artefact, digest_of(artefact)) == ""

    @pytest.mark.parametrize("name", [*(name for name, size in FILES.items() if size), MANIFEST_NAME])
    def test_an_altered_file_of_the_store_is_never_served(
        self, name: str, artefact: Path, store: ArtefactStore, root: Path, tmp_path: Path
    ) -> None:
        published = store.publish(artefact)
        damage(root / published.digest.hexadecimal / name)

        with pytest.raises(ArtefactError, match=f"/{name} is not the") as caught:
            store.fetch(published.digest, tmp_path / "cache")

        assert "made and published again" in caught.value.remedy
        assert not (tmp_path / "cache" / published.digest.hexadecimal).exists()

    @pytest.mark.parametrize("name", [*(name for name, size in FILES.items() if size), MANIFEST_NAME])
    def test_a_truncated_file_of_the_store_is_never_served(
        self, name: str, artefact: Path, store: ArtefactStore, root: Path, tmp_path: Path
    ) -> None:
        published = store.publish(artefact)
        path = root / published.digest.hexadecimal / name
        os.truncate(path, path.stat().st_size // 2)

        with pytest.raises(ArtefactError, match=f"/{name} is not the"):
            store.fetch(published.digest, tmp_path / "cache")

        assert not (tmp_path / "cache" / published.digest.hexadecimal).exists()

    def test_an_artefact_that_lacks_a_file_is_incomplete(
        self, artefact: Path, store: ArtefactStore, root: Path, tmp_path: Path
    ) -> None:
        published = store.publish(artefact)
        (root / published.digest.hexadecimal / "config.json").unlink()

        with pytest.raises(ArtefactError, match=r"is incomplete: config\.json is missing"):
            store.fetch(published.digest, tmp_path / "cache")

    def test_an_unpublished_artefact_is_not_found(self, store: ArtefactStore, root: Path, tmp_path: Path) -> None:
        root.mkdir()
        with pytest.raises(ArtefactNotFound, match="is not in the store"):
            store.fetch(Digest.of(b"nothing"), tmp_path / "cache")
        (root / Digest.of(b"nothing").hexadecimal).mkdir()
        (root / Digest.of(b"nothing").hexadecimal / "config.json").write_text("{}")
        with pytest.raises(ArtefactNotFound, match="has no manifest: it is being published, or was given up"):
            store.fetch(Digest.of(b"nothing"), tmp_path / "cache")

    def test_a_store_that_is_not_mounted_is_an_error(self, store: ArtefactStore, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="is not there") as caught:
            store.fetch(Digest.of(b"nothing"), tmp_path / "cache")

        assert not caught.value.temporary
        assert "Mount its volume" in caught.value.remedy

    def test_a_broken_fetch_is_resumed(
        self, artefact: Path, store: ArtefactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fetch, "CHUNK_BYTES", 1000)
        published = store.publish(artefact)
        reads: list[tuple[str, int]] = []
        fails_at: list[int] = [100_000]
        read = Volume.read

        def watched(self: Volume, digest: Digest, name: str, start: int, end: int) -> bytes:
            if fails_at and start >= fails_at[0]:
                fails_at.clear()
                raise StoreUnavailable("the volume went away")
            reads.append((name, start))
            return read(self, digest, name, start, end)

        monkeypatch.setattr(Volume, "read", watched)
        with pytest.raises(StoreUnavailable):
            store.fetch(published.digest, tmp_path / "cache")
        assert not (tmp_path / "cache" / published.digest.hexadecimal).exists()
        reads.clear()

        folder = store.fetch(published.digest, tmp_path / "cache")

        assert fault(folder, published.digest) == ""
        assert min(start for name, start in reads if name.endswith("model.onnx")) == 100_000

    def test_damaged_files_of_a_broken_fetch_are_fetched_again(
        self, artefact: Path, store: ArtefactStore, tmp_path: Path
    ) -> None:
        published = store.publish(artefact)
        partial = tmp_path / "cache" / f"{published.digest.hexadecimal}.partial"
        (partial / "model" / "onnxruntime-fp32").mkdir(parents=True)
        (partial / "model" / "onnxruntime-fp32" / "model.onnx").write_bytes(b"x" * 1000)
        (partial / "config.json").write_bytes(b"x" * 1_000)

        folder = store.fetch(published.digest, tmp_path / "cache")

        assert fault(folder, published.digest) == ""
        assert not partial.exists()

    def test_only_files_of_the_artefact_stay_from_a_broken_fetch(
        self, artefact: Path, store: ArtefactStore, tmp_path: Path
    ) -> None:
        published = store.publish(artefact)
        partial = tmp_path / "cache" / f"{published.digest.hexadecimal}.partial"
        others = tmp_path / "others"
        others.mkdir()
        for name in ("empty", "tokenizer.json"):
            (others / name).touch()
        (partial / "config.json" / "in its place").mkdir(parents=True)
        (partial / "tokenizer.json").symlink_to(others / "empty")
        (partial / MANIFEST_NAME).symlink_to(others / "tokenizer.json")
        (partial / "model").symlink_to(others)
        (partial / "modules.json").write_text("[]")
        (partial / "1_Pooling").mkdir()
        (partial / "1_Pooling" / "config.json").write_text("{}")
        os.mkfifo(partial / "pipe")

        folder = store.fetch(published.digest, tmp_path / "cache")

        assert fault(folder, published.digest) == ""
        assert names(folder) == {*FILES, MANIFEST_NAME}
        assert not [path for path in folder.rglob("*") if path.is_symlink()]
        assert {path.name: path.stat().st_size for path in others.iterdir()} == {"empty": 0, "tokenizer.json": 0}

    def test_nothing_is_written_through_a_link_in_the_cache(
        self, artefact: Path, store: ArtefactStore, tmp_path: Path
    ) -> None:
        published = store.publish(artefact)
        (tmp_path / "others").mkdir()
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / f"{published.digest.hexadecimal}.partial").symlink_to(tmp_path / "others")

        assert not store.fetch(published.digest, tmp_path / "cache").is_symlink()
        assert not list((tmp_path / "others").iterdir())

    def test_processes_that_share_a_cache_fetch_once(
        self, artefact: Path, store: ArtefactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        published = store.publish(artefact)
        reads: list[str] = []
        read = Volume.read

        def watched(self: Volume, digest: Digest, name: str, start: int, end: int) -> bytes:
            reads.append(name)
            return read(self, digest, name, start, end)

        monkeypatch.setattr(Volume, "read", watched)
        found: list[Path] = []
        threads = [
            threading.Thread(target=lambda: found.append(store.fetch(published.digest, tmp_path / "cache")))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(set(found)) == 1
        assert len(found) == 5
        assert sorted(reads) == sorted([*(name for name, size in FILES.items() if size), MANIFEST_NAME])

    def test_waiting_for_another_fetch_is_reported(self, artefact: Path, store: ArtefactStore, tmp_path: Path) -> None:
        published = store.publish(artefact)
        (tmp_path / "cache").mkdir()
        reported = threading.Event()
        notes: list[str] = []

        def tell(progress: FetchProgress) -> None:
            notes.append(progress.note)
            reported.set()

        with (tmp_path / "cache" / f"{published.digest.hexadecimal}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            thread = threading.Thread(target=store.fetch, args=(published.digest, tmp_path / "cache", tell))
            thread.start()
            assert reported.wait(60)
        thread.join()

        assert notes[0] == "another process is fetching it into the same cache: waiting for it"
        assert (tmp_path / "cache" / published.digest.hexadecimal).is_dir()

    def test_a_full_cache_is_a_host_error(
        self, artefact: Path, store: ArtefactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        published = store.publish(artefact)

        def no_space(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "rename", no_space)
        with pytest.raises(OutOfDisk, match="no space is left in the cache"):
            store.fetch(published.digest, tmp_path / "cache")

    def test_a_cache_that_cannot_be_created_is_an_error(
        self, artefact: Path, store: ArtefactStore, tmp_path: Path
    ) -> None:
        published = store.publish(artefact)
        (tmp_path / "file").write_text("x")
        with pytest.raises(HostError, match=r"the cache .* cannot be used") as caught:
            store.fetch(published.digest, tmp_path / "file" / "cache")

        assert "PENSTOCK_CACHE" in caught.value.remedy


def nest(folder: Path, depth: int) -> None:
    """Make folders within each other."""
    before = Path.cwd()
    os.chdir(folder)
    for _ in range(depth):
        Path("x").mkdir()
        os.chdir("x")
    os.chdir(before)


def remove_nested(folder: Path) -> None:
    """Remove them, which pytest cannot."""
    subprocess.run(["rm", "-rf", str(folder)], check=True)


class TestCollecting:
    def test_artefacts_that_are_not_kept_are_deleted_when_they_are_old_enough(
        self, store: ArtefactStore, root: Path, tmp_path: Path
    ) -> None:
        kept, old, new = (store.publish(write_artefact(tmp_path / key, key=key)).digest for key in "abc")
        draft = root / f".{'d' * 64}-x1y2"
        draft.mkdir()
        (draft / "config.json").write_text("{}")
        (root / "lost+found").mkdir()
        now = datetime.now(UTC)
        for folder in (root / kept.hexadecimal, root / old.hexadecimal, draft):
            for path in (*folder.rglob("*"), folder):
                os.utime(path, (1e9, 1e9))

        gone = store.collect({kept}, older_than_seconds=3600, now=now)

        assert {(stored.digest.hexadecimal, stored.complete) for stored in gone} == {
            (old.hexadecimal, True),
            ("d" * 64, False),
        }
        assert {path.name for path in root.iterdir()} == {kept.hexadecimal, new.hexadecimal, "lost+found"}
        assert store.collect({kept}, older_than_seconds=3600, now=now) == ()
        assert [
            one.digest for one in store.collect(set(), older_than_seconds=0, now=now + timedelta(days=1))
        ] == sorted([kept, new])

    @pytest.mark.parametrize("moment", ["before its name is taken away", "after its name was taken away"])
    def test_an_artefact_published_again_during_a_collection_is_kept(
        self, artefact: Path, store: ArtefactStore, root: Path, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        digest = store.publish(artefact).digest
        age(root / digest.hexadecimal)
        rename = Path.rename

        def while_collecting(path: Path, target: Path) -> Path:
            if path.name != digest.hexadecimal:
                return rename(path, target)
            monkeypatch.setattr(Path, "rename", rename)
            if moment.startswith("before"):
                assert store.publish(artefact).found
                return rename(path, target)
            renamed = rename(path, target)
            assert not store.publish(artefact).found
            return renamed

        monkeypatch.setattr(Path, "rename", while_collecting)
        gone = store.collect(set(), older_than_seconds=3600)

        assert [one.digest for one in gone] == ([] if moment.startswith("before") else [digest])
        assert fault(root / digest.hexadecimal, digest) == ""
        assert [path.name for path in root.iterdir()] == [digest.hexadecimal]

    def test_an_artefact_is_deleted_once(self, artefact: Path, store: ArtefactStore, root: Path) -> None:
        published = store.publish(artefact)
        (stored,) = store.entries()

        assert (stored.digest, stored.bytes, stored.complete) == (published.digest, published.bytes, True)
        assert store.delete(published.digest)
        assert not store.delete(published.digest)
        assert list(root.iterdir()) == []


class TestCommand:
    def run(self, *words: object) -> list[dict[str, object]]:
        assert main([str(word) for word in words]) == 0
        return [json.loads(line) for line in self.capture.readouterr().out.splitlines()]

    @pytest.fixture(autouse=True)
    def _capture(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capture = capsys

    def test_the_command_lists_and_collects_artefacts(self, store: ArtefactStore, tmp_path: Path) -> None:
        kept, gone = (store.publish(write_artefact(tmp_path / key, key=key)).digest for key in "ab")
        there = self.run("--store", store.uri, "list")
        assert {one["digest"] for one in there} == {str(kept), str(gone)}
        assert all(one["complete"] for one in there)

        collected = self.run("--store", store.uri, "collect", "--keep", kept, "--older-than-seconds", -60)
        assert [one["digest"] for one in collected] == [str(gone)]
        assert [one.digest for one in store.entries()] == [kept]

    def test_artefacts_named_in_the_keep_file_by_a_digest_prefix_are_kept(
        self, store: ArtefactStore, tmp_path: Path
    ) -> None:
        kept, named, gone = (store.publish(write_artefact(tmp_path / key, key=key)).digest for key in "abc")
        file = tmp_path / "keep.json"
        file.write_text(json.dumps({"keep": [kept.hexadecimal[:16]]}))

        words = ("--store", store.uri, "collect", "--keep", named, "--keep-file", file, "--older-than-seconds", -60)
        collected = self.run(*words)

        assert [one["digest"] for one in collected] == [str(gone)]
        assert [one.digest for one in store.entries()] == sorted([kept, named])

    @pytest.mark.parametrize(
        "text", [None, "", "{}", '{"keep": "x"}', '{"keep": ["sha256:short"]}', '{"keep": [1]}', '{"keep": null}']
    )
    def test_an_unreadable_keep_file_deletes_nothing(
        self, store: ArtefactStore, artefact: Path, tmp_path: Path, text: str | None
    ) -> None:
        store.publish(artefact)
        file = tmp_path / "keep.json"
        if text is not None:
            file.write_text(text)

        words = ["--store", str(store.uri), "collect", "--keep-file", str(file), "--older-than-seconds", "-60"]

        assert main(words) == 1
        assert "does not say what to keep" in self.capture.readouterr().err
        assert len(store.entries()) == 1

    @pytest.mark.parametrize("words", [[], ["--keep-file", "keep.json"], ["--keep", ""], ["--keep", "sha256:short"]])
    def test_a_command_that_would_keep_nothing_deletes_nothing(
        self, store: ArtefactStore, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
    ) -> None:
        store.publish(artefact)
        monkeypatch.chdir(tmp_path)
        Path("keep.json").write_text('{"keep": []}')

        assert main(["--store", str(store.uri), "collect", *words, "--older-than-seconds", "-60"]) == 1
        assert self.capture.readouterr().err.startswith("error: --keep")
        assert len(store.entries()) == 1

    def test_the_store_of_each_namespace_keeps_what_that_namespace_refers_to(
        self, store: ArtefactStore, root: Path, tmp_path: Path
    ) -> None:
        one, two = (write_artefact(tmp_path / key, key=key) for key in "ab")
        first, second = digest_of(one), digest_of(two)
        for name in ("a", "b"):
            own = open_store(store.uri.of_namespace(name))
            assert {own.publish(folder).digest for folder in (one, two)} == {first, second}
        store.publish(one)
        store.publish(two)
        there = self.run("--store", store.uri, "list")
        assert [entry.get("namespace", "") for entry in there] == ["", "", "a", "a", "b", "b"]

        keep = f"a/{first.hexadecimal[:16]},{second.hexadecimal[:16]}", f"c/{first}"
        words = (f"--keep={text}" for text in keep)
        collected = self.run("--store", store.uri, "collect", *words, "--older-than-seconds", -60)

        assert {(entry["namespace"], entry["digest"]) for entry in collected} == {("b", str(first)), ("b", str(second))}
        assert len(store.entries()) == 2, "artefacts of versions without stores of namespaces"
        collected = self.run("--store", store.uri, "collect", f"--keep={second}", "--older-than-seconds", -60)
        assert {(entry.get("namespace"), entry["digest"]) for entry in collected} == {
            (None, str(first)),
            ("a", str(first)),
        }

    def test_other_folders_and_links_are_no_stores_of_namespaces(
        self, store: ArtefactStore, artefact: Path, root: Path, tmp_path: Path
    ) -> None:
        own = open_store(store.uri.of_namespace("a"))
        digest = own.publish(artefact).digest
        outside = tmp_path / "outside" / digest.hexadecimal
        outside.mkdir(parents=True)
        (outside / "kept.txt").touch()
        (root / "namespaces" / "b").symlink_to(root / "namespaces" / "a")
        (root / "namespaces" / "Not_A_Namespace").mkdir()
        (root / "models" / ("c" * 64)).mkdir(parents=True)
        # In the store of a namespace, its jobs may make links.
        (root / "namespaces" / "a" / ("d" * 64)).symlink_to(outside)
        (root / "namespaces" / "a" / f".{'e' * 64}-draft").symlink_to(outside)

        there = self.run("--store", store.uri, "list")
        collected = self.run("--store", store.uri, "collect", f"--keep=a/{digest}", "--older-than-seconds", -60)

        assert [(entry["namespace"], entry["digest"]) for entry in there] == [("a", str(digest))]
        assert collected == []
        assert (outside / "kept.txt").exists()
        assert (root / "models" / ("c" * 64)).exists()

    @pytest.mark.parametrize("attack", ["an unreadable folder", "deeply nested folders"])
    def test_the_jobs_of_a_namespace_cannot_stop_the_collection_of_the_others(
        self, store: ArtefactStore, artefact: Path, root: Path, attack: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("a", "c"):
            open_store(store.uri.of_namespace(name)).publish(artefact)
        bad = root / "namespaces" / "b" / ("b" * 64)
        bad.mkdir(parents=True)
        if attack == "an unreadable folder":
            sizes = volume._sizes

            def refuse(folder: Path) -> dict[str, int]:  # root may read all folders
                if folder == bad:
                    raise PermissionError(errno.EACCES, "Permission denied", str(folder))
                return sizes(folder)

            monkeypatch.setattr(volume, "_sizes", refuse)
        else:
            nest(bad, 1500)

        words = ["--store", str(store.uri), "collect", f"--keep=d/{digest_of(artefact)}", "--older-than-seconds=-60"]

        assert main(words) == 1
        answer = self.capture.readouterr()
        assert answer.err.startswith(f"error: the artefact store {store.uri}/namespaces/b ")
        assert [json.loads(line)["namespace"] for line in answer.out.splitlines()] == ["a", "c"]
        remove_nested(bad)

    def test_the_error_for_a_wrong_store_is_one_sentence(self) -> None:
        assert main(["--store", "nowhere", "list"]) == 1
        assert self.capture.readouterr().err.startswith("error: PENSTOCK_STORE_URI: 'nowhere' is no artefact store")


@contextmanager
def mounted(point: Path, *options: str) -> Iterator[None]:
    point.mkdir(exist_ok=True)
    made = subprocess.run(["mount", *options, str(point)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(point)], check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and become another user")

AS_UNPRIVILEGED = """
import os, sys
from pathlib import Path
from penstock.artefact_store import Digest, StoreUri
from penstock.errors import PenstockError
from penstock_runtime.store import open_store
# After the imports: the interpreter may be in a folder that only root may read.
os.setgroups([{gid}]); os.setgid({gid}); os.setuid({uid}); os.umask(0o022)
store = open_store(StoreUri.parse(sys.argv[2]))
try:
    if sys.argv[1] == "publish":
        print(store.publish(Path(sys.argv[3])).digest)
    else:
        print(store.fetch(Digest.parse(sys.argv[4]), Path(sys.argv[3])))
except PenstockError as error:
    print(type(error).__name__, error)
"""


def as_unprivileged(*words: object, uid: int = UNPRIVILEGED, gid: int = UNPRIVILEGED) -> str:
    """The output of a process of an unprivileged user."""
    done = subprocess.run(
        [sys.executable, "-c", AS_UNPRIVILEGED.format(uid=uid, gid=gid), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_root
class TestUsersAndMounts:
    @pytest.fixture
    def place(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        """A folder that other users can reach; pytest's own is for its owner alone."""
        import tempfile

        with tempfile.TemporaryDirectory(prefix="penstock-store-") as name:
            Path(name).chmod(0o755)
            yield Path(name)

    def test_a_volume_with_an_fsgroup_takes_what_a_user_without_rights_publishes(self, place: Path) -> None:
        artefact = write_artefact(place / "artefact")
        root = place / "store"
        root.mkdir()
        # As the kubelet does for fsGroup.
        os.chown(root, 0, UNPRIVILEGED)
        root.chmod(0o2775)
        (place / "cache").mkdir()
        os.chown(place / "cache", 4242, 4242)

        output = as_unprivileged("publish", f"file://{root}", artefact, gid=UNPRIVILEGED)

        assert output == str(digest_of(artefact))
        folder = root / digest_of(artefact).hexadecimal
        assert {path.stat().st_gid for path in (folder, *folder.rglob("*"))} == {UNPRIVILEGED}
        # Another user outside the volume's group: reading needs no further rights, and writes nothing.
        with mounted(root, "--bind", str(root)):
            subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
            output = as_unprivileged("fetch", f"file://{root}", place / "cache", output, uid=4242, gid=4242)
        assert output == str(place / "cache" / folder.name)

    def test_a_store_owned_by_root_is_an_access_error_with_a_remedy(self, place: Path) -> None:
        artefact = write_artefact(place / "artefact")
        (place / "store").mkdir(mode=0o755)

        output = as_unprivileged("publish", f"file://{place / 'store'}", artefact)

        assert output.startswith(
            f"StoreAccessDenied the artefact store file://{place / 'store'} cannot be written by user"
        )
        assert "fsGroup" in output

    def test_a_read_only_mount_refuses_a_publisher(self, place: Path) -> None:
        artefact = write_artefact(place / "artefact")
        root = place / "store"
        root.mkdir()
        store = open_store(StoreUri.parse(f"file://{root}"))
        with mounted(root, "--bind", str(root)):
            subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
            with pytest.raises(StoreAccessDenied, match="Read-only file system"):
                store.publish(artefact)

    def test_a_full_volume_and_a_full_cache_have_separate_errors(self, place: Path) -> None:
        artefact = write_artefact(place / "artefact")
        store = open_store(StoreUri.parse(f"file://{place / 'store'}"))
        with mounted(place / "store", "-t", "tmpfs", "-o", "size=128k", "tmpfs"):
            with pytest.raises(OutOfDisk, match="no space is left in the artefact store"):
                store.publish(artefact)
            assert list((place / "store").iterdir()) == []
        published = store.publish(artefact)
        with (
            mounted(place / "cache", "-t", "tmpfs", "-o", "size=128k", "tmpfs"),
            pytest.raises(OutOfDisk, match="no space is left in the cache"),
        ):
            store.fetch(published.digest, place / "cache")
