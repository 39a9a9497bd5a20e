"""Grafana's form of a dashboard. It is that of Grafana 10.1 (schema version 38), which newer versions migrate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 38
COLUMNS = 24
"""Width of Grafana's grid."""
HEIGHTS = {"stat": 4, "timeseries": 8, "table": 8}


@dataclass(frozen=True)
class Panel:
    """A panel with its queries."""

    title: str
    queries: Mapping[str, str]
    """Legend -> PromQL. A legend may have `{{label}}`."""
    unit: str = "short"
    """One of Grafana's units: reqps, s, ms, percentunit, bytes."""
    kind: str = "timeseries"
    width: int = 8
    description: str = ""


@dataclass(frozen=True)
class Dashboard:
    """A dashboard: rows of panels under their titles."""

    name: str
    title: str
    rows: Mapping[str, Sequence[Panel]]
    variables: Mapping[str, str] | None = None
    """Name of a variable -> the query for its values."""


def dashboard(value: Dashboard) -> Json:
    """The dashboard as Grafana loads it."""
    panels: list[Json] = []
    y = 0
    for title, row in value.rows.items():
        panels.append(_row(title, y))
        y += 1
        x = height = 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + height
            height = HEIGHTS[panel.kind]
            panels.append(_panel(panel, {"x": x, "y": y, "w": panel.width, "h": height}))
            x += panel.width
        y += height
    for number, made in enumerate(panels, start=1):
        made["id"] = number
    return {
        "uid": value.name,
        "title": value.title,
        "tags": ["penstock"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": SCHEMA_VERSION,
        "time": {"from": "now-3h", "to": "now"},
        "links": [
            {
                "title": "Penstock",
                "type": "dashboards",
                "icon": "",
                "tooltip": "",
                "tags": ["penstock"],
                "asDropdown": True,
                "targetBlank": False,
                "includeVars": False,
                "keepTime": True,
            }
        ],
        "templating": {"list": [_data_source(), *(_variable(*pair) for pair in (value.variables or {}).items())]},
        "panels": panels,
    }


def _row(title: str, y: int) -> Json:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, place: Json) -> Json:
    instant = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend or "__auto",
            "range": not instant,
            "instant": instant,
            **({"format": "table"} if instant else {}),
        }
        for number, (legend, expression) in enumerate(panel.queries.items())
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.description} if panel.description else {}),
        "gridPos": place,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": _options(panel.kind),
        **({"transformations": _TIDY} if instant else {}),
    }


_TIDY: list[Json] = [
    {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": {"Value": "pods"}}}
]


def _options(kind: str) -> Json:
    if kind == "stat":
        reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
    if kind == "table":
        return {"showHeader": True}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _data_source() -> Json:
    return {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus", "refresh": 1}


def _variable(name: str, query: str) -> Json:
    return {
        "type": "query",
        "name": name,
        "label": name,
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
    }
