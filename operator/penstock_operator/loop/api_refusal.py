"""How a refusal of the API server shows in an endpoint's status. Pure."""

from __future__ import annotations

from datetime import datetime

from penstock.resources.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    EndpointStatus,
    timestamp,
    updated_conditions,
)
from penstock_operator.cluster.errors import ClusterError, Forbidden
from penstock_operator.cluster.kinds import Json

REASON = "ApplyFailed"
MESSAGE_LIMIT = 2048


def with_problem(status: Json, problem: ClusterError, now: datetime) -> Json:
    """The status, with Ready false and the API server's words: what is wanted is not there."""
    known = EndpointStatus.model_validate(status)
    remedy = (
        "A ResourceQuota, an admission policy or missing rights of the operator's service account forbid it"
        if isinstance(problem, Forbidden)
        else "An admission policy may ask for other fields; spec.pod has labels, annotations and more"
    )
    ready = Condition(
        type=ConditionType.READY,
        status=ConditionStatus.FALSE,
        reason=REASON,
        message=f"{problem.message}. {remedy}."[:MESSAGE_LIMIT],
        observed_generation=known.observed_generation,
        last_transition_time=timestamp(now),
    )
    return known.model_copy(
        update={"conditions": updated_conditions(known.conditions, [ready]), "reason": REASON}
    ).to_object()
