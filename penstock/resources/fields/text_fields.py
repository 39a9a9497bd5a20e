"""Text types of the fields of resources, each with its form, its length and a remedy; and Kubernetes quantities."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from penstock.resources.fields.cel import VALIDATIONS
from penstock.resources.fields.rules import LABEL_RULE, TextRule

_PART = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LEAST_MEMORY = 64 * 2**20
"""Bytes. Less is a wrong unit, such as `512m`, which is half a byte."""

DnsLabel = Annotated[str, Field(min_length=1, max_length=63), LABEL_RULE]
"""The name of an endpoint, a class."""
DataKey = Annotated[
    str,
    Field(min_length=1, max_length=253),
    TextRule(r"[-._A-Za-z0-9]+", "{self} is not a key of a ConfigMap", "Use letters, digits, '-', '_' and '.'"),
]
LabelKey = Annotated[
    str,
    Field(min_length=1, max_length=317),
    TextRule(
        rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_PART}",
        "{self} is not the key of a label",
        "Write name or domain/name, the name with letters, digits, '-', '_' and '.' (at most 63)",
    ),
]
LabelValue = Annotated[
    str,
    Field(max_length=63),
    TextRule(
        rf"({_PART})?",
        "{self} is not the value of a label",
        "Use at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
    ),
]
Digest = Annotated[
    str,
    Field(max_length=71),
    TextRule(r"sha256:[0-9a-f]{64}", "{self} is not a digest", "Write sha256: and 64 hexadecimal digits"),
]
Uri = Annotated[
    str,
    Field(max_length=512),
    TextRule(r"[a-z][a-z0-9+.-]*:[!#-\[\]-~]+", "{self} is not a URI", "Write scheme://place in ASCII, without spaces"),
]

ShortText = Annotated[str, Field(max_length=256)]
LongText = Annotated[str, Field(max_length=4096)]
Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
"""RFC 3339, in UTC, in whole seconds."""

PROMETHEUS_URL_PATTERN = (
    r"https?://([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?"
)
"""Without user, query and fragment, so that the path of the API can be appended."""
PrometheusUrl = Annotated[
    str,
    Field(max_length=512),
    TextRule(
        PROMETHEUS_URL_PATTERN,
        "{self} is not the address of a Prometheus",
        "Write http or https, a host, a port and a path, without user, query and fragment",
    ),
]


_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?\d{1,3}))?", re.ASCII)
_QUANTITY_SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "k": Fraction(10**3),
    "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40), "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}  # fmt: skip


def parse_quantity(text: str | int) -> Fraction:
    """The value of a quantity (bytes, cores, pieces), such as `2Gi`, `500m` or `2e3`; ValueError for other text."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    number = Fraction(found[1])
    if found[3] is not None:
        return number * Fraction(10) ** int(found[3])
    return number * _QUANTITY_SUFFIXES.get(found[2] or "", Fraction(1))


def is_quantity(text: str) -> bool:
    """True for text that `parse_quantity` reads."""
    return _QUANTITY.fullmatch(text) is not None


def written(value: Fraction, resource: str) -> str:
    """A quantity for people: memory in binary units, the rest in pieces or thousandths (`cpu`)."""
    if resource == "memory" or resource.startswith("ephemeral-storage"):
        for suffix in ("Ti", "Gi", "Mi"):
            if value >= _QUANTITY_SUFFIXES[suffix]:
                return f"{float(value / _QUANTITY_SUFFIXES[suffix]):.4g} {suffix}B"
        return f"{int(value)} bytes"
    return str(int(value)) if value.denominator == 1 else f"{float(value):.3f}".rstrip("0").rstrip(".")


def _whole_numbers_are_quantities(value: object) -> object:
    """JSON has one kind of number: 1e18 is a whole number, for the API server as well."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_enough_memory(text: str) -> str:
    if not is_quantity(text):
        raise _no_memory(f"{text[:40]!r} is not a quantity of memory")
    if parse_quantity(text) < LEAST_MEMORY:
        raise _no_memory(f"{text[:40]!r} of memory is less than 64Mi")
    return text


def _no_memory(problem: str) -> PydanticCustomError:
    remedy = "Write a number with its unit, such as 2Gi or 512Mi"
    return PydanticCustomError("spec", "{problem}", {"problem": problem, "remedy": remedy})


Memory = Annotated[
    str,
    BeforeValidator(_whole_numbers_are_quantities),
    Field(max_length=20),
    AfterValidator(_is_enough_memory),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 20,
            VALIDATIONS: [
                {
                    "rule": "type(self) != string || isQuantity(self)",
                    "message": "this is not a quantity of memory. Write a number with its unit, such as 2Gi or 512Mi",
                },
                {
                    "rule": "type(self) == string ? (!isQuantity(self) || quantity(self).compareTo(quantity('64Mi')) "
                    f">= 0) : self >= {LEAST_MEMORY}",
                    "message": "this is less than 64Mi of memory. Write a number with its unit, such as 2Gi or 512Mi",
                },
            ],
        }
    ),
]
"""A quantity of memory as text; whole numbers are bytes."""
