"""A benchmark as a command: errors that a user can put right are one sentence, and a busy machine proves nothing."""

from __future__ import annotations

from typing import Any

import click

from penstock.errors import PenstockError
from penstock.process import sigterm_interrupts
from penstock_bench.judge import QUIET_ENOUGH


def verdict(foreign_share: float, *, reached: bool) -> str:
    """`pass` or `FAIL`; or why it is not judged: other processes took too much of the server's CPUs."""
    if foreign_share > QUIET_ENOUGH:
        return f"not judged, others took {foreign_share:.0%} of the server's CPUs"
    return "pass" if reached else "FAIL"


class Program(click.Command):
    """Use as `@click.command(cls=Program)`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. SIGTERM ends its servers, too."""
        try:
            with sigterm_interrupts():
                return super().invoke(ctx)
        except PenstockError as error:
            raise click.ClickException(str(error)) from error
