"""Ready: the sum. True means that what the spec asks for is what serves, from pods that were seen to own their cores.

An endpoint may answer requests and not be Ready: Available says whether it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.resources.status import ConditionType
from penstock_operator.plan.availability import Trouble
from penstock_operator.plan.conditions import Finding, no, yes
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.optimized_model import Optimization

NEEDED = (ConditionType.ACCEPTED, ConditionType.OPTIMIZED, ConditionType.AVAILABLE, ConditionType.CORES_PINNED)
"""Have to be known to hold."""
NOT_DENIED = (ConditionType.MODEL_RESOLVED, ConditionType.ACCURACY_WITHIN_BUDGET, ConditionType.OBJECTIVE_MET)
"""Must not be known to be broken. Not being known is no reason to say no: a pinned artefact, a measurement left out.

MetricsAvailable is in neither: an endpoint serves as well without metrics; only its number of replicas stands still.
"""


def ready(endpoint: Endpoint, findings: Mapping[str, Finding], wrong: Sequence[Trouble]) -> Finding:
    """The sum of the other findings; its reason is that of the first that stands in the way."""
    if endpoint.spec.suspend:
        return no("Suspended", "The endpoint is suspended. Set spec.suspend to false to serve again.")
    idle = findings[ConditionType.AVAILABLE].true and findings[ConditionType.AVAILABLE].reason == "ScaledToZero"
    for kind in NEEDED:
        finding = findings[kind]
        if idle and kind == ConditionType.CORES_PINNED and not finding.false:
            # There is no pod that could be seen. The next one will be.
            continue
        if not finding.true:
            return no(finding.reason, finding.message)
    for kind in NOT_DENIED:
        if findings[kind].false:
            return no(findings[kind].reason, findings[kind].message)
    crashing = [trouble for trouble in wrong if trouble.crashing]
    if crashing:
        return no(crashing[0].reason, crashing[0].message)
    rollout = findings[ConditionType.PROGRESSING]
    if rollout.reason in {"RollingOut", "NoRoomForSurge", "RolloutStuck"}:
        return no(rollout.reason, rollout.message)
    return yes("ScaledToZero" if idle else "Serving", findings[ConditionType.AVAILABLE].message)


def reason_words(summed: Finding, wanted: Optimization | None) -> str:
    """The reason for the printer column, with the progress while there is one: `Optimizing 7/23`."""
    if summed.reason == "Optimizing" and wanted is not None and wanted.status.progress:
        return f"Optimizing {wanted.status.progress}"
    return summed.reason
