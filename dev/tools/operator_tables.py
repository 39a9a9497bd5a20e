"""Generates the tables of docs/reference/operator.md (settings, metrics, rights) for `make docs`."""

from __future__ import annotations

from collections.abc import Callable

from penstock_operator.collectors import CacheCollector, scaling_metrics
from penstock_operator.control.cache import ClusterCache
from penstock_operator.metrics import REGISTRY
from penstock_operator.settings import DOCUMENT, SETTINGS, Settings
from tools import operator_rights as rbac


def settings() -> str:
    """A row for every setting."""
    rows = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for setting in SETTINGS:
        default = "(none)" if setting.default in {"", ()} else f"`{setting.default}`"
        unit = f" {setting.unit}" if setting.unit == "s" else ""
        rows.append(f"| `{setting.flag}` | `{setting.variable}` | {default}{unit} | {setting.description} |")
    return "\n".join(rows)


def metrics() -> str:
    """A row for every metric."""
    families = [
        *REGISTRY.collect(),
        *CacheCollector(ClusterCache(Settings().plan_settings()), dict).collect(),
        *scaling_metrics({}),
    ]
    rows = ["| metric | kind | meaning |", "|---|---|---|"]
    for family in sorted(families, key=lambda one: one.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(rows)


def rights() -> str:
    """A row for every grant."""
    rows = ["| where | resource | verbs | to |", "|---|---|---|---|"]
    for where, grants in (
        ("the cluster", rbac.CLUSTER),
        ("the reconciled namespaces", rbac.NAMESPACED),
        ("the reconciled namespaces, with `hpa.enabled` or KEDA", rbac.SCALERS),
        ("the reconciled namespaces, with `hpa.enabled`", rbac.HPA),
        ("the reconciled namespaces, with KEDA", rbac.KEDA),
        ("the reconciled namespaces, with the Gateway API", rbac.GATEWAY_API),
        ("the reconciled namespaces, names in `prometheus.secretNames`", rbac.SECRETS),
        ("its own namespace", rbac.OWN),
        ("its own namespace, to collect garbage in the store", rbac.COLLECTION),
    ):
        for grant in grants:
            group = f".{grant.kind.group}" if grant.kind.group else ""
            resource = f"`{grant.kind.plural}{group}{'/' if grant.subresource else ''}{grant.subresource}`"
            if grant.names:
                resource += f" ({', '.join(f'`{name}`' for name in grant.names).format(operator='penstock-operator')})"
            rows.append(f"| {where} | {resource} | {', '.join(grant.verbs)} | {grant.why.removeprefix('to ')} |")
    return "\n".join(rows)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "operator-settings": (DOCUMENT, settings),
    "operator-metrics": (DOCUMENT, metrics),
    "operator-rights": (DOCUMENT, rights),
}
"""Name of the part -> document and the function that makes it."""
