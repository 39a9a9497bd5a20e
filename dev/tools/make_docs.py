"""Generates parts of the documents from the code (`make docs`). A test fails when they are stale.

Each generated part is between `<!-- begin NAME -->` and `<!-- end NAME -->`; the text around it is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from penstock_cli.main import COMMANDS, cli
from penstock_optimizer.pod.variables import JobVariables
from tools import autoscaler_tables as autoscaler_manual
from tools import field_tables
from tools import operator_tables as operator_manual
from tools import runtime_tables as manual

ROOT = Path(__file__).parents[2]


def command_help() -> str:
    """The help page of every command."""
    pages = []
    for name in ["", *COMMANDS]:
        widths: dict[str, Any] = {"max_content_width": 100, "terminal_width": 100}
        context = click.Context(cli, info_name="penstock", **{**cli.context_settings, **widths})
        command: click.Command = cli
        if name:
            found = cli.get_command(context, name)
            assert found is not None, name  # noqa: S101 - COMMANDS and the modules belong together
            command = found
            context = click.Context(command, info_name=name, parent=context, **{**command.context_settings, **widths})
        title = f"penstock {name}".strip()
        pages.append(f"## {title}\n\n```\n{command.get_help(context)}\n```")
    return "\n\n".join(pages)


def adapter_rule() -> str:
    """The values for prometheus-adapter, without the comment at their head."""
    text = (ROOT / "examples" / "prometheus-adapter.yaml").read_text(encoding="utf-8")
    return f"```yaml\n{text[text.index('prometheus:') :].strip()}\n```"


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    **field_tables.PARTS,
    "commands": ("docs/cli.md", command_help),
    **manual.PARTS,
    "job-variables": ("docs/settings.md", partial(manual.variables_table, JobVariables)),
    **operator_manual.PARTS,
    **autoscaler_manual.PARTS,
    "adapter-rule": ("docs/autoscaling.md", adapter_rule),
}
"""Name of the part -> document and the function that makes it."""


def refreshed(text: str, name: str, content: str) -> str:
    """The document with the part replaced; ValueError when it has no such part."""
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no part {name}")
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


def stale() -> list[str]:
    """Documents whose generated parts differ from the code."""
    return [name for name, old, new in _documents() if old != new]


def _documents() -> Iterator[tuple[str, str, str]]:
    for name, (document, make) in PARTS.items():
        old = (ROOT / document).read_text(encoding="utf-8")
        yield document, old, refreshed(old, name, make())


def main() -> None:
    """Write all parts."""
    for name, old, new in _documents():
        if old != new:
            (ROOT / name).write_text(new, encoding="utf-8")
            sys.stdout.write(f"wrote {name}\n")


if __name__ == "__main__":
    main()
