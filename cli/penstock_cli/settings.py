"""Click options made from the runtime's settings: one source for flags, environment variables and help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from penstock.settings import Setting
from penstock_runtime.settings import SETTINGS, Settings


def setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a flag for every setting; `settings_from` collects them again."""
    for setting in reversed(SETTINGS):
        function = click.option(
            setting.flag,
            setting.name,
            default=None,
            metavar=_metavar(setting),
            help=_help(setting),
            allow_from_autoenv=False,
        )(function)
    return function


def settings_from(environment: dict[str, str], flags: dict[str, Any]) -> Settings:
    """The settings of this process: flags over environment over defaults. SettingError names what is wrong."""
    return Settings.load(environment, {setting.name: flags.pop(setting.name, None) for setting in SETTINGS})


def _metavar(setting: Setting) -> str:
    return (setting.unit or "value").upper()


def _help(setting: Setting) -> str:
    default = "" if setting.default in (None, ()) else f"; default {setting.default}"
    return f"{setting.description}  [{setting.variable}{default}]"
