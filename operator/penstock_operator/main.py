"""The command `penstock-operator`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import click

import penstock
from penstock.errors import PenstockError
from penstock.process import exit_on_signal, print_error
from penstock.settings import Setting
from penstock_operator.settings import SETTINGS, Settings


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(SETTINGS):
        function = click.option(
            setting.flag, setting.name, default=None, metavar=(setting.unit or "value").upper(), help=_help(setting)
        )(function)
    return function


def _help(setting: Setting) -> str:
    default = "" if setting.default in {None, (), ""} else f"; default {setting.default}"
    return f"{setting.description}  [{setting.variable}{default}]"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(penstock.__version__, prog_name="penstock-operator")
@_options
def command(**flags: Any) -> None:
    """Reconcile ModelEndpoints: optimise their models, deploy and scale their pods.

    Runs in a pod of the cluster, or anywhere with a kubeconfig. Several replicas may run: one leads, the others stand
    by.
    """
    try:
        settings = Settings.load(os.environ, flags)
        sys.exit(_run(settings))
    except PenstockError as error:
        print_error(error)
        sys.exit(1)


def _run(settings: Settings) -> int:
    # Imported late: Kopf and the client take a second to import, which --help does not need.
    from penstock_operator import logs, process

    logs.configure(settings.log.log_level, settings.log.log_format)
    return asyncio.run(process.run(settings))


def main() -> None:
    """Entry point."""
    exit_on_signal()
    command()


if __name__ == "__main__":
    main()
