"""Where things are kept: options that several commands have in common."""

from __future__ import annotations

from pathlib import Path

import click

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
