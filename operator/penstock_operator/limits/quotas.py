"""Quotas: how many cores and replicas the endpoints of a namespace may have together.

Each endpoint claims its smallest number of replicas. A claim that was accepted, and the cores and replicas of an
endpoint in addition (replicas that the autoscaler added, pods of an earlier spec), is not taken away for another
endpoint. Of the claims that were not accepted, the oldest goes first. The rest of the quota is for the autoscaler: what
one endpoint takes is counted when the next one is planned.

Pure. Cores are `spec.cores` for each replica; jobs, gateways and the additional pods of a rollout do not
count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.resources.conditions import ConditionType
from penstock.resources.endpoint_parts.scaling import ScalingMode
from penstock_operator.facts.findings import Finding, no
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.tenants import NamespaceQuota

WAITING_SECONDS = 15.0
"""An endpoint that the quota refuses or limits is planned again after this time: another endpoint may have become
smaller."""
SOON = 10
"""Of those that wait, this many are planned as often; later ones in proportion to their position, because each plan
looks at all endpoints of the namespace."""


@dataclass(frozen=True)
class Amount:
    """Cores and replicas."""

    cores: int = 0
    replicas: int = 0

    def plus(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(self.cores + other.cores, self.replicas + other.replicas)

    def at_least(self, other: Amount) -> Amount:
        """The larger number of each."""
        return Amount(max(self.cores, other.cores), max(self.replicas, other.replicas))

    def __str__(self) -> str:
        return f"{_counted(self.cores, 'core')} and {_counted(self.replicas, 'replica')}"


@dataclass(frozen=True)
class Limit:
    """The quota of one namespace; None: not limited."""

    cores: int | None = None
    replicas: int | None = None

    def holds(self, amount: Amount) -> bool:
        """Whether the amount is within the limit."""
        return (self.cores is None or amount.cores <= self.cores) and (
            self.replicas is None or amount.replicas <= self.replicas
        )

    def __str__(self) -> str:
        limits = ((self.cores, "core"), (self.replicas, "replica"))
        return " and ".join(_counted(number, what) for number, what in limits if number is not None)


def limit_of(quotas: Iterable[NamespaceQuota], labels: Mapping[str, str]) -> Limit | None:
    """The smallest numbers of the quotas that select a namespace with these labels; None: no quota selects it."""
    chosen = [quota for quota in quotas if quota.namespace_selector.includes(labels)]
    cores = [quota.cores for quota in chosen if quota.cores is not None]
    replicas = [quota.replicas for quota in chosen if quota.replicas is not None]
    return Limit(min(cores, default=None), min(replicas, default=None)) if chosen else None


class ClaimState(StrEnum):
    """The acceptance of the present spec by the status of an endpoint."""

    ACCEPTED = "Accepted"
    WAITING = "Waiting"
    """Not planned yet, or refused by the quota."""
    REFUSED = "Refused"
    """Not accepted for another reason, or being deleted: it takes nothing that it does not have."""


@dataclass(frozen=True)
class Claim:
    """The claim of one endpoint, and its present use."""

    name: str
    created: str
    """creationTimestamp, which sorts as text."""
    cores: int
    """Cores of one replica: of the spec, or of the present pods if these have more."""
    least: int
    """The number of replicas that it needs."""
    state: ClaimState = ClaimState.WAITING
    held: Amount = Amount()
    """The amount of its Deployment and HPA, and of the last plan's allocation."""

    def having(self, held: Amount, *, cores: int) -> Claim:
        """The same claim with the endpoint's present use; `cores`: of one of its replicas."""
        # Not `replace`, which takes twice as long: a plan does this for each endpoint of the namespace.
        return Claim(self.name, self.created, cores, self.least, self.state, held)

    @property
    def needed(self) -> Amount:
        """The amount that it needs to be accepted."""
        return Amount(self.least * self.cores, self.least)

    @property
    def missing(self) -> Amount:
        """The needed amount above the present use."""
        needed, held = self.needed, self.held
        return Amount(max(0, needed.cores - held.cores), max(0, needed.replicas - held.replicas))

    @property
    def reserved(self) -> Amount:
        """The amount that no other endpoint may take."""
        return self.held.at_least(self.needed) if self.state is ClaimState.ACCEPTED else self.held

    @property
    def age(self) -> tuple[str, str]:
        """Sorts the oldest first; two of one second by name."""
        return self.created, self.name


@dataclass(frozen=True)
class Allocation:
    """The part of the quota that a plan gave to an endpoint."""

    amount: Amount
    """Counts although the caches may not have its objects yet."""
    most: int
    """Replicas that the autoscaler may give it."""


@dataclass(frozen=True)
class QuotaShare:
    """The cores and replicas that the quota allows one endpoint."""

    limit: Limit
    used: Amount
    """By the other endpoints of the namespace."""
    needed: Amount
    accepted: bool
    most: int
    """Replicas that it may have."""
    cores: int
    """Of one replica."""
    ahead: int = 0
    """Older endpoints that wait."""

    @property
    def waiting_seconds(self) -> float:
        """When to plan the endpoint again if the quota refuses it."""
        return WAITING_SECONDS * (1 + self.ahead // SOON)

    def allocation(self, replicas: int) -> Allocation | None:
        """The allocation of this number of replicas; None for an endpoint that is not accepted."""
        amount = Amount(replicas * self.cores, replicas).at_least(self.needed)
        return Allocation(amount, self.most) if self.accepted else None

    def finding(self, namespace: str) -> Finding | None:
        """Why the endpoint is not accepted; None: it is."""
        if self.accepted:
            return None
        return no(
            Reason.QUOTA_EXCEEDED,
            f"This endpoint needs {self.needed}. The quota of the namespace {namespace} is {self.limit}, and its other "
            f"endpoints use {self.used}. Ask for fewer cores or replicas (spec.cores, scaling.minReplicas), delete or "
            "suspend another endpoint, or ask the administrator to raise policy.quotas of the chart.",
        )


@dataclass(frozen=True)
class NamespaceUse:
    """The claims on the quota of a namespace, from the point of view of one endpoint."""

    limit: Limit
    own: Claim
    others: tuple[Claim, ...] = field(default=())

    def share(self) -> QuotaShare:
        """The cores and replicas that the quota allows this endpoint now."""
        own, used = self.own, Amount()
        for other in self.others:
            used = used.plus(other.reserved)
        older = [other for other in self.others if other.state is ClaimState.WAITING and other.age < own.age]
        for other in sorted(older, key=lambda claim: claim.age):
            if self.limit.holds(used.plus(own.reserved).plus(other.missing)):
                used = used.plus(other.missing)
        enough = own.missing == Amount() or self.limit.holds(used.plus(own.held).plus(own.missing))
        accepted = own.state is ClaimState.ACCEPTED or enough
        return QuotaShare(self.limit, used, own.needed, accepted, self._most(used), own.cores, len(older))

    def _most(self, used: Amount) -> int:
        own, limit = self.own, self.limit
        room = []
        if limit.cores is not None:
            room.append((limit.cores - used.cores) // own.cores)
        if limit.replicas is not None:
            room.append(limit.replicas - used.replicas)
        has = min(own.held.replicas, own.held.cores // own.cores)
        # A quota that was lowered takes nothing away.
        return max(min(room), has, own.least)


def claim_of(endpoint: Mapping[str, Any]) -> Claim:
    """The claim of a ModelEndpoint object, without its present use."""
    metadata, spec = endpoint["metadata"], endpoint.get("spec") or {}
    return Claim(
        name=metadata["name"],
        created=metadata.get("creationTimestamp") or "",
        cores=int(spec.get("cores", 1)),
        least=least_replicas(spec),
        state=_state(endpoint),
    )


def least_replicas(spec: Mapping[str, Any]) -> int:
    """The replicas that an endpoint needs. One that may scale to zero needs one: a request may come at any time."""
    scaling = spec.get("scaling") or {}
    if spec.get("suspend"):
        return 0
    if scaling.get("mode") in {ScalingMode.EXTERNAL, ScalingMode.NONE}:
        return int(spec.get("replicas", 1))
    return max(1, int(scaling.get("minReplicas", 1)))


def _state(endpoint: Mapping[str, Any]) -> ClaimState:
    metadata = endpoint["metadata"]
    if "deletionTimestamp" in metadata:
        return ClaimState.REFUSED
    conditions = (endpoint.get("status") or {}).get("conditions") or []
    found: Mapping[str, Any] = next((one for one in conditions if one.get("type") == ConditionType.ACCEPTED), {})
    if found.get("observedGeneration") != metadata.get("generation"):
        return ClaimState.WAITING
    if found.get("status") == "True":
        return ClaimState.ACCEPTED
    return ClaimState.WAITING if found.get("reason") == Reason.QUOTA_EXCEEDED else ClaimState.REFUSED


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
