"""Click options that several commands share: number types, folders, and the flags made from the runtime's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from penstock.artefact_store import DEFAULT_MODELS, DEFAULT_STORE
from penstock.errors import ArtefactError
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock.settings import Setting
from penstock_runtime.settings import SETTINGS, Settings


class FiniteRange(click.FloatRange):
    """A number between bounds. Rejects `inf`, and `nan`, which click accepts because no bound excludes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class PositiveIntegers(click.ParamType[tuple[int, ...]]):
    """`1,2,4`: whole numbers from 1, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers as a tuple."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers: write it like 1,2,4", param, ctx)
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r} holds a number under 1", param, ctx)
        return numbers


def refuse_options(names: Iterable[str], reads: str) -> None:
    """UsageError for an option of the command line that does nothing in this use of the command. `reads`: what it works
    with. Variables of the environment may be set for several commands, and are not refused."""
    context = click.get_current_context()
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flags[name]} does nothing here: it works with {reads}. Leave it out.")


store_option = click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_STORE,
    envvar="PENSTOCK_STORE",
    show_default=True,
    show_envvar=True,
    help="Folder of artefacts. A finished artefact for the same endpoint and machine is reused; an interrupted "
    "optimisation is resumed.",
)
models_option = click.option(
    "--models",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_MODELS,
    envvar="PENSTOCK_MODELS",
    show_default=True,
    show_envvar=True,
    help="Folder in which models from the network are kept.",
)
verbose_option = click.option(
    "--verbose", is_flag=True, help="Show the precision and options of each recipe, which its short name leaves out."
)


def setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a flag for every setting of the runtime; `settings_from` collects their values."""
    for setting in reversed(SETTINGS):
        function = click.option(
            setting.flag,
            setting.name,
            default=None,
            metavar=(setting.unit or "value").upper(),
            help=_setting_help(setting),
            allow_from_autoenv=False,
        )(function)
    return function


def settings_from(environment: dict[str, str], flags: dict[str, Any]) -> Settings:
    """The runtime's settings: flags over environment variables over defaults. SettingError names the wrong one."""
    return Settings.load(environment, {setting.name: flags.pop(setting.name, None) for setting in SETTINGS})


def _setting_help(setting: Setting) -> str:
    default = "" if setting.default in (None, ()) else f"; default {setting.default}"
    return f"{setting.description}  [{setting.variable}{default}]"


def read_artefact(folder: Path, *, otherwise: str) -> Manifest:
    """The manifest of the artefact folder given on the command line; ArtefactError as `Manifest.load`.

    Users often give the store instead. Then the error names the newest artefact in it, with optimised ones before fp32
    ones; in an empty folder the remedy is `otherwise`.
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
