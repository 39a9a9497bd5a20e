"""A plan in the terminal: the outcome, the best row of each class, and what limits the figures."""

from __future__ import annotations

import textwrap

from penstock.errors import printable
from penstock.prices import currency_sign
from penstock_cli.terminal import console, fact
from penstock_planner.compare import HardwareComparison, OfferRow, counted
from penstock_planner.page import caveats, cells, headline, judged, likely_text, traced_texts, unjudged

MOST_COLUMNS = 100
"""A wider terminal is not used: lines of that length can be read."""


def print_table(comparison: HardwareComparison) -> None:
    """The outcome, and of each class the best row: two lines, so that a table fits into 100 columns."""
    fact("plan", headline(comparison))
    if likely := likely_text(comparison):
        fact("likely", likely)
    shown = _shown(comparison)
    money = currency_sign(comparison.currency).strip()
    reserved, million = f"{money}/month reserved", f"{money}/M"
    heads = ("class", "cores", "p95 ms", "replicas", "node", reserved, "used", million, "figures")
    table = [heads, *map(_brief, shown)]
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in table]
    width = min(console.width, MOST_COLUMNS)
    console.print(lines[0].rstrip(), style="dim")
    for row, line in zip(shown, lines[1:], strict=True):
        style = "bold" if row is comparison.best else "" if row.is_feasible or row.is_likely else "dim"
        console.print(printable(line.rstrip()), style=style)
        plan = row.evidence.plan if row.evidence is not None else ""
        for text in textwrap.wrap(printable(f"{plan}: {row.why}"), width - 4, break_on_hyphens=False):
            console.print(f"    {text}", style="dim")
    for text in traced_texts(comparison):
        fact("trace", text)
    left_out = len(judged(comparison)) - len(shown)
    if left_out:
        fact("more", f"{counted(left_out, 'row')} with other numbers of cores: --output csv, json or html")
    for text in unjudged(comparison):
        fact("unknown", text)
    for text in caveats(comparison):
        fact("limit", text)
    for text in comparison.notes:
        fact("note", text)


def _shown(comparison: HardwareComparison) -> list[OfferRow]:
    """Of each class the first row, and the first one of other software."""
    first = {(row.offer.hardware_class, row.offer.not_chosen): row for row in reversed(judged(comparison))}
    return [row for row in judged(comparison) if any(row is one for one in first.values())]


def _brief(row: OfferRow) -> tuple[str, ...]:
    name, cores, _, p95, replicas, node, reserved, used, million, *_ = cells(row)
    origin = row.evidence.origin.value.replace("measured by the project", "the project's") if row.evidence else ""
    return name, cores, p95, replicas, node, reserved, used, million, origin
