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

from penstock.logs import LogEvent
from penstock_cli.main import COMMANDS, cli
from penstock_gateway import log_events as gateway_log
from penstock_operator import log_events as operator_log
from penstock_optimizer.pod.pod_job import JobVariables
from penstock_runtime import log_events as runtime_log
from tools import autoscaler_tables as autoscaler_manual
from tools import chart_tables, field_tables, plan_tables
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
        parts = [command.get_help(context)]
        if isinstance(command, click.Group) and name:
            for part, one in command.commands.items():
                parts.append(one.get_help(click.Context(one, info_name=part, parent=context, **widths)))
        pages += [f"## {title}\n", *(f"```\n{part}\n```\n" for part in parts)]
    return "\n".join(pages).rstrip("\n")


def adapter_rule() -> str:
    """The values for prometheus-adapter, without the comment at their head."""
    text = (ROOT / "examples" / "prometheus-adapter.yaml").read_text(encoding="utf-8")
    return f"```yaml\n{text[text.index('prometheus:') :].strip()}\n```"


def log_events() -> str:
    """A row for every log event of every process, by name."""
    gateway = [LogEvent(name, *event) for name, event in gateway_log.LOG_EVENTS.items()]  # type: ignore[arg-type]
    processes = (
        ("operator", operator_log.LOG_EVENTS),
        ("serving pod, `penstock serve`", runtime_log.SERVER_EVENTS),
        ("serving pod", runtime_log.POD_EVENTS),
        ("optimisation job, `penstock optimize`, `penstock serve`", runtime_log.JOB_EVENTS),
        ("gateway", gateway),
    )
    rows = [
        f"| `{event.name}` | {event.level} | {process} | {event.meaning} | {event.action} |"
        for process, events in processes
        for event in events
    ]
    return "\n".join(["| event | level | process | meaning | what to do |", "|---|---|---|---|---|", *sorted(rows)])


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    **field_tables.PARTS,
    "commands": ("docs/reference/cli.md", command_help),
    **manual.PARTS,
    "job-variables": ("docs/reference/settings.md", partial(manual.variables_table, JobVariables)),
    **operator_manual.PARTS,
    **autoscaler_manual.PARTS,
    **chart_tables.PARTS,
    **plan_tables.PARTS,
    "log-events": ("docs/reference/log-events.md", log_events),
    "adapter-rule": ("docs/how-to/scale-with-hpa-or-keda.md", adapter_rule),
}
"""Name of the part -> document and the function that makes it."""


def refreshed(text: str, name: str, content: str) -> str:
    """The document with the part replaced; ValueError when it has no such part."""
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no part {name}")
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


def stale() -> list[str]:
    """Documents with generated parts that differ from the code."""
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
