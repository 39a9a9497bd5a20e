"""`s3://` against a real S3 server (versitygw)."""

from __future__ import annotations

import shutil
import socket
from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import (
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    UnsafeModel,
    UnsupportedModel,
)
from penstock.resources.core import ModelSource
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sources import fetch, object_source
from penstock_runtime.models.sources.fetch import fetch_file, fetch_model
from penstock_runtime.models.sources.transfer import FetchProgress
from penstock_runtime.remote import Retries, open_bucket
from tests.runtime.models.folders import bare_folder, sentence_folder, write_pickle
from tests.runtime.models.s3_server import S3

SOURCE = ModelSource.parse("s3://models/team/minilm")
FEW = Retries(attempts=2, sleep=lambda _: None)


def upload(s3: S3, folder: Path, prefix: str = "team/minilm") -> None:
    """Through the server, so that its entity tags and metadata are those of real uploads."""
    bucket = open_bucket("s3", f"models/{prefix}")
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.write(path.relative_to(folder).as_posix(), path)


def test_only_the_files_of_a_model_are_fetched_and_only_once(s3: S3, tmp_path: Path) -> None:
    original = sentence_folder(tmp_path / "original", {"pooling_mode": "cls"}, "Normalize")
    write_pickle(original / "pytorch_model.bin")
    (original / "checkpoint" / "deep" / "deeper").mkdir(parents=True)
    (original / "checkpoint" / "deep" / "deeper" / "x.txt").write_text("x")
    upload(s3, original)
    seen: list[FetchProgress] = []
    folder = fetch_model(SOURCE, cache=tmp_path / "cache", on_progress=seen.append, retries=FEW)
    assert folder.digest() == ModelFolder.open(original).digest()
    assert not (folder.path / "pytorch_model.bin").exists()
    assert seen[-1].bytes_done == seen[-1].bytes_total == sum(path.stat().st_size for path in folder.files)
    seen.clear()
    again = fetch_model(SOURCE, cache=tmp_path / "cache", on_progress=seen.append, retries=FEW)
    assert again.path == folder.path
    assert seen == []


def test_a_replaced_object_of_the_same_size_gives_a_new_folder(s3: S3, tmp_path: Path) -> None:
    original = sentence_folder(tmp_path / "original", {"pooling_mode": "cls"})
    upload(s3, original)
    first = fetch_model(SOURCE, cache=tmp_path / "cache", retries=FEW)
    (original / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    upload(s3, original)
    second = fetch_model(SOURCE, cache=tmp_path / "cache", retries=FEW)
    assert second.path != first.path
    assert (first.pooling, second.pooling) == ("cls", "max")


def test_a_model_at_the_top_of_a_bucket(s3: S3, tmp_path: Path) -> None:
    upload(s3, sentence_folder(tmp_path / "original", {}), prefix="top/..".removesuffix("/.."))
    (s3.root / "own").mkdir()
    shutil.copytree(s3.root / "models" / "top", s3.root / "own", dirs_exist_ok=True)
    assert fetch_model(ModelSource.parse("s3://own"), cache=tmp_path / "cache", retries=FEW).model_type == "bert"


def test_pickles_are_refused_before_anything_is_fetched(s3: S3, tmp_path: Path) -> None:
    write_pickle(bare_folder(tmp_path / "original") / "pytorch_model.bin")
    upload(s3, tmp_path / "original")
    with pytest.raises(UnsafeModel, match=r"^s3://models/team/minilm holds pytorch_model\.bin"):
        fetch_model(SOURCE, cache=tmp_path / "cache", retries=FEW)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("url", ["s3://models/nothing/here", "s3://no-such-bucket/x"])
def test_an_empty_prefix_is_an_error(url: str, s3: S3, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is nothing under this name"):
        fetch_model(ModelSource.parse(url), cache=tmp_path / "cache", retries=FEW)


def test_a_wrong_secret_is_access_denied(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(s3, sentence_folder(tmp_path / "original", {}))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-one")
    with pytest.raises(ModelAccessDenied, match="the store refuses access") as caught:
        fetch_model(SOURCE, cache=tmp_path / "cache", retries=FEW)
    assert "not-the-right-one" not in str(caught.value)


def test_an_error_code_of_the_store_itself_is_in_the_message(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS answers an unknown key with 403, versitygw with 404 and a code of its own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    with pytest.raises(ModelError, match="No user exists with the provided access key") as caught:
        fetch_model(SOURCE, cache=tmp_path / "cache", retries=FEW)
    assert not caught.value.temporary


def test_no_credentials_at_all_are_access_denied(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ModelAccessDenied, match="the store refuses access"):
        fetch_model(SOURCE, cache=tmp_path / "cache", retries=FEW)


def test_an_unreachable_server_is_a_temporary_error(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ModelUnavailable, match="the store does not deliver") as caught:
            fetch_model(SOURCE, cache=tmp_path / "cache", retries=FEW)
    assert caught.value.temporary


@pytest.mark.parametrize("size", [0, 10, 14, 25])
@pytest.mark.parametrize("where", ["models/team/sample.jsonl", "models/sample.jsonl"])
def test_one_object_is_fetched_in_chunks(
    s3: S3, where: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_source, "CHUNK_BYTES", 7)
    bucket, _, name = where.rpartition("/")
    open_bucket("s3", bucket).write(name, bytes(range(size)))
    source = ModelSource.parse(f"s3://{where}")
    assert fetch_file(source, tmp_path / "index").read_bytes() == bytes(range(size))
    monkeypatch.setattr(fetch, "MOST_FILE_BYTES", 9)
    if size > 9:
        with pytest.raises(UnsupportedModel, match=r"has over 0 MiB"):
            fetch_file(source, tmp_path / "again")
    with pytest.raises(ModelNotFound, match=r"there is nothing under this name"):
        fetch_file(ModelSource.parse(f"s3://{bucket}/none.jsonl"), tmp_path / "index")
    # The fixture empties folders of the bucket only.
    open_bucket("s3", bucket).delete(name)
