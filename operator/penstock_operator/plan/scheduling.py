"""Why no node takes a pod, in more than the scheduler's words: which label, taint or resource is missing where."""

from __future__ import annotations

from penstock.resources.hardware_class import HardwareClassSpec
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.observed import Observed
from penstock_operator.plan.placement import Needs, Node, place


def missing_for(
    endpoint: Endpoint,
    observed: Observed,
    hardware: HardwareClassSpec | None,
    *,
    class_name: str,
    cores: int,
    memory_bytes: int,
) -> str:
    """What is missing for a pod of this class; empty when some node would take it if it were free, or nobody knows.

    Asked only when the scheduler has said no: nodes are many, and mostly they fit.
    """
    if hardware is None or not observed.nodes:
        return ""
    needs = Needs.of(class_name, hardware, endpoint.spec.pod, cores=cores, memory_bytes=memory_bytes)
    return place(needs, map(Node.from_object, observed.nodes)).explanation
