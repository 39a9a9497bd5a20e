"""`penstock embed`: a corpus to files with vectors."""

from __future__ import annotations

from typing import Any

import click

from penstock_cli.bulk.work import text_option, too_long_option, work, work_options


@click.command
@work_options
@text_option("text, content, document, chunk or prompt")
@click.option(
    "--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True, help="Of the vectors."
)
@click.option("--prompt-name", help="Prompt to put before each text, by its name in the model's files.")
@click.option("--dimensions", type=click.IntRange(min=1), help="The first of each vector. Default: all.")
@click.option(
    "--normalize/--no-normalize", default=None, help="Vectors of length 1. Default: as the model's files state."
)
@too_long_option
def command(
    text_column: str, prompt_name: str | None, dimensions: int | None, *, normalize: bool | None, **options: Any
) -> None:
    """Embed the texts of IN, a file or a folder, into files in the folder OUT.

    IN has Parquet, Arrow, JSON lines, CSV, or texts (.md and .txt, of which each paragraph is a row). IN and OUT may be
    s3://, gs:// and az://. The same command goes on where a killed one stopped. Rows without a result become dead
    letters; the exit status is then 3.
    """
    parameters = {"prompt_name": prompt_name, "dimensions": dimensions, "normalize": normalize}
    work("embed", [text_column] if text_column else [], parameters, options)
