"""Reads data that pods give: JSON, bodies of HTTP responses, texts for messages.

Any program may run in a pod, and a model's author chooses texts that end up in a job's messages. Sizes, nesting and
numbers are bounded here, and everything that goes beyond is one exception, `Unreadable`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from penstock_operator.facts.findings import unprintable_as_spaces

MAX_DEPTH = 16
"""Nesting of arrays and objects: twice the depth of a runtime's /info."""
MAX_INTEGER = 2**63 - 1
"""The API server stores 64-bit integers."""
MAX_FLOAT = 1e15
"""No measurement here comes near it, and a product of two such numbers is still finite."""
INFO_MAX_BYTES = 262_144
METRICS_MAX_BYTES = 262_144
"""The /metrics of a runtime has some 20 KB."""
DEMAND_MAX_BYTES = 64
MESSAGE_MAX_BYTES = 16_384
"""A kubelet passes on at most 4,096 bytes of a termination message."""
PROGRESS_MAX_BYTES = 8192


class Unreadable(ValueError):
    """Data of a pod that cannot be used; the message is a clause without control characters."""


def read_json(data: str | bytes, *, max_bytes: int) -> Any:
    """Parse JSON (RFC 8259, UTF-8). Texts are unprintable_as_spaces, floats finite and integers 64-bit in the result.

    Unreadable when it is longer, nested deeper, or no JSON.
    """
    # A character takes at least one byte.
    if len(data) > max_bytes:
        raise Unreadable(f"it has more than {max_bytes} bytes")
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Unreadable(f"it is not JSON: {unprintable_as_spaces(str(error))[:200]}") from None
    return _bounded(value, MAX_DEPTH)


def _bounded(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return unprintable_as_spaces(value)
    if isinstance(value, float):
        if not math.isfinite(value) or abs(value) > MAX_FLOAT:
            raise Unreadable(f"it has a number beyond {MAX_FLOAT:g}")
        return value
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise Unreadable("it has an integer of more than 64 bits")
        return value
    if value is None:
        return value
    if depth == 0:
        raise Unreadable(f"it is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [_bounded(entry, depth - 1) for entry in value]
    return {unprintable_as_spaces(name): _bounded(entry, depth - 1) for name, entry in value.items()}


def first_problem(error: ValidationError) -> str:
    """The first problem of a validation as a clause: the field and its required form, without its value."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, problem["loc"]))
    return unprintable_as_spaces(f"{place}: {problem['msg']}" if place else problem["msg"])[:200]


async def read_body(chunks: AsyncIterable[bytes], *, max_bytes: int) -> bytes:
    """The body of a response. Unreadable when it is longer: the rest is not read."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            raise Unreadable(f"it sends more than {max_bytes} bytes")
    return bytes(body)
