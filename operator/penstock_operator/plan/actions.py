"""The outcome of a plan: what to apply, to delete, to write and to say. Values; `penstock_operator.cluster` acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from penstock_operator.plan.observed import Ref
from penstock_operator.plan.settings import Json


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event to post on the endpoint. Posted on transitions only: the same state twice posts nothing."""

    type: Literal["Normal", "Warning"]
    reason: str
    """CamelCase, stable."""
    message: str


@dataclass(frozen=True)
class StatusWrite:
    """The whole status of an OptimizedModel, to be written when it differs from what is there."""

    name: str
    status: Json


@dataclass(frozen=True)
class Plan:
    """What to do now. Acting on it and planning again gives the same objects and nothing more to do."""

    apply: tuple[Json, ...] = ()
    """Desired objects in the order to apply them, server-side, as field manager `penstock-operator`, with force. Fields
    that are left out (such as `replicas` where something else scales) are not the operator's."""
    guarded: frozenset[Ref] = frozenset()
    """Of the desired objects, those to apply only on condition that they are as they were when this was planned."""
    taken_over: frozenset[Ref] = frozenset()
    """Deployments whose number is the operator's from now on: who scaled them is struck from its owners before."""
    delete: tuple[Ref, ...] = ()
    """Objects that are there and should not be, to be deleted before anything is applied; background propagation."""
    status: Json = field(default_factory=dict)
    """The whole status of the ModelEndpoint, to be written when it differs from what is there."""
    optimized_status: tuple[StatusWrite, ...] = ()
    """Statuses of the OptimizedModels that exist. One that is being created gets its status next time round."""
    events: tuple[Event, ...] = ()
    requeue_seconds: float | None = None
    """Look again after this, also without an event; None: the slow resync suffices."""

    def object(self, kind: str, name: str | None = None) -> dict[str, Any] | None:
        """The desired object of this kind (and name), if there is one."""
        for value in self.apply:
            if value["kind"] == kind and name in {None, value["metadata"]["name"]}:
                return value
        return None
