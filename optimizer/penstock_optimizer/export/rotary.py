"""Angles of rotary positions, and the fields of config.json that describe them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from penstock_optimizer.export.reader import NotBuildable, Reader
from penstock_optimizer.export.transformer import Rotary
from penstock_runtime.rows import Float

LONGEST = 131_072
"""Positions: the tables have a row for each."""
WIDEST = 16_384
"""Numbers of a head."""


def rotary(positions: int, width: int, theta: float, *, shrink: float = 1.0) -> Rotary:
    """The angles for heads of an even `width`, all divided by `shrink`."""
    return Rotary(_frequencies(width, theta) / np.float32(shrink), _checked(positions))


def _checked(positions: int) -> int:
    if positions > LONGEST:
        raise NotBuildable(f"it has {positions} positions")
    return positions


def _frequencies(width: int, theta: float) -> Float:
    """[width / 2]: the angle of each pair at the second position. In float32, as torch computes it."""
    if width % 2 or width > WIDEST:
        raise NotBuildable(f"its attention heads have a width of {width}, which is odd or over {WIDEST}")
    return np.float32(1) / np.float32(theta) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))


def stated_rotary(reader: Reader, positions: int, width: int, *, theta: float, key: str = "rope_theta") -> Rotary:
    """The angles by the fields of config.json: transformers 5 writes `rope_parameters`, transformers 4 `key` and
    `rope_scaling`. `theta` is the default of the angles' base. NotBuildable for an unknown scaling."""
    stated = table(reader, "rope_parameters")
    if not stated:
        stated = {"rope_theta": reader.number(key, theta), **table(reader, "rope_scaling")}
    return rotary_of(reader, stated, positions, width, theta=theta)


def rotary_of(reader: Reader, stated: Mapping[str, Any], positions: int, width: int, *, theta: float) -> Rotary:
    """The angles by `rope_parameters`, or by its entry for one kind of layers."""
    base = positive(reader, stated, "rope_theta", theta)
    # A part of each head only (Phi-4-mini).
    share = {"partial_rotary_factor": reader.config.get("partial_rotary_factor") or 1.0, **stated}
    plain = _frequencies(int(width * positive(reader, share, "partial_rotary_factor", 1.0)), base)
    found = Rotary(plain, _checked(positions))
    match stated.get("rope_type", stated.get("type")):
        case "linear":
            return replace(found, frequencies=plain / np.float32(positive(reader, stated, "factor", None)))
        case "llama3":
            settings = (positive(reader, stated, key, None) for key in LLAMA3_SETTINGS)
            return replace(found, frequencies=llama3_frequencies(plain, *settings))
        case "yarn":
            frequencies, magnitude = _yarn(reader, plain, stated, base)
            return replace(found, frequencies=frequencies, magnitude=magnitude)
        case "longrope" | "su":
            return _long_rope(reader, found, stated)
        case _:
            check_unscaled(stated)
            return found


LLAMA3_SETTINGS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Settings of the scaling of Llama 3.1, in the order of `llama3_frequencies`."""


def llama3_frequencies(plain: Float, factor: float, low: float, high: float, original: float) -> Float:
    """The scaling of Llama 3.1: frequencies of long waves are divided by `factor`, middle ones interpolated.

    `plain`: float32 [half the width], angle of each position step in radians. Source: transformers'
    `_compute_llama3_parameters`.
    """
    wavelength = (np.float32(2 * math.pi) / plain).astype(np.float32)
    scaled = np.where(wavelength > original / low, plain / np.float32(factor), plain)
    smooth = ((np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)).astype(np.float32)
    between = (1 - smooth) * scaled / np.float32(factor) + smooth * scaled
    is_between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return np.where(is_between, between, scaled).astype(np.float32)


def _yarn(reader: Reader, plain: Float, stated: Mapping[str, Any], theta: float) -> tuple[Float, float]:
    """YaRN: frequencies with fewer than `beta_slow` rotations within the original length are divided by `factor`, with
    more than `beta_fast` kept, between them interpolated. Also the factor of cosines and sines.

    Peng et al. (2023), https://arxiv.org/abs/2309.00071; transformers' `_compute_yarn_parameters`.
    """
    width, factor = 2 * len(plain), positive(reader, stated, "factor", None)
    given = {key: value for key, value in stated.items() if value is not None}
    original = positive(reader, given, "original_max_position_embeddings", reader.integer("max_position_embeddings"))
    edges = [
        width * math.log(original / (positive(reader, given, key, turns) * 2 * math.pi)) / (2 * math.log(theta))
        for key, turns in (("beta_fast", 32.0), ("beta_slow", 1.0))
    ]
    if given.get("truncate", True):
        edges = [math.floor(edges[0]), math.ceil(edges[1])]
    low, high = max(edges[0], 0), min(edges[1], width - 1)
    ramp = (np.arange(len(plain), dtype=np.float32) - np.float32(low)) / np.float32((high - low) or 0.001)
    kept = np.float32(1) - np.clip(ramp, 0, 1)
    frequencies = plain / np.float32(factor) * (1 - kept) + plain * kept
    numerator, denominator = given.get("mscale"), given.get("mscale_all_dim")
    if numerator and denominator:
        inferred = _magnitude(factor, numerator) / _magnitude(factor, denominator)
    else:
        inferred = _magnitude(factor, 1.0)
    return frequencies.astype(np.float32), positive(reader, given, "attention_factor", inferred)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _long_rope(reader: Reader, plain: Rotary, stated: Mapping[str, Any]) -> Rotary:
    """LongRoPE within the original context, where its short factors apply. Beyond that, transformers changes the
    frequencies of a sequence while it grows, which a cache of rotated keys cannot follow.

    Ding et al. (2024), https://arxiv.org/abs/2402.13753; transformers' `_compute_longrope_parameters`.
    """
    promised, key = reader.integer("max_position_embeddings", 2048), "original_max_position_embeddings"
    stated = {**stated, key: stated.get(key) or reader.config.get(key)}
    if stated[key] is None:
        original, growth = promised, positive(reader, stated, "factor", 1.0)
    else:
        original = max(int(positive(reader, stated, key, None)), 1)
        growth = promised / original
    factors = np.asarray(stated.get("short_factor"), np.float32)
    if factors.shape != plain.frequencies.shape:
        wanted = f"a list of {len(plain.frequencies)} numbers"
        raise reader.invalid("short_factor", stated.get("short_factor"), wanted)
    if stated.get("attention_factor") is not None:
        magnitude = positive(reader, stated, "attention_factor", None)
    else:
        magnitude = math.sqrt(1 + math.log(growth) / math.log(max(original, 2))) if growth > 1 else 1.0
    return replace(plain, frequencies=plain.frequencies / factors, magnitude=magnitude, limit=original)


def positive(reader: Reader, stated: Mapping[str, Any], key: str, default: float | None) -> float:
    """A number of the rotary positions; CorruptModel if it is missing without a default, or is no positive number."""
    value = stated.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        field = "rope_parameters" if reader.config.get("rope_parameters") else "rope_scaling"
        raise reader.invalid(f"{field}.{key}", value, "a positive number")
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
