"""The memory of a pod and the cost of its requests, which the operator and the planner compute alike."""

from __future__ import annotations

ABOVE_MEASURED = 1.3
"""Factor on the resident memory measured under load: longer texts, fuller queues, heap fragmentation."""
PROCESS = 512 * 2**20
"""Bytes for interpreter, engine, tokenizer and queues."""
HOURS_PER_MONTH = 730.0
"""Hours of an average month, as cloud providers count them: 8,760 / 12."""


def measured_pod_bytes(resident_bytes: int) -> int:
    """Memory of a pod with a process that had this resident memory under load."""
    return int(resident_bytes * ABOVE_MEASURED) + PROCESS // 2


def unmeasured_pod_bytes(artefact_bytes: int) -> int:
    """The same of an artefact of this size that was not measured: the weights, a repacked copy, the activations."""
    return int(artefact_bytes * 2.5) + PROCESS


def per_month(per_hour: float) -> float:
    """The price of a month at a price per hour."""
    return per_hour * HOURS_PER_MONTH


def per_million(per_hour: float, requests_per_second: float) -> float:
    """The cost of a million requests on hardware with this price per hour that answers this mean rate (over 0)."""
    return per_hour / (requests_per_second * 3600) * 1e6
