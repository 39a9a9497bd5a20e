"""`penstock status`: the endpoints of a cluster, those that are not ready first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click
from rich.table import Table

from penstock.errors import printable
from penstock_cli.cluster.kubectl import ClusterReader, Json, condition
from penstock_cli.terminal import console, refuse_options

COLUMNS = ("NAMESPACE", "NAME", "READY", "REASON", "REPLICAS", "PLAN", "P95", "SPEED-UP")


def rows(endpoints: Sequence[Json]) -> list[tuple[str, ...]]:
    """The cells of the table: endpoints that are not ready first, then by namespace and name."""
    found = []
    for value in endpoints:
        metadata, status = value["metadata"], value.get("status") or {}
        ready = condition(value, "Ready").get("status", "Unknown")
        found.append(
            (
                str(metadata.get("namespace", "")),
                str(metadata["name"]),
                str(ready),
                str(status.get("reason") or "New"),
                f"{status.get('readyReplicas', 0)}/{status.get('replicas', 0)}",
                str((status.get("plan") or {}).get("summary", "")),
                str(status.get("p95", "")),
                str(status.get("speedUp", "")),
            )
        )
    return sorted(found, key=lambda row: (row[2] == "True", row))


def summary(table: Sequence[tuple[str, ...]]) -> str:
    """How many endpoints are ready, and the reasons of those that are not."""
    ready = sum(row[2] == "True" for row in table)
    # Without the progress: `Optimizing 7/23`.
    others = Counter(row[3].partition(" ")[0] for row in table if row[2] != "True")
    reasons = "".join(f", {count} {reason}" for reason, count in others.most_common())
    return f"{ready} of {len(table)} endpoints are ready{reasons}."


@click.command
@click.argument("name", required=False, default="")
@click.option("--namespace", "-n", default="", help="Default: that of the current context.")
@click.option("--all-namespaces", "-A", is_flag=True, help="Show the endpoints of all namespaces.")
@click.option("--context", default="", help="The context of the kubeconfig. Default: the current one.")
def command(name: str, namespace: str, context: str, *, all_namespaces: bool) -> None:
    """Show the endpoints of a cluster, or one by name: ready, reason, replicas, plan.

    It runs kubectl, with your rights. `penstock why NAME` explains one endpoint.
    """
    if name and all_namespaces:
        raise click.UsageError("an endpoint's name is of one namespace: leave --all-namespaces out")
    if all_namespaces:
        refuse_options(["namespace"], "one namespace, without --all-namespaces")
    kubectl = ClusterReader(namespace, context)
    if name:
        found = rows([kubectl.require_endpoint(name)])
    else:
        words = ("--all-namespaces",) if all_namespaces else ()
        found = rows(kubectl.items("modelendpoints.penstock.dev", *words))
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="dim")
    for row in found:
        table.add_row(*map(printable, row))
    if found:
        console.print(table)
    console.print(printable(summary(found)))
