"""The statuses of an endpoint whose spec cannot be parsed, and of one whose objects the API server refused."""

from __future__ import annotations

from datetime import datetime

from penstock.resources.conditions import (
    Condition,
    ConditionStatus,
    ConditionType,
    timestamp,
    updated_conditions,
)
from penstock.resources.status import EndpointStatus
from penstock_operator.endpoint.snapshot import EndpointSnapshot
from penstock_operator.endpoint.status import conditions, read_status
from penstock_operator.facts.findings import Finding, no, unknown
from penstock_operator.facts.names import Json
from penstock_operator.facts.reasons import Reason

MESSAGE_LIMIT = 2048


def invalid_spec_status(observed: EndpointSnapshot, why: Finding) -> EndpointStatus:
    """The status of an endpoint with a spec that cannot be parsed: Accepted is false, all other conditions are
    unknown."""
    status = observed.endpoint.get("status") or {}
    generation = int(observed.endpoint["metadata"].get("generation") or 1)
    findings: dict[str, Finding] = {kind: unknown(Reason.NOT_ACCEPTED, why.message) for kind in ConditionType}
    if not (observed.endpoint.get("spec") or {}).get("exposure"):
        del findings[ConditionType.EXPOSED]
    # Only of valid specs that have `guard.live` or `vectorSpace`.
    del findings[ConditionType.ANSWERS_AGREE], findings[ConditionType.INDEX_COMPATIBLE]
    findings[ConditionType.ACCEPTED] = why
    findings[ConditionType.READY] = no(why.reason, why.message)
    written = conditions(findings, before=status.get("conditions") or (), generation=generation, now=observed.now)
    update = {"conditions": written, "observed_generation": generation, "reason": str(why.reason)}
    return read_status(status).model_copy(update=update)


def with_apply_failure(status: Json, message: str, now: datetime, *, forbidden: bool) -> Json:
    """The status with Ready false because the API server refused an object. `message`: the API server's message."""
    known = EndpointStatus.model_validate(status)
    remedy = (
        "A ResourceQuota, an admission policy or missing rights of the operator's service account forbid it"
        if forbidden
        else "An admission policy may ask for other fields; spec.pod has labels, annotations and more"
    )
    failed = Condition(
        type=ConditionType.READY,
        status=ConditionStatus.FALSE,
        reason=str(Reason.APPLY_FAILED),
        message=f"{message}. {remedy}."[:MESSAGE_LIMIT],
        observed_generation=known.observed_generation,
        last_transition_time=timestamp(now),
    )
    update = {"conditions": updated_conditions(known.conditions, [failed]), "reason": str(Reason.APPLY_FAILED)}
    return known.model_copy(update=update).to_object()
