"""`penstock top`: load, capacity and latency of the endpoints of a cluster, the busiest first."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.table import Table

from penstock.errors import printable
from penstock_cli.cluster.kubectl import ClusterReader, Json
from penstock_cli.terminal import console, refuse_options

COLUMNS = ("NAMESPACE", "NAME", "REPLICAS", "REQUESTS/S", "CAPACITY/S", "USED", "P95", "SLOW-DOWN", "CAUSE")


def used(value: Json) -> float:
    """Load over the measured capacity of all ready replicas; -1 if one of them is not known."""
    status = value.get("status") or {}
    scaling, ready = status.get("scaling") or {}, status.get("readyReplicas") or 0
    load, capacity = scaling.get("requestsPerSecond"), scaling.get("capacityPerReplica")
    return -1.0 if load is None or not capacity or not ready else load / (capacity * ready)


def rows(endpoints: Sequence[Json]) -> list[tuple[str, ...]]:
    """The cells of the table: the most used endpoints first, then by namespace and name. Empty: not known."""
    ordered = sorted(
        endpoints, key=lambda one: (-used(one), one["metadata"].get("namespace", ""), one["metadata"]["name"])
    )
    return [_row(one) for one in ordered]


def _row(value: Json) -> tuple[str, ...]:
    metadata, status = value["metadata"], value.get("status") or {}
    scaling, ready, share = status.get("scaling") or {}, status.get("readyReplicas", 0), used(value)
    capacity = scaling.get("capacityPerReplica")

    def number(name: str, form: str) -> str:
        return "" if scaling.get(name) is None else format(scaling[name], form)

    return (
        str(metadata.get("namespace", "")),
        str(metadata["name"]),
        f"{ready}/{scaling.get('desired', status.get('replicas', 0))}",
        number("requestsPerSecond", ".1f"),
        "" if capacity is None else f"{capacity * ready:.1f}",
        "" if share < 0 else f"{share:.0%}",
        f"{scaling['p95Milliseconds']:.1f} ms" if scaling.get("p95Milliseconds") is not None else "",
        f"{scaling['slowDown']:.2f}x" if scaling.get("slowDown") is not None else "",
        str(scaling.get("cause", "")),
    )


@click.command
@click.option("--namespace", "-n", default="", help="Default: that of the current context.")
@click.option("--all-namespaces", "-A", is_flag=True, help="Show the endpoints of all namespaces.")
@click.option("--context", default="", help="The context of the kubeconfig. Default: the current one.")
def command(namespace: str, context: str, *, all_namespaces: bool) -> None:
    """Show load, capacity and p95 of the endpoints of a cluster, the busiest first.

    The figures are from the autoscaler's last decision. It runs kubectl, with your rights.
    """
    if all_namespaces:
        refuse_options(["namespace"], "one namespace, without --all-namespaces")
    words = ("--all-namespaces",) if all_namespaces else ()
    found = rows(ClusterReader(namespace, context).items("modelendpoints.penstock.dev", *words))
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="dim")
    for row in found:
        table.add_row(*(printable(cell) for cell in row))
    console.print(table if found else "There are no endpoints in this namespace.")
