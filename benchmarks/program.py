"""A benchmark as a command: errors that a user can put right are one sentence, as in `penstock` itself."""

from __future__ import annotations

from typing import Any

import click

from penstock.errors import PenstockError


class Program(click.Command):
    """Use as `@click.command(cls=Program)`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            raise click.ClickException(str(error)) from error
