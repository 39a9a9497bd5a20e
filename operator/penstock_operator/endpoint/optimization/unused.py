"""When an OptimizedModel that no endpoint uses is deleted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from penstock.resources.conditions import timestamp
from penstock.resources.optimized_model import Phase
from penstock_operator.endpoint.optimization.model import status_of
from penstock_operator.endpoint.snapshot import StatusWrite
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import moment
from penstock_operator.facts.workloads import OptimizedModelFacts

NEW_SECONDS = 30.0
"""An OptimizedModel that is younger is kept without users: the status of its endpoint may not name it yet."""


@dataclass(frozen=True)
class UnusedModelAction:
    """What to do about an OptimizedModel that may be unused."""

    delete: bool = False
    status: StatusWrite | None = None
    """A status to write; None: unchanged."""
    requeue_seconds: float | None = None


def unused_model_action(facts: OptimizedModelFacts, *, now: datetime, settings: PlanSettings) -> UnusedModelAction:
    """Mark, keep or delete an OptimizedModel by its users (`facts.users`). Call it for each from time to time, and
    when an endpoint is deleted or changed."""
    status = status_of(facts)
    if facts.deleting:
        return UnusedModelAction()
    if facts.users:
        if status.last_used is None:
            return UnusedModelAction()
        return UnusedModelAction(
            status=StatusWrite(facts.name, status.model_copy(update={"last_used": None}).to_object())
        )
    grace = timedelta(seconds=settings.unused_grace_seconds)
    kept = timedelta(seconds=NEW_SECONDS)
    if not facts.owned and not facts.status:
        # Restored from a backup: kubectl writes the status only after it has created all OptimizedModels.
        kept = max(kept, grace)
    if facts.created is not None and now - facts.created < kept:
        return UnusedModelAction(requeue_seconds=(facts.created + kept - now).total_seconds())
    if status.phase is not Phase.READY:
        return UnusedModelAction(delete=True)
    since = moment(status.last_used)
    if since is None or (facts.created is not None and since < facts.created):
        # The second is the status of a backup. Its time is overwritten, not only ignored: kubectl owns it, and an apply
        # without it would not remove it when an endpoint uses the result.
        marked = status.model_copy(update={"last_used": timestamp(now)})
        return UnusedModelAction(
            status=StatusWrite(facts.name, marked.to_object()), requeue_seconds=grace.total_seconds()
        )
    left = (since + grace - now).total_seconds()
    return UnusedModelAction(delete=True) if left <= 0 else UnusedModelAction(requeue_seconds=left)
