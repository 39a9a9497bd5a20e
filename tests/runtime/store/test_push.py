"""Artefacts in a real registry: push, fetch, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ArtefactError, ModelError, StoreAccessDenied, StoreError, StoreUnavailable
from penstock.resources.core import ModelSource
from penstock_runtime.models.sources.fetch import fetch_artefact, fetch_model
from penstock_runtime.models.sources.transfer import FetchProgress, ignore_progress
from penstock_runtime.registry import AUTH_VARIABLE, Registry
from penstock_runtime.remote import Retries
from penstock_runtime.store.fetch import digest_of, fault
from penstock_runtime.store.push import push_artefact
from tests.runtime.models.registry_server import RealRegistry, auth_of, running_registry
from tests.runtime.store.artefacts import names, write_artefact

FEW = Retries(attempts=2, sleep=lambda _: None)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with running_registry(tmp_path_factory.mktemp("registry") / "root") as found:
        yield found


def target_of(registry: RealRegistry, name: str = "team/emotion:v1") -> ModelSource:
    return ModelSource.parse(f"oci://{registry.address}/{name}")


def test_a_pushed_artefact_comes_back_whole(registry: RealRegistry, tmp_path: Path) -> None:
    artefact, seen = write_artefact(tmp_path / "artefact"), list[FetchProgress]()

    pushed = push_artefact(artefact, target_of(registry), FEW, seen.append)
    found = fetch_artefact(pushed, tmp_path / "cache", ignore_progress)

    assert seen[-1].bytes_done == seen[-1].bytes_total == sum(one.stat().st_size for one in artefact.rglob("*.*"))
    assert fault(found, digest_of(artefact)) == ""
    assert names(found) == names(artefact)
    assert str(pushed).startswith(f"oci://{registry.address}/team/emotion:v1@sha256:")
    assert fetch_artefact(target_of(registry), tmp_path / "cache", ignore_progress) == found


def test_a_second_push_sends_no_blob_again(
    registry: RealRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact = write_artefact(tmp_path / "artefact")
    first = push_artefact(artefact, target_of(registry, "twice:v1"), FEW, ignore_progress)
    monkeypatch.setattr(Registry, "upload", lambda *_: pytest.fail("a blob was sent again"))

    second = push_artefact(artefact, target_of(registry, "twice:v2"), FEW, ignore_progress)

    assert second.digest == first.digest


def test_an_altered_folder_is_not_pushed(registry: RealRegistry, tmp_path: Path) -> None:
    artefact = write_artefact(tmp_path / "artefact")
    (artefact / "config.json").write_text("{}")

    with pytest.raises(ArtefactError, match=r"cannot be pushed: config\.json has changed"):
        push_artefact(artefact, target_of(registry, "altered:v1"), FEW, ignore_progress)


def test_the_registry_decides_who_may_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artefact = write_artefact(tmp_path / "artefact")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with running_registry(tmp_path / "private", auth="token") as private:
        with pytest.raises(StoreAccessDenied, match="the registry refuses the push"):
            push_artefact(artefact, target_of(private), FEW, ignore_progress)
        monkeypatch.setenv(AUTH_VARIABLE, auth_of(private.address))
        pushed = push_artefact(artefact, target_of(private), FEW, ignore_progress)
    with pytest.raises(StoreUnavailable, match="the registry does not answer"):
        push_artefact(artefact, pushed, FEW, ignore_progress)


def test_a_registry_that_refuses_the_manifest_is_a_store_error(
    registry: RealRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact, written = write_artefact(tmp_path / "artefact"), Registry.put_manifest

    def put(self: Registry, reference: str, content: bytes) -> str:
        return written(self, reference, re.sub(rb"sha256:\w{9}", b"sha256:000000000", content))

    monkeypatch.setattr(Registry, "put_manifest", put)
    with pytest.raises(StoreError, match="does not take it"):
        push_artefact(artefact, target_of(registry, "refused:v1"), FEW, ignore_progress)


def test_an_artefact_is_no_model(registry: RealRegistry, tmp_path: Path) -> None:
    push_artefact(write_artefact(tmp_path / "artefact"), target_of(registry, "artefact:v1"), FEW, ignore_progress)

    with pytest.raises(ModelError, match=r"Serve it with penstock serve oci://"):
        fetch_model(target_of(registry, "artefact:v1"), cache=tmp_path / "cache")
