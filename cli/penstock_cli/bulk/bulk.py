"""`penstock bulk`: the state of an output, a check of its bits, another attempt at its dead letters."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import click

from penstock_cli.bulk.work import WorkView, duration, interruptible, require_model, show_totals, totals_rows
from penstock_cli.terminal import fact, facts, paced

SHOWN = 10
"""Differences that are printed."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


@click.group
def command() -> None:
    """Show, verify and complete the output of `penstock embed`, `classify`, `rerank` and `generate`."""


@command.command(short_help="Show how far an output is.")
@click.argument("output", metavar="OUT")
@json_option
def status(output: str, *, as_json: bool) -> None:
    """Show parts, rows and dead letters of the folder OUT, from its files alone."""
    from penstock_bulk.corpus import totals
    from penstock_bulk.storage import open_folder

    folder = open_folder(output)
    found = totals(folder)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    lines = totals_rows(found, folder.uri)
    if found.last_written and not found.complete:
        lines.append(("last part", f"{duration(time.time() - found.last_written)} ago"))
    facts(lines)


@command.command(short_help="Compute rows again, and compare bits.")
@click.argument("output", metavar="OUT")
@click.option("--sample", type=click.IntRange(min=1), default=200, show_default=True, help="Rows to compute again.")
@json_option
def verify(output: str, sample: int, *, as_json: bool) -> None:
    """Compare the digests of all files of OUT, and compute rows of some of them again from the input.

    The exit status is 1 if a file has changed or a row has other bits.
    """
    from penstock_bulk.corpus import BulkWork
    from penstock_bulk.plans import require_plan
    from penstock_bulk.storage import open_folder

    folder = open_folder(output)
    plan = require_plan(folder)
    say = _saying("verify", quiet=as_json)
    with interruptible(quiet=as_json), require_model(plan, say) as model:
        found = BulkWork(plan, folder, model).verify(sample, lambda done, of: say(f"{done:,}/{of:,} rows"))
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
    else:
        what = "has other bits" if found.different else "equal bits"
        facts(
            [
                (
                    "parts",
                    f"{found.parts:,} with the bytes that were written" if not found.different else f"{found.parts:,}",
                )
            ]
        )
        fact("rows", f"{found.rows:,} were computed again: {what}")
        for one in found.different[:SHOWN]:
            fact("differs", one)
        if found.different[SHOWN:]:
            fact("differs", f"and {len(found.different) - SHOWN:,} more")
    if found.different:
        sys.exit(1)


@command.command(short_help="Compute dead letters again.")
@click.argument("output", metavar="OUT")
@json_option
def retry(output: str, *, as_json: bool) -> None:
    """Compute the rows without a result again, from the input as it is now, and add files with those that have one.

    Rows of the input may have been corrected where they are; none may have been added or taken out.
    """
    from penstock_bulk.corpus import BulkWork
    from penstock_bulk.plans import require_plan
    from penstock_bulk.storage import open_folder

    folder = open_folder(output)
    plan = require_plan(folder)
    say = _saying("model", quiet=as_json)
    with interruptible(quiet=as_json), require_model(plan, say) as model, WorkView(quiet=as_json) as view:
        recovered, totals = BulkWork(plan, folder, model).retry(view)
    if not as_json:
        fact("retried", f"{recovered:,} rows have a result now")
    show_totals(totals, folder.uri, as_json=as_json)


def _saying(name: str, *, quiet: bool) -> Callable[[str], None]:
    return paced((lambda _: None) if quiet else partial(fact, name))
