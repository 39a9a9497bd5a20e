"""`penstock generate`: prompts to files with texts."""

from __future__ import annotations

from typing import Any

import click

from penstock_cli.bulk.work import text_option, work, work_options


@click.command
@work_options
@text_option("text, content, document, chunk or prompt")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each continuation.")
def command(text_column: str, max_tokens: int, **options: Any) -> None:
    """Continue the prompts of IN into files in the folder OUT, with the most probable tokens.

    Input, output and exit status are as of `penstock embed`.
    """
    work("generate", [text_column] if text_column else [], {"max_new_tokens": max_tokens}, options)
