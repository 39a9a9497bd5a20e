"""Kinds of fields that gateways send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock_runtime.tasks.fields import JsonSchema, Text


@dataclass(frozen=True)
class AnyText(Text):
    """A text, which may be empty: gateways send the contents of messages, of which some are."""

    def parse(self, value: Any, where: str) -> str:
        """The text."""
        return "" if value == "" else super().parse(value, where)

    def schema(self) -> JsonSchema:
        """Any string."""
        return {"type": "string"}
