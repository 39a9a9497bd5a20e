"""Where things are kept: options that several commands have in common."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.errors import ArtefactError
from penstock.manifest import MANIFEST_NAME, Manifest

DEFAULT_STORE = Path("artefacts")
DEFAULT_MODELS = Path("~/.cache/penstock/models")


def store_option(function: click.decorators.FC) -> click.decorators.FC:
    """Where artefacts are kept; the same for every command."""
    return click.option(
        "--store",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_STORE,
        envvar="PENSTOCK_STORE",
        show_default=True,
        show_envvar=True,
        help="Folder of artefacts: finished ones are found there by what decides them, interrupted ones go on.",
    )(function)


def models_option(function: click.decorators.FC) -> click.decorators.FC:
    """Where models from the network are kept; the same for every command."""
    return click.option(
        "--models",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_MODELS,
        envvar="PENSTOCK_MODELS",
        show_default=True,
        show_envvar=True,
        help="Folder in which models from the network are kept.",
    )(function)


def read_artefact(folder: Path, *, otherwise: str) -> Manifest:
    """The manifest of the artefact that the command line gave; ArtefactError as `Manifest.load`.

    A folder that is none is mostly the store: then the error names the newest artefact in it (the optimised ones before
    those that are served meanwhile), or else says what to do `otherwise`.
    """
    if (folder / MANIFEST_NAME).exists():
        return Manifest.load(folder)
    within = sorted(
        folder.glob(f"*/{MANIFEST_NAME}"), key=lambda one: ("." not in one.parent.name, one.stat().st_mtime)
    )
    raise ArtefactError(
        f"{folder} has no {MANIFEST_NAME}: it is no artefact",
        remedy=f"Give one of those in it, such as {within[-1].parent}" if within else otherwise,
    )
