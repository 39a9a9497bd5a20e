"""`penstock host`: what this machine is to Penstock."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from penstock_cli.screen import bytes_text, facts
from penstock_runtime.host import Host, read_host


def describe_cpu(host: Host) -> str:
    """The processor in a line: name, instruction set class, what that means for int8."""
    int8 = "native int8 products" if host.cpu.isa.has_int8_dot else "no native int8 products"
    return f"{host.cpu.model_name} (family {host.cpu.family} model {host.cpu.model}, {host.cpu.isa.value}: {int8})"


def describe_memory(host: Host) -> str:
    """The machine's memory, and how much of it this container may take where that is less."""
    limit = host.memory.limit
    return bytes_text(host.memory.total) + (f", limit {bytes_text(limit)}" if limit is not None else "")


@click.command
@click.option("--cores", type=click.IntRange(min=1), help="Physical cores to ask for. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def command(cores: int | None, *, as_json: bool) -> None:
    """Show what this machine is: processor, cores that would be used, and whether they are ours alone.

    A plan is measured for one instruction set class and refused on another; `penstock host` tells which this is.
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
