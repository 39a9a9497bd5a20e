"""Quantities as Kubernetes writes them: `2Gi`, `500m`, `1.5`, `2e3`."""

from __future__ import annotations

import re
from fractions import Fraction

_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?\d{1,3}))?", re.ASCII)
_SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "k": Fraction(10**3),
    "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40), "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}  # fmt: skip


def parse_quantity(text: str | int) -> Fraction:
    """The number that a quantity means (bytes, cores, pieces); ValueError when it is none."""
    found = _FORM.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    number = Fraction(found[1])
    if found[3] is not None:
        return number * Fraction(10) ** int(found[3])
    return number * _SUFFIXES.get(found[2] or "", Fraction(1))


def is_quantity(text: str) -> bool:
    """True for what `parse_quantity` reads."""
    return _FORM.fullmatch(text) is not None


def written(value: Fraction, resource: str) -> str:
    """A quantity for people: memory in binary units, the rest in pieces or thousandths (`cpu`)."""
    if resource == "memory" or resource.startswith("ephemeral-storage"):
        for suffix in ("Ti", "Gi", "Mi"):
            if value >= _SUFFIXES[suffix]:
                return f"{float(value / _SUFFIXES[suffix]):.4g} {suffix}B"
        return f"{int(value)} bytes"
    return str(int(value)) if value.denominator == 1 else f"{float(value):.3f}".rstrip("0").rstrip(".")
