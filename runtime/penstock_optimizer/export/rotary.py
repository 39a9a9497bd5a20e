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


def stated_rotary(reader: Reader, positions: int, width: int, *, theta: float, key: str = "rope_theta") -> Rotary:
    """The tables by the fields of config.json: transformers 5 writes `rope_parameters`, transformers 4 `key` and
    `rope_scaling`. `theta` is the default of the angles' base. NotBuildable for a scaling other than linear."""
    stated = table(reader, "rope_parameters")
    if not stated:
        stated = {"rope_theta": reader.number(key, theta), **table(reader, "rope_scaling")}
    return rotary_of(reader, stated, positions, width, theta=theta)


def rotary_of(reader: Reader, stated: Mapping[str, Any], positions: int, width: int, *, theta: float) -> Rotary:
    """The tables by `rope_parameters`, or by its entry for one kind of layers."""
    base, shrink = _positive(reader, stated, "rope_theta", theta), 1.0
    if stated.get("rope_type", stated.get("type")) == "linear":
        shrink = _positive(reader, stated, "factor", 1.0)
    else:
        check_unscaled(stated)
    if _positive(reader, stated, "partial_rotary_factor", 1.0) != 1:
        raise NotBuildable("only a part of each head has rotary positions")
    return rotary(positions, width, base, shrink=shrink)


def _positive(reader: Reader, stated: Mapping[str, Any], key: str, default: float) -> float:
    value = stated.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise reader.invalid(f"rope_parameters.{key}", value, "a positive number")
    return float(value)


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
