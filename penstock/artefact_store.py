"""Where artefacts are kept, and how they are named there: a URI and a digest. Pure; `penstock_runtime.store` does it.

    <store>/<digest, hexadecimal>/manifest.json     sha256 of this file is the digest
                                  report.html       the evidence for people; not served
                                  ...               every other file, its sha256 in the manifest

What a digest names never changes: whoever has the manifest that hashes to it can check every byte.
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
"""Of a digest, in a list of what is to be kept: ten thousand whole ones would not fit into a ConfigMap. That two begin
alike keeps one more."""
_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")
_SHAPES = {
    "file": (r"/.+", "file:///absolute/path"),
    "s3": (r"[a-z0-9][a-z0-9.-]{1,62}(/.*)?", "s3://bucket/prefix"),
    "gs": (r"[a-z0-9][a-z0-9._-]{1,220}(/.*)?", "gs://bucket/prefix"),
    "az": (r"[a-z0-9][a-z0-9-]{2,62}(/.*)?", "az://container/prefix"),
}
_FORMS = ", ".join(shape for _, shape in _SHAPES.values())


class StoreScheme(StrEnum):
    """The kinds of stores."""

    FILE = "file"
    """A folder: a hostPath or a volume of the cluster, mounted where the URI says."""
    S3 = "s3"
    GS = "gs"
    AZ = "az"


@dataclass(frozen=True)
class StoreUri:
    """A parsed store address."""

    scheme: StoreScheme
    location: str
    """What stands behind `://`, without a slash at the end: a path, or bucket and prefix."""

    @classmethod
    def parse(cls, text: str, *, field: str = "PENSTOCK_STORE_URI") -> StoreUri:
        """Parse; SettingError names `field` and says what to write instead."""
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
        """Where the artefact of this digest lies, as a URI."""
        return f"{self}/{digest.hexadecimal}"


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
        """Of a manifest's bytes."""
        return cls(hashlib.sha256(manifest).hexdigest())

    @property
    def short(self) -> str:
        """For people: the first 12 digits."""
        return self.hexadecimal[:12]

    def __str__(self) -> str:
        return f"{ALGORITHM}:{self.hexadecimal}"
