"""Fetching from object stores, in memory: resuming, atomicity, changes during a fetch, meaning of errors."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore

from penstock.errors import (
    CorruptModel,
    HostError,
    MissingPackage,
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    SettingError,
    UnsafeModel,
    UnsupportedModel,
)
from penstock.resources.core import ModelSource
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sources import object_source
from penstock_runtime.models.sources.fetch import fetch_model
from penstock_runtime.models.sources.object_source import ObjectFetch, object_error, open_source
from penstock_runtime.models.sources.transfer import FetchProgress, ignore_config, ignore_progress
from penstock_runtime.remote import Bucket, Retries
from penstock_runtime.rows import Pooling
from tests.runtime.models.folders import bare_folder, model_folder, sentence_folder, write_onnx, write_pickle
from tests.runtime.models.gguf_files import write_gguf

ONCE = Retries(attempts=1, sleep=lambda _: None)
THREE_ATTEMPTS = Retries(attempts=3, sleep=lambda _: None)


class Store(MemoryStore):  # type: ignore[misc]
    """A store in memory, with faults on demand."""

    def __init__(self) -> None:
        self.source = ModelSource.parse("s3://bucket/model")
        self.reads: list[tuple[str, int]] = []
        self.more = 0
        """Bytes that it sends in addition."""
        self.before_read: Callable[[str, int], None] = lambda _name, _start: None

    def upload(self, folder: Path) -> Self:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"model/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return self

    def fetch(self, cache: Path, retries: Retries = ONCE, **options: Any) -> ModelFolder:
        report = options.get("report", ignore_progress)
        bucket = Bucket(self, "model")
        check = options.get("check", ignore_config)
        fetch = ObjectFetch(self.source, bucket, cache, options.get("graph", False), retries, report, check)
        return ModelFolder.open(fetch.run())

    def get(self, path: str, **options: Any) -> Any:
        self._read(path, 0)
        return super().get(path, **options)

    def get_range(self, path: str, *, start: int, **options: Any) -> Any:
        self._read(path, start)
        return bytes(super().get_range(path, start=start, **options)) + bytes(self.more)

    def _read(self, path: str, start: int) -> None:
        name = path.rpartition("/")[2]
        self.before_read(name, start)
        self.reads.append((name, start))


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(object_source, "CHUNK_BYTES", 64)
    return 64


def fail(times: int, error: Exception, *, name: str, start: int) -> Callable[[str, int], None]:
    left = [times]

    def fault(read: str, position: int) -> None:
        if read == name and position >= start and left[0] > 0:
            left[0] -= 1
            raise error

    return fault


def test_files_are_fetched_in_chunks_and_joined(store: Store, small_chunks: int, tmp_path: Path) -> None:
    original = model_folder(tmp_path / "original")
    folder = store.upload(original).fetch(tmp_path / "cache")
    assert folder.digest() == ModelFolder.open(original).digest()
    assert len([name for name, _ in store.reads if name == "model.safetensors"]) > 1


def test_a_broken_connection_costs_one_chunk(store: Store, small_chunks: int, tmp_path: Path) -> None:
    store.upload(model_folder(tmp_path / "original"))
    store.before_read = fail(2, ConnectionResetError("reset"), name="model.safetensors", start=64)
    store.fetch(tmp_path / "cache", THREE_ATTEMPTS)
    starts = [start for name, start in store.reads if name == "model.safetensors"]
    assert starts == sorted(set(starts))


@pytest.mark.parametrize("cache", ["/proc/models", "/dev/null/models"])
def test_a_models_folder_that_cannot_be_written_is_an_error_about_it(cache: str, store: Store, tmp_path: Path) -> None:
    store.upload(model_folder(tmp_path / "original"))
    with pytest.raises(
        HostError, match=rf"^the models folder {cache} cannot be .*(--models or PENSTOCK_MODELS|another folder)$"
    ):
        store.fetch(Path(cache))


def test_a_file_in_place_of_the_models_folder_is_a_host_error(store: Store, tmp_path: Path) -> None:
    """The library calls a permission error a denial of the store, but here the local folder is the cause."""
    store.upload(model_folder(tmp_path / "original"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "objects").touch()
    with pytest.raises(HostError, match=r"^the models folder .*cache/objects: "):
        store.fetch(tmp_path / "cache")


def test_an_abandoned_fetch_is_resumed(store: Store, small_chunks: int, tmp_path: Path) -> None:
    original = model_folder(tmp_path / "original")
    store.upload(original)
    store.before_read = fail(1, ConnectionResetError("reset"), name="model.safetensors", start=128)
    with pytest.raises(ModelUnavailable):
        store.fetch(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "objects").iterdir() if path.is_dir()] == [".partial"]
    store.reads.clear()
    folder = store.fetch(tmp_path / "cache")
    assert next(start for name, start in store.reads if name == "model.safetensors") == 128
    assert ("tokenizer.json", 0) not in store.reads
    assert folder.digest() == ModelFolder.open(original).digest()


def test_a_partial_file_that_is_too_long_is_fetched_again(store: Store, small_chunks: int, tmp_path: Path) -> None:
    store.upload(model_folder(tmp_path / "original"))
    store.before_read = fail(1, ConnectionResetError("reset"), name="tokenizer.json", start=0)
    with pytest.raises(ModelUnavailable):
        store.fetch(tmp_path / "cache")
    (partial,) = (tmp_path / "cache" / "objects").glob("*.partial")
    (partial / "config.json").write_bytes(b"x" * 10_000)
    assert store.fetch(tmp_path / "cache").model_type == "bert"


def test_a_copy_that_lost_something_is_fetched_again(store: Store, tmp_path: Path) -> None:
    """By a cleaner of old files, or a node that lost its power: without an optional file a model answers otherwise,
    and with an empty one it would be refused at every start."""
    original = sentence_folder(tmp_path / "original", {"pooling_mode_cls_token": True}, "Normalize")
    whole = store.upload(original).fetch(tmp_path / "cache")
    notes: list[str] = []

    def damaged_and_fetched(damage: Callable[[Path], None], name: str) -> ModelFolder:
        damage(whole.path / name)
        return store.fetch(tmp_path / "cache", report=lambda progress: notes.append(progress.note))

    for damage in (Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"x" * 10_000)):
        for name in ("modules.json", "1_Pooling/config.json", "model.safetensors"):
            folder = damaged_and_fetched(damage, name)
            assert (folder.pooling, folder.normalize) == (Pooling.CLS, True)
            assert folder.digest() == ModelFolder.open(original).digest()
    assert [note for note in notes if note] == [f"the copy in {whole.path} is damaged: fetching it again"] * 9
    store.reads.clear()
    store.fetch(tmp_path / "cache")
    assert [name for name, _ in store.reads] == ["config.json"]


def test_files_are_synced_before_the_folder_gets_its_name(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.upload(sentence_folder(tmp_path / "original", {}))
    happened: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor: int) -> None:
        happened.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def watched_rename(self: Path, target: Path) -> Path:
        happened.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    folder = store.fetch(tmp_path / "cache").path

    unfinished = folder.with_suffix(".partial")
    written = {unfinished / path.relative_to(folder) for path in folder.rglob("*")}
    before = happened[: happened.index("renamed")]
    assert set(map(Path, before)) == {unfinished, *written}
    assert before.index(str(unfinished)) > before.index(str(unfinished / "model.safetensors"))
    assert happened[len(before) :] == ["renamed", str(folder.parent)]


def test_a_fetch_restarts_if_an_object_is_replaced_meanwhile(store: Store, tmp_path: Path) -> None:
    store.upload(model_folder(tmp_path / "original"))
    changed = [False]

    def change(name: str, _: int) -> None:
        if name == "model.safetensors" and not changed[0]:
            changed[0] = True
            store.upload(model_folder(tmp_path / "original", num_labels=7))

    store.before_read = change
    assert store.fetch(tmp_path / "cache", THREE_ATTEMPTS).num_labels == 7
    assert not list((tmp_path / "cache" / "objects").glob("*.partial"))


def test_a_store_that_keeps_changing_is_temporary(store: Store, tmp_path: Path) -> None:
    store.upload(model_folder(tmp_path / "original"))
    labels = iter(range(3, 100))

    def change(name: str, _: int) -> None:
        if name == "model.safetensors":
            store.upload(model_folder(tmp_path / "original", num_labels=next(labels)))

    store.before_read = change
    with pytest.raises(ModelUnavailable, match="changes while it is fetched"):
        store.fetch(tmp_path / "cache", THREE_ATTEMPTS)


def test_an_object_shorter_than_listed_is_temporary(tmp_path: Path) -> None:
    class Short(Store):
        def get_range(self, path: str, *, start: int, **options: Any) -> Any:
            return b"" if path.endswith("tokenizer.json") else super().get_range(path, start=start, **options)

    with pytest.raises(ModelUnavailable, match=r"tokenizer\.json ends before its size"):
        Short().upload(model_folder(tmp_path / "original")).fetch(tmp_path / "cache")


def test_two_processes_fetch_once(store: Store, tmp_path: Path) -> None:
    """The second waits for the first; here the lock is held by hand until the folder is there."""
    store.upload(model_folder(tmp_path / "original"))
    first = store.fetch(tmp_path / "cache")
    hidden = first.path.with_suffix(".hidden")
    first.path.rename(hidden)
    store.reads.clear()
    done: list[ModelFolder] = []
    with first.path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: done.append(store.fetch(tmp_path / "cache")))
        thread.start()
        hidden.rename(first.path)
    thread.join()
    assert done[0].path == first.path
    assert [name for name, _ in store.reads if name != "config.json"] == []


def test_code_of_the_models_own_is_refused_before_the_weights(store: Store, tmp_path: Path) -> None:
    store.upload(model_folder(tmp_path / "original", auto_map={"AutoModel": "m.M"}))
    with pytest.raises(UnsafeModel, match="code of the model's own"):
        store.fetch(tmp_path / "cache")
    assert {name for name, _ in store.reads} == {"config.json"}


def test_a_config_may_be_refused_before_the_weights(store: Store, tmp_path: Path) -> None:
    def check(config: Mapping[str, Any]) -> None:
        raise UnsupportedModel(f"no {config['model_type']}", remedy="Use another one")

    store.upload(model_folder(tmp_path / "original", model_type="mamba"))
    with pytest.raises(UnsupportedModel, match="no mamba"):
        store.fetch(tmp_path / "cache", check=check)
    assert {name for name, _ in store.reads} == {"config.json"}


def test_code_of_the_models_own_with_a_graph_fetches_the_graph(store: Store, tmp_path: Path) -> None:
    write_onnx(model_folder(tmp_path / "original", auto_map={"AutoModel": "m.M"}) / "onnx" / "model.onnx")
    assert store.upload(tmp_path / "original").fetch(tmp_path / "cache").onnx is not None


def test_a_graph_is_fetched_with_its_external_data(store: Store, tmp_path: Path) -> None:
    graph = write_onnx(bare_folder(tmp_path / "original") / "onnx" / "model.onnx")
    (graph.parent / "model.onnx_data").write_bytes(b"weights")
    (graph.parent / "model_quantized.onnx").write_bytes(b"other")
    folder = store.upload(tmp_path / "original").fetch(tmp_path / "cache")
    assert sorted(path.name for path in (folder.path / "onnx").iterdir()) == ["model.onnx", "model.onnx_data"]


@pytest.mark.parametrize("config", ["{", "[]", "null"])
def test_a_damaged_config_is_reported_when_the_folder_is_read(config: str, store: Store, tmp_path: Path) -> None:
    (model_folder(tmp_path / "original") / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"config\.json"):
        store.upload(tmp_path / "original").fetch(tmp_path / "cache")


def test_pickles_and_an_empty_prefix_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is nothing under this name"):
        store.fetch(tmp_path / "cache")
    write_pickle(bare_folder(tmp_path / "original") / "pytorch_model.bin")
    with pytest.raises(UnsafeModel, match=r"holds pytorch_model\.bin"):
        store.upload(tmp_path / "original").fetch(tmp_path / "cache")


def test_progress_counts_up_to_the_whole(store: Store, small_chunks: int, tmp_path: Path) -> None:
    seen: list[FetchProgress] = []
    store.upload(model_folder(tmp_path / "original")).fetch(tmp_path / "cache", report=seen.append)
    done = [step.bytes_done for step in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].bytes_total


class TestErrors:
    SOURCE = ModelSource.parse("gs://bucket/model")

    def answer(self, status: str, text: str = "") -> Exception:
        return GenericError(f"Generic GCS error: - Server returned non-2xx status code: {status}: {text}")

    def test_are_classified_by_the_errors_of_the_stores_library(self) -> None:
        cases: list[tuple[Exception, type[Exception]]] = [
            (FileNotFoundError("x"), ModelNotFound),
            (self.answer("404 Not Found", "<Code>NoSuchBucket</Code>"), ModelNotFound),
            (self.answer("404 The specified container does not exist.", "ContainerNotFound"), ModelNotFound),
            (PermissionDeniedError("Access Denied"), ModelAccessDenied),
            (UnauthenticatedError("no"), ModelAccessDenied),
            (self.answer("401 Unauthorized"), ModelAccessDenied),
            (self.answer("403 Forbidden", "\n<Message>no storage.objects.list access</Message>"), ModelAccessDenied),
            (GenericError("Error performing token request: - status code: 400 Bad Request: "), ModelAccessDenied),
            (GenericError("Error performing token request: - HTTP error: error sending request"), ModelUnavailable),
            (GenericError("PUT http://169.254.169.254/latest/api/token - HTTP error: timeout"), ModelAccessDenied),
            (GenericError("Unable to open service account file from /none: No such file"), ModelAccessDenied),
            (self.answer("503 Service Unavailable"), ModelUnavailable),
            (self.answer("429 Too Many Requests"), ModelUnavailable),
            (self.answer("400 Bad Request"), ModelError),
            (self.answer("301 Moved Permanently"), ModelError),
            (GenericError("Error performing GET http://x - HTTP error: error sending request"), ModelUnavailable),
            (TimeoutError(), ModelUnavailable),
            (ConnectionResetError("reset"), ModelUnavailable),
            (ValueError("Invalid endpoint"), ModelError),
        ]
        for error, expected in cases:
            known = object_error(error, self.SOURCE)
            assert known is not None, error
            assert type(known) is expected, error
            assert known.remedy
            assert "\n" not in str(known)

    def test_a_programming_error_is_not_translated(self, store: Store, tmp_path: Path) -> None:
        assert object_error(TypeError("x"), self.SOURCE) is None
        store.upload(model_folder(tmp_path / "original"))
        store.before_read = fail(1, TypeError("x"), name="config.json", start=0)
        with pytest.raises(TypeError):
            store.fetch(tmp_path / "cache")


@pytest.mark.parametrize("url", ["gs://b/m", "az://container/m", "s3://bucket/m"])
def test_a_missing_package_is_named_with_its_installation(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingPackage, match=r"Run pip install 'penstock\[stores\]'"):
        open_source(ModelSource.parse(url))


def test_a_model_over_the_limit_is_refused_before_anything_is_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.upload(model_folder(tmp_path / "original"))
    monkeypatch.setenv("PENSTOCK_MODEL_MAX_BYTES", "100")
    with pytest.raises(UnsupportedModel, match=r"the limit is 100\. "):
        store.fetch(tmp_path / "cache")
    assert not [one for one in (tmp_path / "cache").rglob("*") if one.is_file() and one.suffix != ".lock"]


def test_a_store_that_sends_more_than_it_listed_is_not_written(store: Store, tmp_path: Path) -> None:
    store.upload(model_folder(tmp_path / "original"))
    store.more = 10**6
    with pytest.raises(CorruptModel, match=r"more than the [0-9,]+ bytes that were listed"):
        store.fetch(tmp_path / "cache")
    written = sum(one.stat().st_size for one in (tmp_path / "cache").rglob("*") if one.is_file())
    assert written < 10**6


def test_a_gguf_file_is_not_expanded_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    source = ModelSource.parse(f"file://{path}")
    monkeypatch.setenv("PENSTOCK_MODEL_MAX_BYTES", "100")
    with pytest.raises(UnsupportedModel, match=r"its tensors as float32 have [0-9,]+ bytes; the limit is 100"):
        fetch_model(source, cache=tmp_path / "cache")
    assert not [one for one in (tmp_path / "cache").rglob("*") if one.is_file()]


def test_a_limit_that_is_no_number_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    store.upload(model_folder(tmp_path / "original"))
    monkeypatch.setenv("PENSTOCK_MODEL_MAX_BYTES", "64Gi")
    with pytest.raises(SettingError, match="'64Gi' is not a number of bytes"):
        store.fetch(tmp_path / "cache")
