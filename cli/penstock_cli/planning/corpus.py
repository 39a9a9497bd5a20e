"""`penstock plan --rows`: the hardware for a corpus that is processed once."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import click

from penstock.errors import SettingError, printable
from penstock.prices import currency_sign
from penstock_cli.terminal import console, fact
from penstock_planner.compare import Offer
from penstock_planner.corpus import CORPUS_HEADS, HTTP_NOTE, corpus_cells, corpus_headline, corpus_json, corpus_rows


def print_corpus(offers: Sequence[Offer], rows: int, notes: Sequence[str], *, currency: str, output: str) -> None:
    """Node-hours and cost of each offer, as a table, JSON or CSV. SettingError for HTML."""
    if output == "html":
        raise SettingError("--rows has no page", field="--output", remedy="Give --output table, json or csv")
    found, notes = corpus_rows(offers, rows), (*notes, HTTP_NOTE)
    if output == "json":
        click.echo(corpus_json(found, rows, notes, currency), nl=False)
        return
    table = [CORPUS_HEADS, *(corpus_cells(one, currency_sign(currency)) for one in found)]
    if output == "csv":
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(table)
        click.echo(buffer.getvalue(), nl=False)
        return
    fact("plan", corpus_headline(found, rows, currency))
    widths = [max(len(line[column]) for line in table) for column in range(len(CORPUS_HEADS))]
    for number, line in enumerate(table):
        text = "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        console.print(printable(text), style="dim" if number == 0 or found[number - 1].offer.not_chosen else "")
    for text in notes:
        fact("note", text)
