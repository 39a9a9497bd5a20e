"""How an error that a user can put right is shown on a terminal."""

from __future__ import annotations

import os

import click

from penstock.errors import PenstockError


def print_error(error: PenstockError) -> None:
    """`error: what and where. What to do next` on standard error; coloured where that is a terminal that shows it."""
    # click asks only whether it is a terminal.
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True, color=False if plain else None)
