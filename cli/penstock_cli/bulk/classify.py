"""`penstock classify`: a corpus to files with labels."""

from __future__ import annotations

from typing import Any

import click

from penstock_cli.bulk.work import text_option, too_long_option, work, work_options


@click.command
@work_options
@text_option("text, content, document, chunk or prompt")
@click.option("--top", "top_k", type=click.IntRange(min=1), help="Labels of a text, the best first. Default: all.")
@too_long_option
def command(text_column: str, top_k: int | None, **options: Any) -> None:
    """Classify the texts of IN into files in the folder OUT: a list of labels with scores for each row.

    Input, output and exit status are as of `penstock embed`.
    """
    work("classify", [text_column] if text_column else [], {"top_k": top_k}, options)
