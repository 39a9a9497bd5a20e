"""What the commands share: printed lines of a name and a value, plain text when piped, and click options: number types,
folders, and the flags made from the runtime's settings."""

from __future__ import annotations

import logging
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.text import Text

from penstock.artefact_store import DEFAULT_MODELS, DEFAULT_STORE
from penstock.errors import ArtefactError, printable
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock.resources.core import ModelSource, Scheme
from penstock.settings import Setting
from penstock_runtime.host import Host
from penstock_runtime.settings import SETTINGS, Settings

if TYPE_CHECKING:
    from penstock_runtime.models.sources.transfer import FetchProgress, OnProgress

console = Console(highlighter=NullHighlighter(), soft_wrap=True, markup=False)
if not console.is_terminal:
    # A file or a pipe has no width to cut lines to.
    console.width = 200
PLAIN_SECONDS = 10.0
"""Without a terminal, seconds between two lines of progress: logs stay short and still show that work goes on."""
FIRST_SECONDS = 2.0
"""What takes no longer shows no progress."""
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


def paced(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say` for lines of progress: the first after `FIRST_SECONDS`, then one in `PLAIN_SECONDS`; others are dropped."""
    due = time.monotonic() + FIRST_SECONDS

    def say_if_due(text: str) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + PLAIN_SECONDS
            say(text)

    return say_if_due


def transfer_lines(verb: str) -> OnProgress:
    """Prints the progress of a transfer that takes longer than `FIRST_SECONDS`, and each of its notes."""
    say = paced(partial(fact, verb))

    def show(step: FetchProgress) -> None:
        if step.note:
            fact("note", step.note)
        elif step.file:
            say(f"{step.file}: {bytes_text(step.bytes_done)} of {bytes_text(step.bytes_total)}")

    return show


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


def describe_cpu(host: Host) -> str:
    """The processor in one line: name, instruction set class, and whether it has int8 products."""
    int8 = "native int8 products" if host.cpu.isa.has_int8_dot else "no native int8 products"
    return f"{host.cpu.model_name} (family {host.cpu.family} model {host.cpu.model}, {host.cpu.isa.value}: {int8})"


def describe_memory(host: Host) -> str:
    """The machine's memory, and the container's limit where that is lower."""
    limit = host.memory.limit
    return bytes_text(host.memory.total) + (f", limit {bytes_text(limit)}" if limit is not None else "")


class FiniteRange(click.FloatRange):
    """A number between bounds. Rejects `inf`, and `nan`, which click accepts because no bound excludes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Names(click.ParamType[tuple[str, ...]]):
    """Names separated by commas."""

    name = "names"

    def __init__(self, what: str, example: str) -> None:
        """`what`: the kind of a name, in the singular."""
        self._what = what
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names as a tuple."""
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",") if part.strip()))
        if not names:
            self.fail(f"{value!r} names no {self._what}: write it like {self._example}", param, ctx)
        return names


class PositiveIntegers(click.ParamType[tuple[int, ...]]):
    """`1,2,4`: whole numbers from 1, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers as a tuple."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers: write it like 1,2,4", param, ctx)
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r} holds a number under 1", param, ctx)
        return numbers


def refuse_options(names: Iterable[str], reads: str) -> None:
    """UsageError for an option of the command line that does nothing in this use of the command. `reads`: what it works
    with. Variables of the environment may be set for several commands, and are not refused."""
    context = click.get_current_context()
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flags[name]} does nothing here: it works with {reads}. Leave it out.")


store_option = click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_STORE,
    envvar="PENSTOCK_STORE",
    show_default=True,
    show_envvar=True,
    help="Folder of artefacts. A finished artefact for the same endpoint and machine is reused; an interrupted "
    "optimisation is resumed.",
)
models_option = click.option(
    "--models",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_MODELS,
    envvar="PENSTOCK_MODELS",
    show_default=True,
    show_envvar=True,
    help="Folder in which models from the network are kept.",
)
verbose_option = click.option(
    "--verbose", is_flag=True, help="Show the precision and options of each recipe, which its short name leaves out."
)


def setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a flag for every setting of the runtime; `settings_from` collects their values."""
    for setting in reversed(SETTINGS):
        function = click.option(
            setting.flag,
            setting.name,
            default=None,
            metavar=(setting.unit or "value").upper(),
            help=_setting_help(setting),
            allow_from_autoenv=False,
        )(function)
    return function


def settings_from(environment: dict[str, str], flags: dict[str, Any]) -> Settings:
    """The runtime's settings: flags over environment variables over defaults. SettingError names the wrong one."""
    return Settings.load(environment, {setting.name: flags.pop(setting.name, None) for setting in SETTINGS})


def _setting_help(setting: Setting) -> str:
    default = "" if setting.default in (None, ()) else f"; default {setting.default}"
    return f"{setting.description}  [{setting.variable}{default}]"


def read_artefact(folder: Path, *, otherwise: str) -> Manifest:
    """The manifest of the artefact folder given on the command line; ArtefactError as `Manifest.load`.

    Users often give the store instead. Then the error names the newest artefact in it, with optimised ones before fp32
    ones; in an empty folder the remedy is `otherwise`.
    """
    if (folder / MANIFEST_NAME).exists():
        return Manifest.load(folder)
    within = sorted(
        folder.glob(f"*/{MANIFEST_NAME}"), key=lambda one: ("." not in one.parent.name, one.stat().st_mtime)
    )
    raise ArtefactError(
        f"{folder} has no {MANIFEST_NAME}: it is no artefact",
        remedy=f"Give one of those in it, such as {within[-1].parent}" if within else otherwise,
    )


def is_remote(address: str) -> bool:
    """Whether an artefact is in a registry."""
    return address.startswith(f"{Scheme.OCI.value}://")


def artefact_of(address: str, models: Path) -> tuple[Path, str]:
    """The file, or the folder of an artefact, which is fetched if it is in a registry; and the name of an artefact."""
    if not is_remote(address):
        return Path(address), Path(address).resolve().name
    from penstock_runtime.models.sources.fetch import fetch_artefact  # with libraries that a folder does not need

    source = ModelSource.parse(address)
    return fetch_artefact(source, models, transfer_lines("fetching")), source.location.rpartition("/")[2]
