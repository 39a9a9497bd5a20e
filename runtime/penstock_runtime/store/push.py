"""Writes an artefact to a container registry, each file as a layer with its name: `oras pull` reads it, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.artefact_store import ALGORITHM, Digest
from penstock.errors import ArtefactError, PenstockError, StoreAccessDenied, StoreError, StoreUnavailable
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock.resources.core import ModelSource
from penstock_runtime.models.sources.oci_source import ARTEFACT_TYPE, FILE_NAMES
from penstock_runtime.models.sources.transfer import FetchProgress, OnProgress
from penstock_runtime.registry import MOST_MANIFEST_BYTES, OCI_MANIFEST, Registry, RegistryError
from penstock_runtime.remote import FailureKind, Retries
from penstock_runtime.store.fetch import digest_of, fault, file_digest
from penstock_runtime.store.store import REPORT_NAME

_EMPTY = b"{}"
"""The configuration of an artefact that has none, by the specification."""
_LAYER_TYPE = "application/octet-stream"


def push_artefact(folder: Path, target: ModelSource, retries: Retries, report: OnProgress) -> ModelSource:
    """Write an artefact folder to a repository under the target's tag; returns the target with its digest. Blobs that
    the repository has are not sent again.

    ArtefactError: the folder is not a complete artefact. StoreAccessDenied, StoreError; StoreUnavailable after the
    retries.
    """
    artefact = digest_of(folder)
    if wrong := fault(folder, artefact):
        raise ArtefactError(f"{folder} cannot be pushed: {wrong}", remedy="Make the artefact again")
    manifest = Manifest.load(folder)
    names = [*manifest.files, *([REPORT_NAME] if (folder / REPORT_NAME).is_file() else []), MANIFEST_NAME]
    sizes = {name: (folder / name).stat().st_size for name in names}
    registry, done, total, layers = Registry.of(target.location), 0, sum(sizes.values()), []

    def send(digest: str, size: int, content: Path | bytes) -> None:
        if registry.holds(digest):
            return
        if isinstance(content, bytes):
            registry.upload(digest, size, content)
        else:
            with content.open("rb") as file:
                registry.upload(digest, size, file)

    def run(action: Callable[[], object]) -> None:
        def translated() -> None:
            try:
                action()
            except RegistryError as error:
                raise _store_error(error, target) from error

        retries.run(translated)

    for name in names:
        report(FetchProgress(str(target), name, done, total))
        digest = f"{ALGORITHM}:{manifest.files.get(name) or file_digest(folder / name)}"
        run(partial(send, digest, sizes[name], folder / name))
        notes = {FILE_NAMES[-1]: name}
        layers.append({"mediaType": _LAYER_TYPE, "digest": digest, "size": sizes[name], "annotations": notes})
        done += sizes[name]
    report(FetchProgress(str(target), names[-1], done, total))
    empty = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": _digest(_EMPTY), "size": len(_EMPTY)}
    content = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": ARTEFACT_TYPE,
            "config": empty,
            "layers": layers,
            "annotations": {"dev.penstock.model": manifest.model.source, "dev.penstock.digest": str(artefact)},
        }
    ).encode()
    if len(content) > MOST_MANIFEST_BYTES:
        raise ArtefactError(f"{folder} has too many files for a registry", remedy="Publish it to an artefact store")
    run(partial(send, _digest(_EMPTY), len(_EMPTY), _EMPTY))
    run(partial(registry.put_manifest, str(target.revision), content))
    return ModelSource(target.scheme, target.location, f"{target.revision}@{_digest(content)}")


def _digest(content: bytes) -> str:
    return str(Digest.of(content))


def _store_error(error: RegistryError, target: ModelSource) -> PenstockError:
    match error.kind:
        case FailureKind.DENIED:
            return StoreAccessDenied(
                f"{target}: the registry refuses the push ({error.reason})",
                remedy="Give credentials that may write there (docs/reference/models.md#registries)",
            )
        case FailureKind.UNAVAILABLE:
            return StoreUnavailable(
                f"{target}: the registry does not answer ({error.reason})",
                remedy="Check its address and the connection, and try again later",
            )
        case _:
            return StoreError(
                f"{target}: the registry does not take it ({error.reason})", remedy="Check its address and the name"
            )
