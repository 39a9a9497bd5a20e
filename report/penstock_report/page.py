"""A self-contained HTML page, without scripts. Texts are escaped here; arguments named `html` are markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

STYLES = 24
"""Different looks of series: eight colours, each with several shapes of markers."""
_COLOURS = 8


def document(title: str, html: str) -> str:
    """The whole page around the content of `<main>`."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n{html}</main>\n"
        "</body>\n</html>\n"
    )


@cache
def _style() -> str:
    sheet = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    series = (
        f".line.s{number} {{ stroke: {colour}; }} .mark.s{number} {{ fill: {colour}; }}\n"
        f".mark.out.s{number} {{ fill: var(--card); stroke: {colour}; stroke-width: 1.6; }}\n"
        for number, colour in ((number, f"var(--c{number % _COLOURS})") for number in range(STYLES))
    )
    return sheet + "".join(series)


def header(title: str, html: str) -> str:
    """The first card: the title, and the outcome."""
    return f'<header class="card hero"><h1>{escape(title)}</h1>{html}</header>\n'


def card(title: str, html: str, *, note: str = "") -> str:
    """A section with a title and, below it, a note."""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{below}{html}</section>\n'


def bullets(texts: Iterable[str]) -> str:
    """A list of texts; empty without texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def table(heads: Sequence[str], rows: Iterable[str], *, numbers: bool = False) -> str:
    """A table that scrolls sideways. `rows` are markup (`<tr>`). `numbers`: all columns but the first are numbers."""
    kind = ' class="number"' if numbers else ""
    top = "".join(f"<th{kind if index else ''}>{escape(head)}</th>" for index, head in enumerate(heads))
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
