"""`penstock ledger`: lists and removes the predictions of plans that `penstock plan --verify` has measured."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.errors import SettingError, printable
from penstock_cli.terminal import fact
from penstock_planner.ledger import DEFAULT_LEDGER, LedgerEntry, read_ledger, remove_entries


@click.command
@click.option(
    "--ledger",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DEFAULT_LEDGER,
    show_default=True,
    help="File with the predictions that were measured.",
)
@click.option("--remove", metavar="KEY", multiple=True, help="Remove the entry with this key; may be repeated.")
def command(ledger: Path, remove: tuple[str, ...]) -> None:
    """List the predictions of plans that were measured, or remove some.

    Their errors widen the intervals of later plans of the same class, model and origin: remove one that was measured on
    the wrong server, or next to other work.
    """
    path = ledger.expanduser()
    entries = read_ledger(path)
    unknown = sorted(set(remove) - {entry.key for entry in entries})
    if unknown:
        raise SettingError(
            f"{path} has no entry {', '.join(unknown)}", field="--remove", remedy="List the keys: penstock ledger"
        )
    if remove:
        click.echo(f"removed {remove_entries(path, remove)}; {path}")
        return
    for entry in entries:
        fact(entry.key, printable(_described(entry)))
    if not entries:
        click.echo(f"no predictions in {path}")


def _described(entry: LedgerEntry) -> str:
    noise = "" if entry.noise is None else f", others had {entry.noise:.0%} of the CPUs"
    return (
        f"{entry.at[:10]} {entry.hardware_class}, {entry.cores} x {entry.model}\n"
        f"{entry.requests_per_second:.3g} requests/s: p95 {entry.predicted_p95_milliseconds:.3g} ms predicted "
        f"({entry.origin}), {entry.measured_p95_milliseconds:.3g} ms measured{noise}"
    )
