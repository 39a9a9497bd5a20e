"""Reads an OCI archive: the files of a built image, layer by layer."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from images.errors import ImageError

WHITEOUT = ".wh."


@dataclass(frozen=True)
class Layer:
    """One layer: its digest as stored, the digest of its uncompressed tar, its compressed size in bytes."""

    digest: str
    diff_id: str
    packed_bytes: int


class Archive:
    """An OCI image in a tar, as `buildah push oci-archive:` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The image's manifest. ImageError if the archive holds not exactly one image."""
        manifests = json.loads(self._read("index.json"))["manifests"]
        if len(manifests) != 1:
            raise ImageError(f"{self.path} holds {len(manifests)} images, not one: build it again with make images")
        return self._blob(manifests[0]["digest"])

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """The image's configuration: environment, user, entry point, history, under their OCI names."""
        return self._blob(self.manifest["config"]["digest"])

    @property
    def layers(self) -> list[Layer]:
        """From the lowest up."""
        diff_ids = self.configuration["rootfs"]["diff_ids"]
        return [
            Layer(entry["digest"], diff_id, entry["size"])
            for entry, diff_id in zip(self.manifest["layers"], diff_ids, strict=True)
        ]

    def entries(self) -> Iterator[tuple[Layer, tarfile.TarInfo, bytes]]:
        """Every member of every layer, with its content; b"" if it is no plain file.

        Files that a higher layer hides are included: they can be read from the image.
        """
        for layer in self.layers:
            for member, content in self.members(layer):
                yield layer, member, content

    def members(self, layer: Layer) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        """Every member of one layer, with its content."""
        with tarfile.open(self.path) as outer:
            blob = outer.extractfile(f"blobs/{layer.digest.replace(':', '/')}")
            assert blob is not None  # noqa: S101 - a plain file, by the OCI layout
            with tarfile.open(fileobj=blob, mode="r|*") as inner:
                for member in inner:
                    file = inner.extractfile(member) if member.isfile() else None
                    yield member, file.read() if file is not None else b""

    def files(self) -> dict[str, tarfile.TarInfo]:
        """The file system of a container: path without a leading slash -> its entry, after all layers."""
        seen: dict[str, tarfile.TarInfo] = {}
        for _, member, _ in self.entries():
            path = member.name.removeprefix("./").strip("/")
            folder, _, name = path.rpartition("/")
            if name.startswith(WHITEOUT):
                gone = f"{folder}/{name.removeprefix(WHITEOUT)}".strip("/")
                for old in [known for known in seen if known == gone or known.startswith(f"{gone}/")]:
                    del seen[old]
            elif path:
                seen[path] = member
        return seen

    def unpacked_bytes(self) -> int:
        """Bytes of all files that a process sees; hard links count once."""
        return sum(member.size for member in self.files().values() if member.isfile())

    def _read(self, name: str) -> bytes:
        try:
            with tarfile.open(self.path) as outer:
                file = outer.extractfile(name)
                assert file is not None  # noqa: S101 - a plain file, by the OCI layout
                return file.read()
        except (KeyError, tarfile.TarError) as error:
            raise ImageError(
                f"{self.path} is no whole OCI archive ({error}): remove it and build it again with make images"
            ) from error

    def _blob(self, digest: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._read(f"blobs/{digest.replace(':', '/')}"))
        return value
