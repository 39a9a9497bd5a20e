"""Resolves a source URL to a checked model folder on this machine."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.errors import ModelNotFound, PenstockError, UnsafeModel
from penstock.resources.core import ModelSource, Scheme
from penstock_runtime.models import gguf_folder
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sources import static_folder
from penstock_runtime.models.sources.hub import HubFetch
from penstock_runtime.models.sources.object_source import ObjectFetch, fetch_object, open_source
from penstock_runtime.models.sources.oci_source import OciFetch, resolved_digest
from penstock_runtime.models.sources.transfer import (
    FetchProgress,
    OnConfig,
    OnProgress,
    check_size,
    ignore_config,
    ignore_progress,
)
from penstock_runtime.remote import DEFAULT_RETRIES, Retries

PVC_ROOT_VARIABLE = "PENSTOCK_PVC_ROOT"
DEFAULT_PVC_ROOT = "/var/run/penstock/claims"
"""Where the operator mounts persistent volume claims, each under its name."""
FILE_PREFIX_VARIABLE, FILE_ROOT_VARIABLE = "PENSTOCK_FILE_PREFIX", "PENSTOCK_FILE_ROOT"
"""`file://` sources are below the prefix, which is mounted at the root. Not set: they are read where they are."""


def fetch_model(
    source: ModelSource,
    *,
    cache: Path,
    token: str | None = None,
    on_progress: OnProgress = ignore_progress,
    graph: bool = False,
    retries: Retries = DEFAULT_RETRIES,
    check: OnConfig = ignore_config,
) -> ModelFolder:
    """Fetch a model, or find it locally, and check it.

    `cache` stores downloads and may be shared by processes; local sources are not copied. `token` is for the hub.
    `graph` True fetches the model's ONNX file even if there are safetensors (by default only one of the two).
    `on_progress` is called, from several threads, with the progress and with a note before each retry. `check` is
    called with a remote model's config.json before its weights are fetched, and may refuse it.
    Raises ModelNotFound, ModelAccessDenied, MissingPackage; UnsupportedModel for more than `max_model_bytes`;
    ModelUnavailable (temporary) after `retries`; and the errors of `ModelFolder.open`.
    """
    retries = reporting(retries, source, on_progress)
    match source.scheme:
        case Scheme.FILE:
            folder = _file_folder(source, os.environ.get(FILE_PREFIX_VARIABLE), os.environ.get(FILE_ROOT_VARIABLE))
        case Scheme.PKG:
            folder = _package_folder(source)
        case Scheme.PVC:
            folder = _claim_folder(source, Path(os.environ.get(PVC_ROOT_VARIABLE) or DEFAULT_PVC_ROOT))
        case Scheme.HF:
            folder = HubFetch(source, cache, token, graph=graph, retries=retries, report=on_progress, check=check).run()
        case Scheme.OCI:
            folder = OciFetch(source, cache, retries, on_progress, check).run()
        case Scheme.S3 | Scheme.GS | Scheme.AZ:
            folder = ObjectFetch(
                source, open_source(source), cache, graph=graph, retries=retries, report=on_progress, check=check
            ).run()
    check_bytes = partial(check_size, str(source), what="tensors as float32")
    if _is_gguf(folder):
        name, size = folder.name, folder.stat().st_size
        on_progress(FetchProgress(str(source), name, 0, size))
        folder = gguf_folder.unpack(folder, cache, check_bytes)
        on_progress(FetchProgress(str(source), name, size, size))
    elif static_folder.is_static(folder):
        folder = static_folder.unpack(folder, cache, check_bytes)
    return ModelFolder.open(folder)


def fetch_artefact(source: ModelSource, cache: Path, on_progress: OnProgress) -> Path:
    """The folder of an artefact that `penstock push` has written, each file verified by its digest; errors as
    `fetch_model`, and ModelError for an image or artefact of another kind."""
    retries = reporting(DEFAULT_RETRIES, source, on_progress)
    return OciFetch(source, cache, retries, on_progress, artefact=True).run()


def resolved_source(source: ModelSource, cache: Path) -> str:
    """The source with the commit or digest that its branch or tag had when it was fetched into `cache`; empty for
    sources without versions."""
    revision: str | None = None
    if source.scheme is Scheme.HF:
        revision = HubFetch(source, cache, None, graph=False, retries=DEFAULT_RETRIES, report=ignore_progress).commit()
    elif source.scheme is Scheme.OCI:
        digest = resolved_digest(source, cache)
        revision = source.revision if digest == source.digest else f"{source.revision}@{digest}"
    return "" if revision is None else str(replace(source, revision=revision))


MOST_FILE_BYTES = 2**30
"""Of a single file from an object store."""


def fetch_file(source: ModelSource, folder: Path) -> Path:
    """One file of a volume, a folder or an object store, which is read into `folder`. Raises ModelNotFound,
    ModelAccessDenied, ModelUnavailable (temporary), UnsafeModel, and UnsupportedModel for over MOST_FILE_BYTES."""
    if source.scheme is Scheme.PVC:
        return _claim_folder(source, Path(os.environ.get(PVC_ROOT_VARIABLE) or DEFAULT_PVC_ROOT))
    if source.scheme is Scheme.FILE:
        return _file_folder(source, os.environ.get(FILE_PREFIX_VARIABLE), os.environ.get(FILE_ROOT_VARIABLE))
    place, _, name = source.location.rpartition("/")
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    DEFAULT_RETRIES.run(partial(fetch_object, replace(source, location=place), name, path, MOST_FILE_BYTES))
    return path


def reporting(retries: Retries, source: ModelSource, on_progress: OnProgress) -> Retries:
    """`retries` that also report each failed attempt as progress."""

    def on_failure(error: PenstockError, seconds: float) -> None:
        retries.on_failure(error, seconds)
        on_progress(FetchProgress(str(source), "", 0, 0, f"{error.message}: trying again in {seconds:.0f} s"))

    return replace(retries, on_failure=on_failure)


def _package_folder(source: ModelSource) -> Path:
    """The folder inside an installed package. The package is not imported, since that would run its code."""
    name, _, rest = source.location.partition("/")
    top, *inner = name.split(".")
    try:
        # The first name only: for a dotted name, find_spec imports the parent packages.
        spec = importlib.util.find_spec(top)
    except ValueError:
        spec = None
    if spec is None:
        raise ModelNotFound(
            f"{source}: there is no package {top} here",
            remedy=f"Run pip install {top.replace('_', '-')} (the name that pip knows may be another)",
        )
    places = [Path(place, *inner, rest) for place in spec.submodule_search_locations or ()]
    folder = next((place for place in places if place.is_dir() or _is_gguf(place)), None)
    if folder is None:
        where = f"the package {name} has no folder {rest}" if rest else f"{name} is no package with files"
        raise ModelNotFound(f"{source}: {where}", remedy="Write pkg://import_name/folder as the package lays it out")
    return folder


def _is_gguf(path: Path) -> bool:
    return path.suffix == gguf_folder.SUFFIX and path.is_file()


def _file_folder(source: ModelSource, prefix: str | None, root: str | None) -> Path:
    if not prefix or not root:
        return Path(source.location)
    path = Path("/" + source.location.lstrip("/"))
    if not path.is_relative_to(prefix):
        raise ModelNotFound(
            f"{source} is not below {prefix}, which is mounted here", remedy=f"Name a folder of {prefix}"
        )
    folder = Path(root, path.relative_to(prefix))
    if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root)):
        raise UnsafeModel(f"{source} leads out of {prefix} by a link", remedy=f"Copy the model into {prefix}")
    return folder


def _claim_folder(source: ModelSource, root: Path) -> Path:
    claim = source.location.partition("/")[0]
    if not (root / claim).is_dir():
        raise ModelNotFound(
            f"{source}: the claim {claim} is not mounted at {root / claim}",
            remedy=f"On a cluster the operator mounts it; elsewhere set {PVC_ROOT_VARIABLE} to the folder that holds "
            "the claim, or use a file:// source",
        )
    folder = root / source.location
    if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root / claim)):
        raise UnsafeModel(f"{source} leads out of the claim by a link", remedy="Copy the model into the claim")
    return folder
