"""Small OCI images from files of this machine, without a registry or a builder: an archive that containerd imports."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from images.emulation import own_architecture


@dataclass(frozen=True)
class Image:
    """One layer and how it starts."""

    reference: str
    """localhost/name:tag; with any tag but `latest` Kubernetes does not try to pull it."""

    files: Mapping[str, bytes]
    """Executables, by their path without the leading slash."""

    links: Mapping[str, str]
    """Symbolic links: path to target."""

    command: Sequence[str]

    def archive(self) -> bytes:
        """The image as an OCI archive (a tar), the same bytes for the same image."""
        layer = self._layer()
        config = _json(
            {
                "architecture": own_architecture(),
                "os": "linux",
                "config": {"Env": ["PATH=/bin"], "Entrypoint": list(self.command)},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
            }
        )
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
                "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
            }
        )
        names = {
            "io.containerd.image.name": self.reference,
            "org.opencontainers.image.ref.name": self.reference.rpartition(":")[2],
        }
        described = {**_descriptor("application/vnd.oci.image.manifest.v1+json", manifest), "annotations": names}
        index = _json({"schemaVersion": 2, "manifests": [described]})
        blobs = {f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}": blob for blob in (manifest, config, layer)}
        with io.BytesIO() as buffer:
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                for name, data in {
                    "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
                    "index.json": index,
                    **blobs,
                }.items():
                    _add(tar, name, data, 0o644)
            return buffer.getvalue()

    def _layer(self) -> bytes:
        users = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
        with io.BytesIO() as buffer:
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                for folder in sorted({"etc", "tmp", *(str(Path(path).parent) for path in [*self.files, *self.links])}):
                    if folder != ".":
                        entry = tarfile.TarInfo(folder)
                        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
                        tar.addfile(entry)
                _add(tar, "etc/passwd", users, 0o644)
                for name, data in sorted(self.files.items()):
                    _add(tar, name, data, 0o755)
                for name, target in sorted(self.links.items()):
                    entry = tarfile.TarInfo(name)
                    entry.type, entry.linkname = tarfile.SYMTYPE, target
                    tar.addfile(entry)
            return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(media_type: str, data: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}
