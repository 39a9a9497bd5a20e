"""Bulk work from and to a real S3 server: the bytes of local work, create-if-absent, errors of the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import StoreAccessDenied, StoreError
from penstock_bulk.corpus import BulkWork, totals
from penstock_bulk.plans import require_plan
from penstock_bulk.storage import open_folder
from penstock_runtime import remote
from tests.bulk.corpora import contents, load, planned, rows, write_lines, write_parquet
from tests.runtime.models.s3_server import S3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Model]:
    with load(tmp_path_factory.mktemp("models")) as loaded:
        yield loaded


def test_a_bucket_gets_the_bytes_of_local_work_and_lost_parts_again(
    s3: S3, model: penstock.Model, tmp_path: Path
) -> None:
    some: list[dict[str, Any]] = rows(150)
    some[5]["text"] = None
    write_parquet(s3.root / "models/corpus/a.parquet", some)
    plan, output, work = planned("s3://models/corpus", "s3://artefacts/out", model)
    work.run()

    found = contents(s3.root / "artefacts/out")
    assert json.loads(found["_manifest.json"])["rows"] == 149
    assert {"_SUCCESS", "_dead/00000000.jsonl", plan.part(0)} <= set(found)
    local = planned_from("s3://models/corpus", tmp_path / "out", model)
    local.run()
    here = contents(tmp_path / "out")
    assert {name: content for name, content in here.items() if name not in {"_lock", "_plan.json"}} == {
        name: content for name, content in found.items() if name != "_plan.json"
    }
    (s3.root / "artefacts/out" / plan.part(1)).unlink()
    assert totals(output).shards == 3
    planned_from("s3://models/corpus", "s3://artefacts/out", model).run()
    assert contents(s3.root / "artefacts/out") == found
    assert BulkWork(require_plan(output), output, model).verify(150).different == ()


def planned_from(source: str, output: Path | str, model: penstock.Model) -> BulkWork:
    return planned(source, output, model)[2]


def test_an_object_is_never_written_over_also_if_it_is_large(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 5 * 2**20)
    folder = open_folder("s3://artefacts/out")
    for content in (b"small", bytes(12 * 2**20)):
        file = tmp_path / "file"
        file.write_bytes(content)
        assert folder.create(f"{len(content)}", file)
        assert not file.exists()
        assert not folder.create(f"{len(content)}", b"other")
        file.write_bytes(b"another")
        assert not folder.create(f"{len(content)}", file)
        assert folder.read(f"{len(content)}") == content
    folder.replace("5", b"new")
    assert folder.read("5") == b"new"
    assert folder.read("absent") is None


def test_a_large_object_is_read_in_parts(s3: S3, tmp_path: Path) -> None:
    content = bytes(range(256)) * 2**15
    (s3.root / "models/corpus").mkdir()
    (s3.root / "models/corpus/a.bin").write_bytes(content)
    folder = open_folder("s3://models/corpus")
    (file,) = folder.files()

    with folder.open(file) as opened:
        assert opened.read(10) == content[:10]
        opened.seek(-5, 2)
        assert opened.read() == content[-5:]
        opened.seek(5_000_000)
        assert opened.read(3_000_000) == content[5_000_000:8_000_000]


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("s3://no-such-bucket/a", StoreError, "there is nothing under this name"),
        ("s3://models/nothing", Exception, "has no file to read"),
    ],
)
def test_what_is_not_there_is_named(
    address: str, error: type[Exception], message: str, s3: S3, model: penstock.Model
) -> None:
    with pytest.raises(error, match=message):
        planned_from(address, "s3://artefacts/out", model)


def test_a_refused_key_is_an_error_that_names_the_bucket(
    s3: S3, model: penstock.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "a.jsonl", rows(3))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")

    with pytest.raises(StoreAccessDenied, match="s3://artefacts/out refuses access"):
        planned_from(str(source), "s3://artefacts/out", model).run()
