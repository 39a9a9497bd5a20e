"""Verifies that the files of an artefact are those that were optimised."""

from __future__ import annotations

import hashlib
from pathlib import Path

from penstock.errors import ArtefactError
from penstock.manifest import Manifest, ServedModel
from penstock_runtime.models.folder import SETTINGS_FILES

GRAPHS = "model"
"""The folder of the graphs within an artefact."""


def verify_files(folder: Path, manifest: Manifest, *models: ServedModel) -> None:
    """Check every file that these models of an artefact read against its sha256; ArtefactError names the first that is
    missing or altered, or that was added and would be read."""
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
    added = stranger(folder, manifest)
    if added is not None:
        raise ArtefactError(
            f"{folder / added} was not there when the artefact was made, and would change its answers",
            remedy="Delete that file, fetch the artefact again, or make it again",
        )


def stranger(folder: Path, manifest: Manifest) -> str | None:
    """The first file of an artefact folder that its manifest does not list and that would be read all the same.

    That is another limit, prompt, pooling or tokenizer setting, which are read where they are found: answers would be
    different from the judged ones. Only they are refused: graphs are opened by their listed names and no other
    file is looked for, and a folder that is a separate volume holds other files as well: the report,
    lost+found, Kubernetes' `..data`, dot-files of file systems.
    """
    return next((name for name in sorted(SETTINGS_FILES - set(manifest.files)) if (folder / name).is_file()), None)


def _names(manifest: Manifest, graphs: list[str]) -> list[str]:
    """The files of these graphs: their folders, and all files that are not graphs."""
    own = tuple(f"{graph.rpartition('/')[0]}/" for graph in graphs)
    return [name for name in sorted(manifest.files) if not name.startswith(f"{GRAPHS}/") or name.startswith(own)]
