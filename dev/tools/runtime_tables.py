"""Generates the tables of the documentation that come from the code: settings, metrics, routes, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial

from penstock.manifest import LiveLimits
from penstock.tasks import TaskName
from penstock_runtime import errors
from penstock_runtime.engines.base import DeviceState
from penstock_runtime.engines.neuron.variables import NeuronVariables
from penstock_runtime.errors import RequestError
from penstock_runtime.generation.loop import LoopState
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.pages.openapi import TIMINGS, sentence
from penstock_runtime.http.route_table import routes
from penstock_runtime.http.transport.message import Route
from penstock_runtime.pod.variables import PodVariables
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.serving.model_settings import settings_table as settings_of_models
from penstock_runtime.serving.shadow import LiveEvidence, ShadowState
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import SETTINGS, Settings, Variables
from penstock_runtime.tasks.base import DEFAULT_LIMITS
from tools import client_tables
from tools import task_tables as tasks_manual


def settings_table() -> str:
    """A row for every setting, by concern."""
    groups: dict[str, list[str]] = {}
    for setting in SETTINGS:
        default = "" if setting.default in {None, ()} else f"`{setting.default}`".replace("True", "true")
        default = default.replace("False", "false")
        unit = f" {setting.unit}" if setting.unit and default else ""
        groups.setdefault(setting.group, []).append(
            f"| `{setting.flag}`<br>`{setting.variable}` | {default}{unit} | {setting.description} |"
        )
    parts = []
    for group, rows in groups.items():
        model = Settings.model_fields[group].annotation
        title = (inspect.getdoc(model) or group).splitlines()[0].rstrip(".")
        parts.append("\n".join((f"## {title}", "", "| setting | default | meaning |", "|---|---|---|", *rows)))
    return "\n\n".join(parts)


def variables_table(variables: type[Variables]) -> str:
    """A row for every environment variable of a pod's process."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for setting in variables.described():
        default = "" if setting.default in {None, ""} else f"`{setting.default!s}`"
        default = default.replace("True", "true").replace("False", "false")
        unit = f" {setting.unit}" if setting.unit and default else ""
        rows.append(f"| `{setting.variable}` | {default}{unit} | {setting.description} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """A row for every metric of the registry."""
    metrics = ServerMetrics(ServerStatus("name", TaskName.TEXT_CLASSIFICATION))
    metrics.generation.state = lambda: (LoopState(), 0)
    metrics.device = lambda: DeviceState(2, 2, {}, 0, {}, 0, 0, {})
    metrics.live_guard = lambda: ShadowState(LiveEvidence(LiveLimits(texts=1, divergence=0.1, severe=0.1)))
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in metrics.registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = ", ".join(f"`{label}`" for label in METRIC_LABELS.get(family.name, ()))
        rows.append(f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(rows)


METRIC_LABELS = {
    "penstock_requests": ("route", "code"),
    "penstock_rejected": ("reason",),
    "penstock_batch_tokens": ("kind",),
    "penstock_cache": ("cache", "result"),
    "penstock_cache_blocks": ("state",),
    "penstock_classifications": ("outcome",),
    "penstock_cores": ("kind",),
    "penstock_generation_tokens": ("kind",),
    "penstock_guard_verdicts": ("outcome",),
    "penstock_sequences": ("state",),
    "penstock_shadow_answers": ("kind",),
    "penstock_shadow_evidence_log10": ("arm",),
    "penstock_shadow_lost": ("reason",),
    "penstock_served": ("endpoint", "isa", "key", "recipe", "short_recipe", "streams", "task", "verdict", "version"),
}
"""A family without samples does not list its labels; a test compares this with families that have samples."""


def error_types() -> tuple[type[RequestError], ...]:
    """All kinds of errors, by status."""
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RequestError)]
    return tuple(sorted(set(found), key=lambda kind: (kind.status, kind.error_type)))


def errors_table() -> str:
    """A row for every error."""
    rows = ["| status | error_type | when |", "|---|---|---|"]
    rows += [f"| {kind.status} | `{kind.error_type}` | {sentence(kind)} |" for kind in error_types()]
    return "\n".join(rows)


def all_routes() -> tuple[Route, ...]:
    """The table of routes of an endpoint; which of them it has depends on its task."""
    status = ServerStatus("name", TaskName.FEATURE_EXTRACTION)
    return routes(ModelService(status, Settings(), ServerMetrics(status)), DEFAULT_LIMITS)


def routes_table() -> str:
    """A row for every route, by API."""
    rows = ["| route | tasks | what |", "|---|---|---|"]
    rows += list(_route_rows())
    return "\n".join(rows)


def _route_rows() -> Iterator[str]:
    tags = list(dict.fromkeys(route.tag for route in all_routes()))
    for tag in tags:
        for route in all_routes():
            if route.tag == tag:
                tasks = "all" if route.tasks is None else ", ".join(sorted(route.tasks))
                summary = route.summary.partition(":")[0]
                yield f"| `{route.method} {route.path}` | {tasks} | {summary} ({tag}) |"


def timings_table() -> str:
    """A row for every header of an answer of the model."""
    rows = ["| header | meaning |", "|---|---|"]
    rows += [f"| `{name}` | {text} |" for name, text in TIMINGS.items()]
    return "\n".join(rows)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "settings": ("docs/reference/settings.md", settings_table),
    "neuron-variables": ("docs/reference/settings.md", partial(variables_table, NeuronVariables)),
    "pod-variables": ("docs/reference/settings.md", partial(variables_table, PodVariables)),
    "metrics": ("docs/reference/metrics.md", metrics_table),
    "routes": ("docs/reference/http.md", routes_table),
    "timings": ("docs/reference/http.md", timings_table),
    "errors": ("docs/reference/http.md", errors_table),
    "settings of models": ("docs/reference/models.md", settings_of_models),
    **tasks_manual.PARTS,
    **client_tables.PARTS,
}
"""Name of the part -> document and the function that makes it."""
