"""How facts look in a terminal: one column of names, one of values; the same words without colours when piped."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.highlighter import NullHighlighter

console = Console(highlighter=NullHighlighter(), soft_wrap=True)
if not console.is_terminal:
    # Into a file or a pipe: nothing is cut to the width of a screen that is not there.
    console.width = 200
NAME_WIDTH = 11


def fact(name: str, value: str, *, style: str = "") -> None:
    """One fact: the name, padded, then the value; further lines of the value stand under its first."""
    first, *rest = value.splitlines() or [""]
    console.print(f"[dim]{name:<{NAME_WIDTH}}[/dim]", end="")
    console.print(first, style=style or None, markup=False)
    for line in rest:
        console.print(" " * NAME_WIDTH + line, style=style or None, markup=False)


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Several facts."""
    for name, value in pairs:
        fact(name, value)


def bytes_text(count: int) -> str:
    """A size for people: `22.7 MB`, `24 GiB`-like figures in powers of 1,024."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError  # the loop ends at GiB
