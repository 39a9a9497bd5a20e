"""`oci://` sources: models and artefacts of container registries.

The layouts: images with the model below `/models` (KServe's modelcars), artefacts of CNCF's ModelPack and of Docker
(`ai/*`), and any artefact with files that have a title (ORAS; `penstock push` writes these). A layer is one file, or an
archive. Each blob is verified by its digest before it is unpacked. Archives give regular files only: no links, no
devices, nothing outside the folder.

    <cache>/oci/<digest>/            complete; the digest is that of the manifest, or of the index of manifests
    <cache>/oci/<digest>.blobs/      being fetched, or left by an interrupted fetch: the next fetch resumes it
    <cache>/oci-complete/            records of the complete ones, and what tags last pointed to
"""

from __future__ import annotations

import gzip
import hashlib
import os
import platform
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self, cast

from penstock.errors import (
    CorruptModel,
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    ModelUnavailable,
    PenstockError,
    UnsafeModel,
    UnsupportedModel,
)
from penstock.resources.core import ModelSource
from penstock_runtime.host.disk import lock_file, sync_folders
from penstock_runtime.models.files import check_code, own_graph, read_object
from penstock_runtime.models.gguf_folder import SUFFIX as GGUF
from penstock_runtime.models.sources.hub import SnapshotRecords
from penstock_runtime.models.sources.transfer import (
    MOST_FILES,
    FetchProgress,
    OnConfig,
    OnProgress,
    check_size,
    choose_files,
    ignore_config,
    max_model_bytes,
    translate_folder_errors,
)
from penstock_runtime.registry import CHUNK_BYTES, INDEXES, Registry, RegistryError, RegistryManifest
from penstock_runtime.remote import FailureKind, Retries

IMAGE_FOLDER = "models"
"""The folder of an image that has the model, as KServe's modelcars have it."""
FILE_NAMES = ("org.cncf.model.filepath", "org.opencontainers.image.title")
"""Annotations of a layer with the name of its file."""
ARTEFACT_TYPE = "application/vnd.penstock.artefact.v1"
"""Of manifests that `penstock push` writes."""
_IMAGE_CONFIGS = {"application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"}
_UNPACKED = "io.deis.oras.content.unpack"
"""The annotation of a folder that ORAS has packed."""
_LEFT_OUT = re.compile(r"vnd\.cncf\.model\.(doc|code|dataset)\.|vnd\.docker\.ai\.(license|mmproj)")
"""Media types of layers that no model is made of."""
_ARCHIVE = re.compile(r"[.+]tar([.+]\w+)?$")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_MOST_MEMBERS = 200_000
"""Of all archives of an image together."""
_MOST_HEADER_BYTES = 2**20
"""Of the part of an archive that describes one file, which is read into memory."""
_CAUSES = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError)
"""What reading a damaged archive raises."""


@dataclass(frozen=True)
class ImageLayer:
    """A blob of a manifest."""

    digest: str
    size: int
    name: str = ""
    """Of its file, relative to the model's folder; empty: it is an archive."""
    compressed: bool = False
    """With gzip."""
    below: str = ""
    """The folder of the archive that counts; empty: all of it."""


def layers_of(origin: str, manifest: RegistryManifest) -> list[ImageLayer]:
    """The layers of a manifest that hold files of a model or artefact, lowest first. CorruptModel, UnsafeModel or
    UnsupportedModel for a manifest that cannot be used; `origin` names it in errors."""
    stated, config = manifest.content.get("layers"), manifest.content.get("config")
    if not isinstance(stated, list) or not all(isinstance(one, dict) for one in stated):
        raise CorruptModel(
            f"{origin}: its manifest ({manifest.media_type}) has no layers", remedy="Name an image or an artefact"
        )
    if len(stated) > MOST_FILES:
        raise UnsupportedModel(f"{origin} has {len(stated)} layers", remedy=f"Use at most {MOST_FILES}")
    is_image = isinstance(config, dict) and config.get("mediaType") in _IMAGE_CONFIGS
    found: list[ImageLayer] = []
    shards = sum(_is_unnamed(one, "safetensors") for one in stated)
    for one in stated:
        kind, digest, size = str(one.get("mediaType")), one.get("digest"), one.get("size")
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None or not isinstance(size, int) or size < 0:
            raise CorruptModel(f"{origin}: a layer has no sha256 digest or no size", remedy="Push it again")
        notes, name = _annotations(one), _name(one)
        archive = _ARCHIVE.search(kind)
        packed = is_image or notes.get(_UNPACKED) == "true"
        if packed or (archive and (not name or "vnd.cncf.model." in kind or "vnd.docker.ai." in kind)):
            how = archive[1] if archive and archive[1] else ".gzip" if notes.get(_UNPACKED) == "true" else ""
            if how[1:] not in {"", "gzip"}:
                raise UnsupportedModel(f"{origin}: a layer is packed with {how[1:]}", remedy="Pack it with gzip")
            layer = ImageLayer(digest, size, compressed=bool(how), below=IMAGE_FOLDER if is_image else "")
        elif name:
            layer = ImageLayer(digest, size, _safe_name(origin, name))
        elif _is_unnamed(one, "gguf"):
            layer = ImageLayer(digest, size, f"model{GGUF}")
        elif _is_unnamed(one, "safetensors"):
            number = sum(earlier.name.endswith(".safetensors") for earlier in found) + 1
            shard = f"model-{number:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
            layer = ImageLayer(digest, size, shard)
        else:
            continue
        if not _LEFT_OUT.search(kind):
            found.append(layer)
    return found


def _annotations(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    notes = layer.get("annotations")
    return notes if isinstance(notes, dict) else {}


def _name(layer: Mapping[str, Any]) -> str:
    names = (_annotations(layer).get(key) for key in FILE_NAMES)
    return next((name for name in names if isinstance(name, str) and name), "")


def _is_unnamed(layer: Mapping[str, Any], form: str) -> bool:
    """Whether it is a file of Docker's layout that has no name."""
    return str(layer.get("mediaType")).startswith(f"application/vnd.docker.ai.{form}") and not _name(layer)


def _safe_name(origin: str, text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in text:
        raise UnsafeModel(f"{origin}: the file {text[:100]!r} would be outside the folder", remedy="Push it again")
    return path.as_posix()


@dataclass(frozen=True)
class OciFetch:
    """One fetch of an image or artefact."""

    source: ModelSource
    cache: Path
    retries: Retries
    report: OnProgress
    check: OnConfig = ignore_config
    artefact: bool = False
    """It is an artefact that `penstock push` has written, and not a model."""

    def run(self) -> Path:
        """Fetch and return the folder, or its GGUF file if that is the model. Without a connection a complete copy is
        used. HostError if a local folder cannot be written."""
        with translate_folder_errors(self.cache):
            folder = self._run()
            while len(inner := list(folder.iterdir())) == 1 and inner[0].is_dir():
                folder = inner[0]  # an archive of a folder
        files = [path for path in inner if path.suffix == GGUF]
        return files[0] if len(files) == 1 and not (folder / "config.json").is_file() else folder

    def _run(self) -> Path:
        pinned = self._records.whole(self.source.digest) if self.source.digest else None
        if pinned is not None:
            return pinned
        try:
            top = self._ask(lambda: self._registry.manifest(self.source.digest or str(self.source.revision)))
        except ModelUnavailable as error:
            cached = self._records.whole(resolved_digest(self.source, self.cache))
            if cached is None:
                raise
            note = f"{error.message}: using the copy that was fetched before"
            self.report(FetchProgress(str(self.source), "", 0, 0, note))
            return cached
        folder = self._records.whole(top.digest) or self._fetch(top)
        self._records.point(_tag(self.source), top.digest)
        return folder

    def _fetch(self, top: RegistryManifest) -> Path:
        manifest = self._of_this_machine(top)
        is_artefact = manifest.content.get("artifactType") == ARTEFACT_TYPE
        if is_artefact is not self.artefact:
            raise ModelError(
                f"{self.source} is {'' if is_artefact else 'not '}an artefact that penstock push has written",
                remedy="Serve it with penstock serve oci://..."
                if is_artefact
                else "Name a model in a ModelEndpoint file",
            )
        layers = self._wanted(layers_of(str(self.source), manifest))
        check_size(str(self.source), sum(one.size for one in layers))
        folder = self.cache / "oci" / top.digest.removeprefix("sha256:")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.with_suffix(".lock")):
            if (found := self._records.whole(top.digest)) is not None:  # another process was faster
                return found
            blobs, unfinished = folder.with_suffix(".blobs"), folder.with_suffix(".partial")
            for path in (folder, unfinished):
                shutil.rmtree(path, ignore_errors=True)
            blobs.mkdir(exist_ok=True)
            self._fetch_blobs(layers, blobs)
            unfinished.mkdir()
            unpacking = _Unpacking(str(self.source), unfinished)
            for layer in layers:
                unpacking.add(layer, _path(blobs, layer))
            if not any(unfinished.iterdir()):
                raise CorruptModel(
                    f"{self.source} has no files of a model",
                    remedy=f"An image has them below /{IMAGE_FOLDER}; layers of an artefact have titles",
                )
            sync_folders(unfinished)
            unfinished.rename(folder)
            sync_folders(folder.parent, below=False)
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            self._records.remember(top.digest, folder, names)
            shutil.rmtree(blobs)
        return folder

    def _wanted(self, layers: Sequence[ImageLayer]) -> list[ImageLayer]:
        """Of files with known names those that a model is made of; with archives all."""
        files = {one.name: one for one in layers if one.name}
        if self.artefact or len(files) < len(layers):
            return list(layers)
        models = [one for name, one in files.items() if name.endswith(GGUF)]
        if models and "config.json" not in files:
            if len(models) > 1:
                raise UnsupportedModel(f"{self.source} has {len(models)} GGUF files", remedy="Push one of them alone")
            return models
        return [files[name] for name in choose_files(str(self.source), files, graph=True)]

    def _fetch_blobs(self, layers: Sequence[ImageLayer], folder: Path) -> None:
        total, done = sum(one.size for one in layers), 0
        # config.json comes first: it shows whether the model can be served before gigabytes are fetched.
        for layer in sorted(layers, key=lambda one: one.name != "config.json"):
            path, name = _path(folder, layer), layer.name or f"layer {layer.digest[7:19]}"
            report = partial(self._report, name, done, total)
            report(0)
            if not path.is_file():
                self._fetch_blob(layer, path, report)
            if layer.name == "config.json" and not self.artefact:
                config = read_object(folder, path.name)
                names = [one.name for one in layers]
                check_code(str(self.source), config, has_graph="" in names or own_graph(names) is not None)
                self.check(config)
            done += layer.size
        self._report("", done, total, 0)

    def _report(self, name: str, done: int, total: int, more: int) -> None:
        self.report(FetchProgress(str(self.source), name, done + more, total))

    def _fetch_blob(self, layer: ImageLayer, path: Path, report: Callable[[int], None]) -> None:
        unfinished = path.with_suffix(".part")
        with unfinished.open("ab") as file:
            if file.tell() > layer.size:
                _cut(file, 0)
            while file.tell() < layer.size:
                self._ask(partial(self._read_on, layer, file, report))
            file.flush()
            os.fsync(file.fileno())
        with unfinished.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if f"sha256:{digest}" != layer.digest:
            unfinished.unlink()
            raise CorruptModel(
                f"{self.source}: the registry sends other bytes than those of {layer.name or 'a layer'} "
                f"({layer.digest[:19]})",
                remedy="Push it again, or try later",
            )
        unfinished.rename(path)

    def _read_on(self, layer: ImageLayer, file: IO[bytes], report: Callable[[int], None]) -> None:
        """Read the rest of a blob, or part of it: after a connection that brought something, the next one is not a
        repeated attempt. A registry that begins at the start again brings nothing by this measure."""
        start = file.tell()
        failure = RegistryError(FailureKind.UNAVAILABLE, f"{layer.name or 'a layer'} ends before its size")
        try:
            with closing(self._registry.blob(layer.digest, start)) as chunks:
                for position, chunk in chunks:
                    if position < file.tell():
                        _cut(file, position)
                        start = layer.size
                    file.write(chunk[: layer.size - position])
                    report(file.tell())
                    if file.tell() >= layer.size:
                        return
        except RegistryError as error:
            failure = error
        if file.tell() <= start:
            raise failure

    def _of_this_machine(self, top: RegistryManifest) -> RegistryManifest:
        """The manifest, of an index the one for this machine."""
        if top.media_type not in INDEXES:
            return top
        stated = top.content.get("manifests")
        entries = [one for one in stated if isinstance(one, dict)] if isinstance(stated, list) else []
        machine = platform.machine()
        wanted = {"os": "linux", "architecture": _MACHINES.get(machine, machine)}

        def fits(entry: Mapping[str, Any]) -> bool:
            found = entry.get("platform")
            return isinstance(found, dict) and all(found.get(key) == value for key, value in wanted.items())

        # One alone may have no platform, or another one: models are the same on all.
        chosen = next(filter(fits, entries), entries[0] if len(entries) == 1 else {})
        digest = chosen.get("digest")
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
            raise ModelNotFound(
                f"{self.source}: none of its {len(entries)} images is for linux/{wanted['architecture']}",
                remedy="Push one, or name the digest of another one",
            )
        found: RegistryManifest = self._ask(lambda: self._registry.manifest(digest))
        if found.media_type in INDEXES:
            raise UnsupportedModel(f"{self.source} is an index of indexes", remedy="Name the digest of an image")
        return found

    def _ask(self, action: Callable[[], Any]) -> Any:
        def translated() -> Any:
            try:
                return action()
            except RegistryError as error:
                raise registry_error(error, self.source) from error

        return self.retries.run(translated)

    @cached_property
    def _registry(self) -> Registry:
        return Registry.of(self.source.location)

    @property
    def _records(self) -> SnapshotRecords:
        return _records(self.cache)


def _records(cache: Path) -> SnapshotRecords:
    return SnapshotRecords(cache / "oci-complete")


def _tag(source: ModelSource) -> str:
    return f"{source.location}:{source.revision}"


def resolved_digest(source: ModelSource, cache: Path) -> str | None:
    """The digest that the source's tag had at the last fetch, or that is written in the source."""
    return source.digest or _records(cache).commit_of(_tag(source))


def registry_error(error: RegistryError, source: ModelSource) -> PenstockError:
    """The error of Penstock for a request that failed."""
    match error.kind:
        case FailureKind.NO_OBJECT | FailureKind.NO_BUCKET:
            return ModelNotFound(f"{source}: the registry has none ({error.reason})", remedy="Check name, tag, digest")
        case FailureKind.DENIED:
            return ModelAccessDenied(
                f"{source}: the registry refuses access ({error.reason})",
                remedy="Check the name; for a private one give credentials (docs/reference/models.md#registries)",
            )
        case FailureKind.REFUSED:
            return ModelError(f"{source}: the registry does not give it ({error.reason})", remedy="Check the address")
        case FailureKind.UNAVAILABLE:
            return ModelUnavailable(
                f"{source}: the registry does not deliver ({error.reason})",
                remedy="Check its address and the connection, and try again later",
                retry_after_seconds=error.retry_after_seconds,
            )


def _cut(file: IO[bytes], position: int) -> None:
    file.seek(position)
    file.truncate()


def _path(blobs: Path, layer: ImageLayer) -> Path:
    return blobs / layer.digest.removeprefix("sha256:")


class _Member(tarfile.TarInfo):
    """A part of an archive that cannot make tarfile read more than some memory."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
        """See `tarfile.TarInfo`."""
        found = super().frombuf(buf, encoding, errors)
        if not found.isreg() and found.size > _MOST_HEADER_BYTES:
            raise tarfile.HeaderError(f"a header of {found.size} bytes")
        return found


@dataclass
class _Unpacking:
    """Puts the files of layers into a folder, later layers over earlier ones."""

    origin: str
    folder: Path
    left: int = field(default_factory=max_model_bytes)
    """Bytes that may still be read from archives."""
    members: int = 0
    files: int = 0

    def add(self, layer: ImageLayer, blob: Path) -> None:
        """Add a layer. CorruptModel, UnsafeModel or UnsupportedModel for an archive that cannot be used."""
        if layer.name:
            target = self._target(layer.name)
            try:
                os.link(blob, target)
            except OSError:  # a file system without hard links
                shutil.copyfile(blob, target)
            return
        try:
            with (
                gzip.open(blob) if layer.compressed else blob.open("rb") as file,
                tarfile.open(
                    fileobj=cast("IO[bytes]", _Counted(file, self)), mode="r|", bufsize=CHUNK_BYTES, tarinfo=_Member
                ) as archive,
            ):
                self._add_archive(layer, archive)
        except _CAUSES as error:
            raise CorruptModel(
                f"{self.origin}: the layer {layer.digest[:19]} cannot be unpacked ({error})", remedy="Push it again"
            ) from error

    def _add_archive(self, layer: ImageLayer, archive: tarfile.TarFile) -> None:
        mine: set[Path] = set()
        for member in archive:
            self.members += 1
            if self.members > _MOST_MEMBERS:
                raise UnsupportedModel(f"{self.origin} has over {_MOST_MEMBERS:,} files", remedy="Use a smaller image")
            path = PurePosixPath("/", member.name).relative_to("/")
            if layer.below:
                if not path.is_relative_to(layer.below):
                    continue
                path = path.relative_to(layer.below)
            if member.isdir() or not path.parts:
                continue
            if path.name.startswith(".wh."):
                self._delete(self.folder / _safe_name(self.origin, path.as_posix()), mine)
                continue
            if not member.isreg() or member.issparse():
                raise UnsafeModel(
                    f"{self.origin}: {member.name[:100]!r} is a link or a special file",
                    remedy="Pack copies of the files (hf download --local-dir makes them)",
                )
            source = archive.extractfile(member)
            if source is not None:
                target = self._target(_safe_name(self.origin, path.as_posix()))
                with source, target.open("xb") as file:
                    shutil.copyfileobj(source, file, CHUNK_BYTES)
                mine.add(target)

    def _delete(self, mark: Path, mine: set[Path]) -> None:
        """Delete what a whiteout of a layer hides: a file or folder of earlier layers, or all in a folder."""
        hidden = mark.with_name(mark.name.removeprefix(".wh."))
        if mark.name == ".wh..wh..opq":
            for path in list(mark.parent.rglob("*")):
                if path.is_file() and path not in mine:
                    path.unlink()
        elif hidden.is_dir():
            shutil.rmtree(hidden)
        else:
            with suppress(FileNotFoundError, NotADirectoryError):
                hidden.unlink()

    def _target(self, name: str) -> Path:
        """Where a file is to be written; what is there is removed."""
        self.files += 1
        if self.files > MOST_FILES:
            raise UnsupportedModel(f"{self.origin} has over {MOST_FILES} files", remedy="Leave out what is not needed")
        target = self.folder / name
        for parent in reversed(target.relative_to(self.folder).parents):
            if (self.folder / parent).is_file():
                (self.folder / parent).unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        return target


@dataclass
class _Counted:
    """A file of which no more can be read than an unpacking may."""

    file: Any
    unpacking: _Unpacking

    def read(self, size: int) -> bytes:
        """Up to `size` bytes."""
        content: bytes = self.file.read(size)
        self.unpacking.left -= len(content)
        if self.unpacking.left < 0:
            check_size(self.unpacking.origin, max_model_bytes() - self.unpacking.left, what="archives, unpacked,")
        return content
