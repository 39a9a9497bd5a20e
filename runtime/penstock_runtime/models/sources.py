"""From a source URL to a checked model folder on this machine."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

from penstock.errors import ModelNotFound, PenstockError, UnsafeModel
from penstock.resources.source import ModelSource, Scheme
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.hub import HubFetch
from penstock_runtime.models.objects import ObjectFetch, open_filesystem
from penstock_runtime.models.progress import OnProgress, Progress, ignore
from penstock_runtime.store.retries import DEFAULT_RETRIES, Retries

PVC_ROOT_VARIABLE = "PENSTOCK_PVC_ROOT"
DEFAULT_PVC_ROOT = "/var/run/penstock/claims"
"""Where the operator mounts claims, each under its own name."""


def fetch_model(
    source: ModelSource,
    *,
    cache: Path,
    token: str | None = None,
    on_progress: OnProgress = ignore,
    graph: bool = False,
    retries: Retries = DEFAULT_RETRIES,
) -> ModelFolder:
    """Fetch a model, or find it where it lies, and check it.

    `cache` holds what comes over the network, content by content, and may be shared by processes; local sources are
    read in place. `token` is for the hub. `graph` True fetches the model's own ONNX file also where there are
    safetensors (by default only one of the two is fetched).
    `on_progress` hears of what arrives, and in words of each failure that is tried again; from several threads.
    Raises ModelNotFound, ModelAccessDenied, MissingPackage; ModelUnavailable (temporary) after `retries`; and what
    `ModelFolder.open` raises.
    """
    retries = _telling(retries, source, on_progress)
    match source.scheme:
        case Scheme.FILE:
            folder = Path(source.location)
        case Scheme.PKG:
            folder = _package_folder(source)
        case Scheme.PVC:
            folder = _claim_folder(source, Path(os.environ.get(PVC_ROOT_VARIABLE) or DEFAULT_PVC_ROOT))
        case Scheme.HF:
            folder = HubFetch(source, cache, token, graph=graph, retries=retries, report=on_progress).run()
        case Scheme.S3 | Scheme.GS | Scheme.AZ:
            filesystem = open_filesystem(source)
            folder = ObjectFetch(source, filesystem, cache, graph=graph, retries=retries, report=on_progress).run()
    return ModelFolder.open(folder)


def _telling(retries: Retries, source: ModelSource, on_progress: OnProgress) -> Retries:
    """The same, said before each wait."""

    def told(error: PenstockError, seconds: float) -> None:
        retries.told(error, seconds)
        on_progress(Progress(str(source), "", 0, 0, f"{error.message}: trying again in {seconds:.0f} s"))

    return replace(retries, told=told)


def resolved_revision(folder: ModelFolder) -> str | None:
    """The commit of a folder from the hub, None for other sources."""
    path = folder.path
    return path.name if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--") else None


def _package_folder(source: ModelSource) -> Path:
    """The folder inside an installed package, which is not imported: it might do anything."""
    name, _, rest = source.location.partition("/")
    top, *inner = name.split(".")
    try:
        # Of the first name only: for a dotted one, find_spec imports the packages in front.
        spec = importlib.util.find_spec(top)
    except ValueError:
        spec = None
    if spec is None:
        raise ModelNotFound(
            f"{source}: there is no package {top} here",
            remedy=f"Run pip install {top.replace('_', '-')} (the name that pip knows may be another)",
        )
    places = [Path(place, *inner, rest) for place in spec.submodule_search_locations or ()]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        where = f"the package {name} has no folder {rest}" if rest else f"{name} is no package with files"
        raise ModelNotFound(f"{source}: {where}", remedy="Write pkg://import_name/folder as the package lays it out")
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
