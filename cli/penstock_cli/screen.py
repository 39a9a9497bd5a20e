"""How facts look in a terminal: one column of names, one of values; the same words without colours when piped."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Iterable

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.text import Text

console = Console(highlighter=NullHighlighter(), soft_wrap=True)
if not console.is_terminal:
    # Into a file or a pipe: nothing is cut to the width of a screen that is not there.
    console.width = 200
PLAIN_SECONDS = 10.0
"""Without a terminal, a line of progress at most this often: logs stay readable, and show that something goes on."""
TRANSFER_SECONDS = 0.5 if console.is_terminal else PLAIN_SECONDS
"""Between two words about a download."""
NAME_WIDTH = 11
INTERRUPTED = 130
"""Status of a command that Ctrl-C has ended, as shells have it."""
NARROWEST_VALUE = 40
"""Columns of a value, however narrow the terminal."""


def fact(name: str, value: str, *, style: str = "") -> None:
    """One fact: the name, padded, then the value; further lines of the value stand under its first."""
    first, *rest = _lines(value)
    # In one piece: a bar that is under way would be drawn over a line that was only begun.
    text = Text.assemble((f"{name:<{NAME_WIDTH - 1}} ", "dim"), (first, style))
    for line in rest:
        text.append(f"\n{'':{NAME_WIDTH}}").append(line, style)
    console.print(text)


def _lines(value: str) -> list[str]:
    """The value's lines; in a terminal, long ones are broken between words."""
    lines = value.splitlines() or [""]
    if not console.is_terminal:
        return lines
    width = max(console.width - NAME_WIDTH, NARROWEST_VALUE)
    return [
        piece
        for line in lines
        for piece in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    ]


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Several facts."""
    for name, value in pairs:
        fact(name, value)


class ScreenLog(logging.Handler):
    """Events of the log between the facts, with the time of day for a name; a bar that is under way stays whole."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one."""
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        try:
            fact(time.strftime("%H:%M:%S", time.localtime(record.created)), self.format(record), style=style)
        except Exception:
            self.handleError(record)


def screen_log() -> tuple[logging.Handler, ...]:
    """What shows the log to a person in front of a terminal; nothing where standard error goes elsewhere."""
    return (ScreenLog(),) if console.is_terminal and sys.stderr.isatty() else ()


def bytes_text(count: int) -> str:
    """A size for people: `22.7 MB`, `24 GiB`-like figures in powers of 1,024."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError  # the loop ends at GiB
