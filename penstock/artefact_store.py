"""Addresses of artefacts: the URI of a store, and the digest that names an artefact in it. Pure values.

`penstock_runtime.store` reads and writes stores.

    <store>/<digest, hexadecimal>/manifest.json     sha256 of this file is the digest
                                  report.html       the evidence for people; not needed for serving
                                  ...               every other file, its sha256 in the manifest

On a cluster each namespace has its store in the folder `namespaces/<namespace>` of the installation's store.

The contents behind a digest never change: a reader with the manifest of that digest can check every byte.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from penstock.errors import ArtefactError, SettingError

DEFAULT_STORE = Path("artefacts")
"""Folder of artefacts of the command line."""
DEFAULT_MODELS = Path("~/.cache/penstock/models")
"""Folder of downloaded models of the command line."""
ALGORITHM = "sha256"
DIGITS_KEPT = 16
"""First digits of a digest in a list of artefacts to keep: ten thousand whole digests do not fit into a ConfigMap. When
two digests begin alike, both artefacts are kept."""
NAMESPACES = "namespaces"
"""Folder of a store that has a store for each namespace of a cluster. A separate folder: a folder of the store's root
may belong to other programs, or be the store of another installation."""
NAMESPACE_PATTERN = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
"""Names of namespaces in Kubernetes: DNS labels."""
_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")
_SHAPES = {
    "file": (r"/.+", "file:///absolute/path"),
    "s3": (r"[a-z0-9][a-z0-9.-]{1,62}(/.*)?", "s3://bucket/prefix"),
    "gs": (r"[a-z0-9][a-z0-9._-]{1,220}(/.*)?", "gs://bucket/prefix"),
    "az": (r"[a-z0-9][a-z0-9-]{2,62}(/.*)?", "az://container/prefix"),
}
_FORMS = ", ".join(shape for _, shape in _SHAPES.values())


class StoreScheme(StrEnum):
    """The kinds of artefact stores."""

    FILE = "file"
    """A folder: a hostPath or a volume of the cluster, mounted at the path of the URI."""
    S3 = "s3"
    GS = "gs"
    AZ = "az"


@dataclass(frozen=True)
class StoreUri:
    """A parsed store address."""

    scheme: StoreScheme
    location: str
    """The part after `://`, without a trailing slash: a path, or bucket and prefix."""

    @classmethod
    def parse(cls, text: str, *, field: str = "PENSTOCK_STORE_URI") -> StoreUri:
        """Parse; SettingError names `field` and gives a form that is valid."""
        scheme, separator, rest = text.strip().partition("://")
        if not separator or scheme not in _SHAPES:
            meant = f"Did you mean file://{text}?" if text.startswith("/") else f"Known forms: {_FORMS}"
            raise SettingError(f"{field}: {text!r} is no artefact store", field=field, remedy=meant)
        pattern, shape = _SHAPES[scheme]
        parts = rest.split("/")
        if re.fullmatch(pattern, rest) is None or ".." in parts or "@" in parts[0]:
            raise SettingError(
                f"{field}: {text!r} is not of the form {shape}",
                field=field,
                remedy=f"Write {shape}; credentials belong into the environment, not here",
            )
        location = "/".join(part for part in parts if part)
        return cls(StoreScheme(scheme), f"/{location}" if scheme == "file" else location)

    def __str__(self) -> str:
        return f"{self.scheme.value}://{self.location}"

    def of(self, digest: Digest) -> str:
        """The URI of the artefact of this digest."""
        return f"{self}/{digest.hexadecimal}"

    def of_namespace(self, namespace: str) -> StoreUri:
        """The store of a namespace within this one. ValueError if it is no name of a namespace."""
        if re.fullmatch(NAMESPACE_PATTERN, namespace) is None:
            raise ValueError(f"{namespace!r} is no name of a namespace")
        return StoreUri(self.scheme, f"{self.location}/{NAMESPACES}/{namespace}")


@dataclass(frozen=True, order=True)
class Digest:
    """An artefact's name: the sha256 of its manifest."""

    hexadecimal: str

    @classmethod
    def parse(cls, text: str) -> Digest:
        """From `sha256:<64 hexadecimal digits>`, or the digits alone; ArtefactError for anything else."""
        digits = text.strip().removeprefix(f"{ALGORITHM}:")
        if _HEXADECIMAL.fullmatch(digits) is None:
            raise ArtefactError(
                f"{text[:100]!r} is no digest of an artefact",
                remedy="Write sha256: and 64 hexadecimal digits, as OptimizedModel.status has it",
            )
        return cls(digits)

    @classmethod
    def of(cls, manifest: bytes) -> Digest:
        """The digest of the bytes of a manifest."""
        return cls(hashlib.sha256(manifest).hexdigest())

    @property
    def short(self) -> str:
        """For people: the first 12 digits."""
        return self.hexadecimal[:12]

    def __str__(self) -> str:
        return f"{ALGORITHM}:{self.hexadecimal}"
