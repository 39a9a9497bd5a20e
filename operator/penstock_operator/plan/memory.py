"""How much memory pods ask for: what the endpoint says, else what was measured, else what the size of the model tells.

The limit is the request: too little means being killed, and what is too much stands idle.
"""

from __future__ import annotations

import math

from penstock.resources.pod import Pod
from penstock.resources.result import ArtefactReference, Result
from penstock.resources.text_fields import parse_quantity
from penstock_operator.plan.settings import PlanSettings

MEBIBYTE = 2**20
ROUND_TO = 64 * MEBIBYTE
ABOVE_MEASURED = 1.3
"""Over the resident memory under the load of the capacity curve: longer texts, fuller queues, a fragmented heap."""
COPIES = 2.5
"""Of the files of an artefact that was never measured: the engine's weights, its repacked copy, the activations."""
PROCESS = 512 * MEBIBYTE
"""Interpreter, engine, tokenizer, queues."""


def in_bytes(text: str) -> int:
    """A quantity of memory in bytes, rounded up."""
    return math.ceil(parse_quantity(text))


def quantity(memory_bytes: int) -> str:
    """Bytes as a quantity, rounded up to 64 Mi: the same need is the same text, however it was found."""
    return f"{-(-memory_bytes // ROUND_TO) * ROUND_TO // MEBIBYTE}Mi"


def runtime_memory(
    pod: Pod, settings: PlanSettings, *, result: Result | None, artefact: ArtefactReference | None
) -> int:
    """Bytes for a runtime pod that serves this artefact."""
    if pod.memory is not None:
        return in_bytes(pod.memory)
    if result is not None and result.resident_bytes:
        return int(result.resident_bytes * ABOVE_MEASURED) + PROCESS // 2
    if artefact is not None and artefact.bytes:
        return max(in_bytes(settings.runtime_memory) // 2, int(artefact.bytes * COPIES) + PROCESS)
    return in_bytes(settings.runtime_memory)


def job_memory(pod: Pod, settings: PlanSettings, *, factor: int = 1) -> int:
    """Bytes for an optimisation: several engines hold the model one after the other, the teacher beside them.

    `factor` is for a run that follows one that had too little.
    """
    asked = in_bytes(pod.memory) if pod.memory is not None else 0
    return max(asked, in_bytes(settings.job_memory)) * factor
