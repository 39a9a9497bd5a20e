"""Is this folder the artefact of that digest, to the last byte?"""

from __future__ import annotations

import hashlib
from pathlib import Path

from penstock.artefact_store import Digest
from penstock.errors import ArtefactError
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock_runtime.serving.verification import stranger


def digest_of(folder: Path) -> Digest:
    """The digest of an artefact folder; ArtefactError without a manifest."""
    try:
        return Digest.of((folder / MANIFEST_NAME).read_bytes())
    except OSError as error:
        raise ArtefactError(
            f"{folder} has no {MANIFEST_NAME} that can be read ({error.strerror})",
            remedy="Give the folder that penstock optimize has written",
        ) from error


def file_digest(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(folder: Path, digest: Digest) -> str:
    """What is wrong with a folder as a copy of `digest`, in one clause; empty when it is whole and unaltered.

    Of files that the manifest does not list, those that would be read (`stranger`) are wrong.
    """
    try:
        if digest_of(folder) != digest:
            return f"its {MANIFEST_NAME} is another one"
        manifest = Manifest.load(folder)
        for name, expected in manifest.files.items():
            if file_digest(folder / name) != expected:
                return f"{name} has changed"
        added = stranger(folder, manifest)
        if added is not None:
            return f"{added} was added"
    except ArtefactError as error:
        return error.message
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})"
    return ""
