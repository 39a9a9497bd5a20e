"""Generates the table of the autoscaler's settings in docs/autoscaling.md."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from penstock_operator.scaling.decide.settings import ScalingSettings


def knobs_table() -> str:
    """A row for every knob."""
    rows = ["| knob | default | meaning |", "|---|---|---|"]
    for name, field in ScalingSettings.model_fields.items():
        default = field.default.value if isinstance(field.default, Enum) else field.default
        rows.append(f"| `{name}` | {'(none)' if default is None else f'`{default}`'} | {field.description} |")
    return "\n".join(rows)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {"autoscaling-knobs": ("docs/autoscaling.md", knobs_table)}
"""Name of the part -> document and the function that makes it."""
