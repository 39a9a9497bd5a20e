"""The table of settings in docs/reference/autoscaling.md, generated from `ScalingSettings`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from penstock_operator.decide.settings import ScalingSettings


def settings_table() -> str:
    """A row for each setting, in Markdown."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in ScalingSettings.model_fields.items():
        default = field.default.value if isinstance(field.default, Enum) else field.default
        rows.append(f"| `{name}` | {'(none)' if default is None else f'`{default}`'} | {field.description} |")
    return "\n".join(rows)


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "autoscaling-knobs": ("docs/reference/autoscaling.md", settings_table)
}
"""Name of the part -> document and the function that generates it."""
