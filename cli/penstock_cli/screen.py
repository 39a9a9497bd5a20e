"""Terminal output: lines of a name and a value, the log between them, and sizes for people. Plain text when piped."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Iterable

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.text import Text

from penstock.errors import printable

console = Console(highlighter=NullHighlighter(), soft_wrap=True, markup=False)
if not console.is_terminal:
    # A file or a pipe has no width to cut lines to.
    console.width = 200
PLAIN_SECONDS = 10.0
"""Without a terminal, seconds between two lines of progress: logs stay short and still show that work goes on."""
TRANSFER_SECONDS = 0.5 if console.is_terminal else PLAIN_SECONDS
"""Seconds between two updates about a download."""
NAME_WIDTH = 11
NARROWEST_VALUE = 40
"""Least columns of a value, also in a narrower terminal."""


def fact(name: str, value: str, *, style: str = "") -> None:
    """Print a name, padded, and its value; further lines of the value are indented to its first one."""
    first, *rest = _lines(value)
    # Printed at once: a running progress bar would overwrite a partial line.
    text = Text.assemble((f"{name:<{NAME_WIDTH - 1}} ", "dim"), (first, style))
    for line in rest:
        text.append(f"\n{'':{NAME_WIDTH}}").append(line, style)
    console.print(text)


def _lines(value: str) -> list[str]:
    """The value's lines; in a terminal, long ones are broken between words."""
    lines = [printable(line) for line in value.splitlines()] or [""]
    if not console.is_terminal:
        return lines
    width = max(console.width - NAME_WIDTH, NARROWEST_VALUE)
    return [
        piece
        for line in lines
        for piece in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    ]


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Print several names and values."""
    for name, value in pairs:
        fact(name, value)


class ScreenLog(logging.Handler):
    """A log handler that prints records as facts named by the time of day, above a running progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        try:
            fact(time.strftime("%H:%M:%S", time.localtime(record.created)), self.format(record), style=style)
        except Exception:
            self.handleError(record)


def screen_log() -> tuple[logging.Handler, ...]:
    """The handler that shows the log in a terminal; empty where standard error goes elsewhere."""
    return (ScreenLog(),) if console.is_terminal and sys.stderr.isatty() else ()


def bytes_text(count: int) -> str:
    """A size for people: `22.7 MB`, `24 GiB`-like figures in powers of 1,024."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError  # the loop returns at GiB
