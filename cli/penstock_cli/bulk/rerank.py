"""`penstock rerank`: queries with documents to files with rankings."""

from __future__ import annotations

from typing import Any

import click

from penstock_cli.bulk.work import too_long_option, work, work_options


@click.command
@work_options
@click.option("--query-column", default="query", show_default=True, help="Column of queries.")
@click.option(
    "--documents-column", default="documents", show_default=True, help="Column with a list of texts, or one text."
)
@click.option("--top", type=click.IntRange(min=1), help="Documents of a ranking, the best first. Default: all.")
@too_long_option
def command(query_column: str, documents_column: str, **options: Any) -> None:
    """Rank the documents of each row of IN by its query: a list of positions with scores for each row.

    Input, output and exit status are as of `penstock embed`.
    """
    work("rerank", [query_column, documents_column], {}, options)
