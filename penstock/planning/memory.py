"""Memory of serving pods, from what the optimisation measured. Pure."""

from __future__ import annotations

ABOVE_MEASURED = 1.3
"""Factor on the resident memory measured under load: longer texts, fuller queues, heap fragmentation."""
PROCESS = 512 * 2**20
"""Interpreter, engine, tokenizer, queues."""


def measured_pod_bytes(resident_bytes: int) -> int:
    """Memory of a pod whose process had this resident memory under load."""
    return int(resident_bytes * ABOVE_MEASURED) + PROCESS // 2
