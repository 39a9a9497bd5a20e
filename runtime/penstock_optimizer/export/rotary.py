"""Tables of rotary positions, and the fields of config.json that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock_optimizer.export.encoder import Rotary
from penstock_optimizer.export.reader import NotBuildable, Reader

LONGEST = 131_072
"""Positions: the tables have a row for each."""


def rotary(positions: int, width: int, theta: float, *, shrink: float = 1.0) -> Rotary:
    """The tables for heads of an even `width`, all angles divided by `shrink`.

    In float32, as torch computes them: far positions depend on it.
    """
    if positions > LONGEST:
        raise NotBuildable(f"it has {positions} positions")
    if width % 2:
        raise NotBuildable(f"its attention heads have an odd width of {width}")
    powers = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequencies = np.float32(1) / np.float32(theta) ** powers
    frequencies /= np.float32(shrink)
    angles = np.arange(positions, dtype=np.float32)[:, np.newaxis] * frequencies
    return Rotary(np.cos(angles), np.sin(angles))


def check_unscaled(parameters: Mapping[str, Any]) -> None:
    """NotBuildable when positions are scaled (`rope_scaling`, or an entry of `rope_parameters`)."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise NotBuildable(f"its rotary positions are scaled ({kind})")


def table(reader: Reader, key: str) -> Mapping[str, Any]:
    """An object of config.json; empty when it has none."""
    value = reader.config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise reader.invalid(key, value, "an object")
    return value
