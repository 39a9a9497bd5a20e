"""`penstock`: the group of commands, and how errors reach a person.

A PenstockError is printed as `error: what and where. What to do next` with exit status 1; a wrong flag is click's
business (status 2); anything else is a defect and shows its traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from penstock import __version__
from penstock.errors import PenstockError
from penstock.process import exit_on_signal, print_error
from penstock_cli.huge_pages import start_again_with_huge_pages
from penstock_cli.output import checked_output
from penstock_cli.packages import missing_package

COMMANDS = {
    "serve": "Serve a model: fp32 at once, the optimised plan when it is found.",
    "optimize": "Make the artefact only: model, evidence, report.",
    "bench": "Measure an endpoint: cores x lengths x batches.",
    "simulate": "Replay load against autoscalers: ours, HPA, KEDA, Knative's.",
    "host": "Show what this machine is: processor, cores, pinning.",
}
"""Command -> what it does. Each is `command` of the module of its name, imported on use: `penstock --help`, which click
would make from the commands' own words, loads no engine."""
HEAVY = frozenset({"serve", "optimize", "bench"})
"""Those that run models."""


class LazyGroup(click.Group):
    """Loads a command's module when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All commands, in the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"penstock_cli.{cmd_name}").command
        assert isinstance(command, click.Command)  # noqa: S101 - a defect of ours, seen by the first test
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors that a user can put right become one sentence."""
        try:
            return super().invoke(ctx)
        except click.BadParameter as error:
            error.param_hint = _variable(error) or error.param_hint
            raise
        except PenstockError as error:
            print_error(error)
            ctx.exit(1)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if not package or package.startswith("penstock"):
                raise
            print_error(missing_package(package, ctx.invoked_subcommand))
            ctx.exit(1)


def _variable(error: click.BadParameter) -> str:
    """The environment variable that brought a wrong value; empty when it came from the command line."""
    context, parameter = error.ctx, error.param
    if context is None or parameter is None or parameter.name is None:
        return ""
    if context.get_parameter_source(parameter.name) is not ParameterSource.ENVIRONMENT:
        return ""
    # As click itself looks it up: the one that the option names, or else made of the command and the flag.
    return str(parameter.envvar or f"{context.auto_envvar_prefix}_{parameter.name.upper()}")


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "auto_envvar_prefix": "PENSTOCK",
    },
)
@click.version_option(__version__, prog_name="penstock")
def cli() -> None:
    """Optimised model endpoints: optimise a model for this machine, prove its answers, serve it.

    Each flag can be given as an environment variable too: the one that its help names, or else PENSTOCK_, the
    command and the flag, such as PENSTOCK_OPTIMIZE_CORES.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `penstock` script."""
    if os.getpid() == 1:
        exit_on_signal(signal.SIGTERM)
    if arguments is None and HEAVY.intersection(sys.argv[1:2]):
        start_again_with_huge_pages()
    try:
        with checked_output():
            cli(args=arguments)
    except PenstockError as error:  # of the output, when there was no command yet or no longer
        print_error(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
