"""Are the files of an artefact those that were optimised?"""

from __future__ import annotations

import hashlib
from pathlib import Path

from penstock.errors import ArtefactError
from penstock.manifest import Manifest, ServedModel

GRAPHS = "model"
"""The folder of the graphs within an artefact."""


def verify_files(folder: Path, manifest: Manifest, *models: ServedModel) -> None:
    """Check every file that these models of an artefact read against its sha256; ArtefactError names the first that is
    missing or altered."""
    graphs = [graph.path for served in models for graph in served.graphs]
    for graph in graphs:
        if graph not in manifest.files:
            raise ArtefactError(f"the manifest of {folder} has no digest of {graph}", remedy="Make the artefact again")
    for name in _names(manifest, graphs):
        path = folder / name
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ArtefactError(
                f"{path} cannot be read ({error.strerror})", remedy="Fetch the artefact again, or make it again"
            ) from error
        if digest != manifest.files[name]:
            raise ArtefactError(
                f"{path} is not the file that was optimised (sha256 {digest[:12]}…, expected "
                f"{manifest.files[name][:12]}…)",
                remedy="Fetch the artefact again, or make it again",
            )


def _names(manifest: Manifest, graphs: list[str]) -> list[str]:
    """The files of these graphs: their folders, and all that is not a graph."""
    own = tuple(f"{graph.rpartition('/')[0]}/" for graph in graphs)
    return [name for name in sorted(manifest.files) if not name.startswith(f"{GRAPHS}/") or name.startswith(own)]
