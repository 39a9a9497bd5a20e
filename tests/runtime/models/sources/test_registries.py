"""`oci://` against a real registry: the layouts, authentication, verification, resuming, and archives that attack."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import (
    CorruptModel,
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    PenstockError,
    SettingError,
    UnsafeModel,
    UnsupportedModel,
)
from penstock.resources.core import ModelSource
from penstock_runtime import registry as client
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sources.fetch import fetch_artefact, fetch_model, resolved_source
from penstock_runtime.models.sources.transfer import MAX_BYTES_VARIABLE, FetchProgress, ignore_progress
from penstock_runtime.registry import AUTH_VARIABLE, Registry, RegistryError
from penstock_runtime.remote import FailureKind, Retries
from tests.runtime.models.folders import bare_folder, model_folder, sentence_folder
from tests.runtime.models.gguf_files import write_gguf
from tests.runtime.models.registry_server import RealRegistry, auth_of, running_registry

FEW = Retries(attempts=2, sleep=lambda _: None)
IMAGE, LAYER = "application/vnd.oci.image.config.v1+json", "application/vnd.oci.image.layer.v1.tar"
TITLE, PATH = "org.opencontainers.image.title", "org.cncf.model.filepath"
CNCF, DOCKER = "application/vnd.cncf.model", "application/vnd.docker.ai"
Entries = Mapping[str, bytes | tarfile.TarInfo]


@pytest.fixture(scope="module")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with running_registry(tmp_path_factory.mktemp("registry") / "root") as found:
        yield found


@pytest.fixture
def registry(open_registry: RealRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RealRegistry:
    """The registry, for a user without credentials."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker"))
    return open_registry


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return sentence_folder(tmp_path / "original", {"pooling_mode": "cls"}, "Normalize")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def packed(entries: Entries, below: str = "", *, compress: bool = False) -> bytes:
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as tar:
        for name, content in entries.items():
            member = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(below + name)
            if isinstance(content, bytes):
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return gzip.compress(inner.getvalue(), 1) if compress else inner.getvalue()


def fetch(registry: RealRegistry, repository: str, cache: Path, **options: Any) -> ModelFolder:
    source = ModelSource.parse(f"oci://{registry.address}/{repository}")
    return fetch_model(source, cache=cache, **{"retries": FEW, **options})


def titled(model: Path, name: str = TITLE, kind: str = LAYER) -> list[tuple[str, bytes, Mapping[str, str]]]:
    return [(kind, content, {name: file}) for file, content in contents(model).items()]


def docker(model: Path) -> list[tuple[str, bytes, Mapping[str, str]]]:
    files = contents(model)
    weights = files.pop("model.safetensors")
    return [(f"{DOCKER}.safetensors", weights, {}), (f"{DOCKER}.vllm.config.tar", packed(files), {}),
            (f"{DOCKER}.license", b"free", {})]  # fmt: skip


LAYOUTS: Mapping[str, Callable[[Path], tuple[list[tuple[str, bytes, Mapping[str, str]]], dict[str, Any]]]] = {
    "modelcar": lambda model: (
        [(f"{LAYER}+gzip", packed({"etc/passwd": b"root"}, compress=True), {}),
         (LAYER, packed(contents(model), "./models/"), {TITLE: "models.tar"})], {"config": IMAGE}),
    "modelpack-raw": lambda model: (titled(model, PATH, f"{CNCF}.weight.v1.raw"), {"config": f"{CNCF}.config.v1+json"}),
    "modelpack-tar": lambda model: (
        [(f"{CNCF}.weight.v1.tar+gzip", packed(contents(model), compress=True), {PATH: "weights"}),
         (f"{CNCF}.doc.v1.tar", packed({"README.md": b"x"}), {})], {"config": f"{CNCF}.config.v1+json"}),
    "docker": lambda model: (docker(model), {"config": f"{DOCKER}.model.config.v0.1+json"}),
    "oras-files": lambda model: (titled(model), {"artifactType": "application/vnd.example"}),
    "oras-folder": lambda model: (
        [(f"{LAYER}+gzip", packed(contents(model), "minilm/", compress=True),
          {TITLE: "minilm", "io.deis.oras.content.unpack": "true"})], {}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_files_of_the_model(
    layout: str, registry: RealRegistry, model: Path, tmp_path: Path
) -> None:
    layers, manifest = LAYOUTS[layout](model)
    digest = registry.push(layout, layers, **manifest)
    seen: list[FetchProgress] = []

    found = fetch(registry, layout, tmp_path / "cache", on_progress=seen.append)

    assert found.digest() == ModelFolder.open(model).digest()
    assert seen[-1].bytes_done == seen[-1].bytes_total > 0
    source = ModelSource.parse(f"oci://{registry.address}/{layout}")
    assert resolved_source(source, tmp_path / "cache") == f"oci://{registry.address}/{layout}:latest@{digest}"
    assert [path.suffix for path in (tmp_path / "cache/oci").iterdir() if path.is_dir()] == [""]
    seen.clear()
    assert fetch(registry, f"{layout}@{digest}", tmp_path / "cache", on_progress=seen.append).path == found.path
    assert seen == []


@pytest.mark.parametrize(
    ("kind", "notes", "config"),
    [(f"{DOCKER}.gguf.v3", {}, f"{DOCKER}.model.config.v0.1+json"), ("text/plain", {TITLE: "files/m.gguf"}, "a/b")],
)
def test_a_gguf_file_is_a_model(
    kind: str, notes: dict[str, str], config: str, registry: RealRegistry, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf")
    name = f"gguf-{len(notes)}"
    registry.push(name, [(kind, (tmp_path / "model.gguf").read_bytes(), notes)], config=config)

    assert fetch(registry, name, tmp_path / "cache").model_type == "llama"


def test_of_an_index_the_image_for_this_machine_is_taken(registry: RealRegistry, model: Path, tmp_path: Path) -> None:
    own = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    layers, manifest = LAYOUTS["modelcar"](model)
    digests = {own: registry.push("many", layers, **manifest), "s390x": registry.push("many", layers[:1], **manifest)}
    server = Registry.of(f"{registry.address}/many")
    entries = [
        {"mediaType": client.OCI_MANIFEST, "digest": digest, "size": len(json.dumps(server.manifest(digest).content)),
         "platform": {"os": "linux", "architecture": name}} for name, digest in digests.items()
    ]  # fmt: skip
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": entries}
    request = urllib.request.Request(
        f"http://{registry.address}/v2/many/manifests/both", json.dumps(index).encode(), method="PUT",
        headers={"Content-Type": "application/vnd.oci.image.index.v1+json"},
    )  # fmt: skip
    urllib.request.urlopen(request).close()

    assert fetch(registry, "many:both", tmp_path / "cache").digest() == ModelFolder.open(model).digest()
    index["manifests"] = [{**one, "platform": {"os": "windows", "architecture": own}} for one in entries]
    request.data = json.dumps(index).encode()
    urllib.request.urlopen(request).close()
    with pytest.raises(ModelNotFound, match=rf"none of its 2 images is for linux/{own}"):
        fetch(registry, "many:both", tmp_path / "cache")


def test_later_layers_replace_and_hide_files_of_earlier_ones(registry: RealRegistry, tmp_path: Path) -> None:
    files = contents(model_folder(tmp_path / "original"))
    stale = {"config.json": b"{}", "modules.json": b"[]", "old/a.txt": b"x", "old/b.txt": b"x", "folder/x": b"x"}
    marks: dict[str, bytes] = {".wh.modules.json": b"", "old/.wh..wh..opq": b"", ".wh.folder": b"", "old/c.txt": b"new"}
    notes: dict[str, str] = {}
    layers = [(LAYER, packed(one, "models/"), notes) for one in (stale, {**files, **marks})]
    registry.push("layers", layers, config=IMAGE)

    assert contents(fetch(registry, "layers", tmp_path / "cache").path) == {**files, "old/c.txt": b"new"}


def special(kind: bytes, name: str = "models/x", target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("entries", "error", "reason"),
    [
        ({"a": special(tarfile.SYMTYPE, target="/etc")}, UnsafeModel, "is a link or a special file"),
        ({"a": special(tarfile.SYMTYPE, target="config.json")}, UnsafeModel, "is a link"),
        ({"a": special(tarfile.LNKTYPE, target="/etc/passwd")}, UnsafeModel, "is a link"),
        ({"a": special(tarfile.CHRTYPE)}, UnsafeModel, "special file"),
        ({"a": special(tarfile.FIFOTYPE)}, UnsafeModel, "special file"),
        ({"models/../../../outside": b"x"}, UnsafeModel, "would be outside the folder"),
        ({"models/../.wh.x": b""}, UnsafeModel, "would be outside the folder"),
        ({f"models/{number}": b"" for number in range(1001)}, UnsupportedModel, "over 1000 files"),
        ({"models/large": bytes(2_000_000)}, UnsupportedModel, "archives, unpacked, have 1,0.* the limit is 1,000,000"),
        ({"elsewhere": b"x"}, CorruptModel, "has no files of a model"),
    ],
)
def test_an_archive_cannot_write_elsewhere_or_without_limit(
    *, entries: Entries, error: type[PenstockError], reason: str, registry: RealRegistry, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "1000000")
    registry.push("attack", [(f"{LAYER}+gzip", packed(entries, compress=True), {})], config=IMAGE)

    with pytest.raises(error, match=reason):
        fetch(registry, "attack", tmp_path / "deep" / "cache")

    assert not [path for path in tmp_path.rglob("*") if path.name in {"outside", "x"}]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(packed({"models/config.json": b"{}"}))[:-20], f"{LAYER}+gzip"),
        (b"no archive at all" * 100, LAYER),
        (b"no archive at all" * 100, f"{LAYER}+gzip"),
        (packed({"a": special(tarfile.XHDTYPE)}).replace(b"00000000000\x00", b"77777777777\x00", 1), LAYER),
    ],
    ids=["cut", "no tar", "no gzip", "a header of 8 GiB"],
)
def test_a_damaged_archive_is_a_corrupt_model(
    content: bytes, kind: str, registry: RealRegistry, tmp_path: Path
) -> None:
    registry.push("damaged", [(kind, content, {})], config=IMAGE)

    with pytest.raises(CorruptModel, match=r"the layer sha256:.* cannot be unpacked"):
        fetch(registry, "damaged", tmp_path / "cache")


@pytest.mark.parametrize(
    ("layers", "error", "reason"),
    [
        ([("text/plain", b"x", {TITLE: "../outside"})], UnsafeModel, "would be outside the folder"),
        ([("text/plain", b"x", {TITLE: "/etc/cron.d/x"})], UnsafeModel, "would be outside the folder"),
        ([(f"{CNCF}.weight.v1.tar+zstd", b"x", {})], UnsupportedModel, "packed with zstd"),
        ([("text/plain", b"x", {TITLE: f"{one}.gguf"}) for one in "ab"], UnsupportedModel, "has 2 GGUF files"),
        ([("text/plain", b"x", {TITLE: "config.json"})], PenstockError, "config.json|no weights"),
        ([], PenstockError, "weights|files of a model"),
    ],
)
def test_an_artefact_that_is_no_model_is_refused(
    layers: Any, error: type[PenstockError], reason: str, registry: RealRegistry, tmp_path: Path
) -> None:
    registry.push("refused", layers)

    with pytest.raises(error, match=reason):
        fetch(registry, "refused", tmp_path / "cache")


def test_sizes_are_compared_with_the_limit_before_anything_is_fetched(
    registry: RealRegistry, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push("large", titled(model))
    monkeypatch.setenv(MAX_BYTES_VARIABLE, "100")

    with pytest.raises(UnsupportedModel, match="the limit is 100"):
        fetch(registry, "large", tmp_path / "cache")

    assert not list((tmp_path / "cache").rglob("*.part"))


def test_the_configuration_is_checked_before_weights_are_fetched(registry: RealRegistry, tmp_path: Path) -> None:
    folder = bare_folder(tmp_path / "original", auto_map={"AutoModel": "modeling.Model"}, model_type="own")
    (folder / "model.safetensors").write_bytes(bytes(5_000_000))
    registry.push("code", titled(folder))
    seen: list[FetchProgress] = []

    with pytest.raises(UnsafeModel, match="code"):
        fetch(registry, "code", tmp_path / "cache", on_progress=seen.append)

    assert max(step.bytes_done for step in seen) < 10_000


def test_a_blob_with_other_bytes_is_refused_and_fetched_again(
    registry: RealRegistry, model: Path, tmp_path: Path
) -> None:
    registry.push("altered", titled(model))
    weights = (model / "model.safetensors").read_bytes()
    blob = registry.blob(f"sha256:{hashlib.sha256(weights).hexdigest()}")
    blob.write_bytes(weights[:-1] + b"?")

    with pytest.raises(CorruptModel, match=r"sends other bytes than those of model\.safetensors"):
        fetch(registry, "altered", tmp_path / "cache")

    blob.write_bytes(weights)
    assert fetch(registry, "altered", tmp_path / "cache").digest() == ModelFolder.open(model).digest()


class Broken:
    """Blobs of which each connection brings `piece` bytes and then breaks, for `times` connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, piece: int, times: int, *, whole: bool = False) -> None:
        self.starts: list[int] = []
        self._times = times
        blob = Registry.blob

        def broken(registry: Registry, digest: str, start: int) -> Generator[tuple[int, bytes]]:
            self.starts.append(start)
            for position, chunk in blob(registry, digest, 0 if whole else start):
                if self._times == 0:
                    yield position, chunk
                    continue
                self._times -= 1
                yield position, chunk[:piece]
                raise RegistryError(FailureKind.UNAVAILABLE, "reset")

        monkeypatch.setattr(Registry, "blob", broken)


def test_a_broken_connection_is_continued_where_it_ended(
    registry: RealRegistry, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push("broken", [(LAYER, packed(contents(model), "models/"), {})], config=IMAGE)
    broken = Broken(monkeypatch, 100, 9)

    assert fetch(registry, "broken", tmp_path / "cache").digest() == ModelFolder.open(model).digest()

    assert broken.starts == [100 * number for number in range(10)]


@pytest.mark.parametrize(("piece", "whole"), [(0, False), (100, True)], ids=["nothing", "always from the start"])
def test_connections_that_bring_nothing_further_are_counted(
    *, piece: int, whole: bool, registry: RealRegistry, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push("broken", [(LAYER, packed(contents(model), "models/"), {})], config=IMAGE)
    broken = Broken(monkeypatch, piece, 1000, whole=whole)

    with pytest.raises(ModelUnavailable, match="reset"):
        fetch(registry, "broken", tmp_path / "cache")

    assert len(broken.starts) <= 3


def test_an_abandoned_fetch_is_resumed(
    registry: RealRegistry, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push("abandoned", [(LAYER, packed(contents(model), "models/"), {})], config=IMAGE)
    monkeypatch.setattr(client, "CHUNK_BYTES", 100)

    def end(step: FetchProgress) -> None:
        if step.bytes_done == 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(registry, "abandoned", tmp_path / "cache", on_progress=end)
    broken = Broken(monkeypatch, 0, 0)

    assert fetch(registry, "abandoned", tmp_path / "cache").digest() == ModelFolder.open(model).digest()
    assert broken.starts == [300]


def test_without_a_connection_the_last_copy_is_used(registry: RealRegistry, model: Path, tmp_path: Path) -> None:
    with running_registry(tmp_path / "second") as second:
        digest = second.push("minilm", titled(model))
        found = fetch(second, "minilm", tmp_path / "cache")
    notes: list[FetchProgress] = []

    assert fetch(second, "minilm", tmp_path / "cache", on_progress=notes.append).path == found.path
    assert notes[-1].note.endswith("using the copy that was fetched before")
    assert fetch(second, f"minilm@{digest}", tmp_path / "cache").path == found.path
    with pytest.raises(ModelUnavailable, match="the registry does not deliver"):
        fetch(second, "minilm:other", tmp_path / "cache")
    (found.path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelUnavailable):
        fetch(second, "minilm", tmp_path / "cache")


def test_a_damaged_copy_is_fetched_again(registry: RealRegistry, model: Path, tmp_path: Path) -> None:
    registry.push("copy", titled(model))
    found = fetch(registry, "copy", tmp_path / "cache")
    (found.path / "tokenizer.json").unlink()

    assert fetch(registry, "copy", tmp_path / "cache").digest() == ModelFolder.open(model).digest()


@pytest.mark.parametrize("name", ["nothing-here", "nothing-here:v1", f"nothing-here@sha256:{'0' * 64}"])
def test_what_is_not_there_is_not_found(name: str, registry: RealRegistry, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"HTTP 404: (manifest|repository|name)"):
        fetch(registry, name, tmp_path / "cache")


@pytest.mark.parametrize("auth", ["password", "token"])
def test_credentials_of_an_image_pull_secret_or_a_docker_login_are_used(
    auth: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with running_registry(tmp_path / "private", auth=auth) as private:
        monkeypatch.setenv(AUTH_VARIABLE, auth_of(private.address))
        private.push("team/minilm", titled(model))
        assert fetch(private, "team/minilm", tmp_path / "a").digest() == ModelFolder.open(model).digest()
        monkeypatch.delenv(AUTH_VARIABLE)
        with pytest.raises(ModelAccessDenied, match=r"refuses access \(HTTP 401.*docs/reference/models.md#registries"):
            fetch(private, "team/minilm", tmp_path / "b")
        (tmp_path / "config.json").write_text(auth_of(f"http://{private.address}/v2/"))
        assert fetch(private, "team/minilm", tmp_path / "b").digest() == ModelFolder.open(model).digest()
        monkeypatch.setenv(AUTH_VARIABLE, auth_of(private.address, password="wrong"))
        with pytest.raises(ModelAccessDenied):
            fetch(private, "team/minilm", tmp_path / "c")
        # The registry writes the actions in any order.
        scopes = {
            (name, frozenset(actions.split(","))) for name, _, actions in (a.rpartition(":") for a in private.asked)
        }
        of_model = "repository:team/minilm"
        assert auth != "token" or {(of_model, frozenset({"pull"})), (of_model, frozenset({"pull", "push"}))} <= scopes


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"ghcr.io": ("a", "1")}, ("a", "1")),
        ({"https://ghcr.io/v2/": ("a", "1")}, ("a", "1")),
        ({"ghcr.io": ("a", "1"), "ghcr.io/team": ("b", "2"), "ghcr.io/tea": ("c", "3")}, ("b", "2")),
        ({"docker.io": ("a", "1"), "quay.io": ("a", "1")}, None),
        ({}, None),
    ],
)
def test_the_entry_of_the_registry_or_the_longest_path_counts(
    entries: Mapping[str, tuple[str, str]], expected: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = {name: json.loads(auth_of(name, *pair))["auths"][name] for name, pair in entries.items()}
    monkeypatch.setenv(AUTH_VARIABLE, json.dumps({"auths": merged}))

    assert Registry.of("ghcr.io/team/model").basic == expected


def test_docker_hub_has_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH_VARIABLE, auth_of("https://index.docker.io/v1/"))

    found = Registry.of("docker.io/smollm2")

    assert (found.repository, found.basic, found.plain) == ("library/smollm2", ("reader", "secret"), False)


@pytest.mark.parametrize("text", ["[", "[]", '{"auths": {"ghcr.io": {"auth": "?"}}}', '{"auths": {"ghcr.io": 7}}'])
def test_credentials_that_cannot_be_read_are_an_error_of_the_setting(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AUTH_VARIABLE, text)

    with pytest.raises(SettingError, match=AUTH_VARIABLE):
        Registry.of("ghcr.io/team/model")


def test_plain_http_is_for_loopback_and_for_registries_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client.HTTP_VARIABLE, "registry.local:5000, other")
    names = ("localhost:5000", "127.0.0.1", "registry.local:5000", "registry.local", "ghcr.io", "localhost.example.com")

    assert [name for name in names if Registry.of(f"{name}/x").plain] == list(names[:3])


def test_a_token_server_without_encryption_gets_no_password_of_an_https_registry() -> None:
    challenge = 'Bearer realm="http://127.0.0.1:9/token",service="x",scope="repository:a:pull"'

    assert Registry("ghcr.io", "a", ("user", "password"))._authorize(challenge) == ""


def test_a_model_is_no_artefact(registry: RealRegistry, model: Path, tmp_path: Path) -> None:
    registry.push("model", titled(model))

    with pytest.raises(ModelError, match="is not an artefact that penstock push has written"):
        fetch_artefact(ModelSource.parse(f"oci://{registry.address}/model"), tmp_path / "cache", ignore_progress)
