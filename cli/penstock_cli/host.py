"""`penstock host`: shows the processor, the cores that Penstock would use, and the memory of this machine."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from penstock_cli.terminal import describe_cpu, describe_memory, facts
from penstock_runtime.host import read_host


@click.command
@click.option("--cores", type=click.IntRange(min=1), help="Physical cores to ask for. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(cores: int | None, *, as_json: bool) -> None:
    """Show this machine: processor, cores that would be used, and whether they can be pinned.

    A plan is measured for one instruction set class and refused on another; `penstock host` shows this machine's.
    """
    host = read_host()
    grant = host.usable_cores(cores)
    if as_json:
        click.echo(json.dumps({"cpu": host.cpu.model_dump(mode="json"), "grant": asdict(grant)}, indent=2))
        return
    facts(
        [
            ("cpu", describe_cpu(host)),
            ("cores", f"{grant.cores} in use of {len(host.cores)}: CPUs {', '.join(map(str, grant.cpus))}"),
            ("pinned", "yes" if grant.pinned else "no"),
            ("memory", describe_memory(host)),
            *(("note", finding) for finding in grant.findings),
        ]
    )
