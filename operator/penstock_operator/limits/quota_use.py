"""Counts the use of quotas by the endpoints of a namespace, from the caches, and the allocations of the last plans.

A plan is made and its allocation is noted without a pause between the two. An allocation counts until the caches have
the object that it became: otherwise two endpoints that are reconciled at the same time would both get the last core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penstock_operator.cluster.store import ObjectKey, PackedObject, Store, StoreChange
from penstock_operator.facts.scaling import ScalerFacts
from penstock_operator.facts.tenants import NamespaceQuota
from penstock_operator.facts.workloads import DeploymentFacts
from penstock_operator.limits.quotas import Allocation, Amount, Claim, Limit, NamespaceUse, claim_of, limit_of


class QuotaUse:
    """The use of all namespaces."""

    def __init__(
        self,
        quotas: tuple[NamespaceQuota, ...],
        endpoints: Store[PackedObject],
        deployments: Store[DeploymentFacts],
        scalers: tuple[Store[ScalerFacts], ...],
        labels: Callable[[str], Mapping[str, str]],
    ) -> None:
        """`labels` returns the labels of a namespace."""
        self._quotas = quotas
        self._endpoints = endpoints
        self._deployments = deployments
        self._scalers = scalers
        self._labels = labels
        self._claims: dict[ObjectKey, tuple[int, Claim]] = {}
        """By endpoint: the version of the object, and the claim without present use."""
        self._allocations: dict[ObjectKey, tuple[str, Allocation]] = {}
        """By endpoint: its uid, and the allocation of the last plan."""
        if quotas:
            endpoints.listen(self._on_endpoint)

    def seen_by(self, key: ObjectKey) -> NamespaceUse | None:
        """The claims on the quota of an endpoint's namespace; None: no quota selects it."""
        limit = limit_of(self._quotas, self._labels(key.namespace)) if self._quotas else None
        if limit is None:
            return None
        claims = {place: self._claim(place) for place, _ in self._endpoints.of(("namespace", key.namespace))}
        own = claims.pop(key)
        return NamespaceUse(limit, own, tuple(claims.values()))

    def put(self, key: ObjectKey, uid: str, allocation: Allocation | None) -> None:
        """Note the allocation of an endpoint's plan; None: nothing new."""
        if allocation is None:
            self._allocations.pop(key, None)
        else:
            self._allocations[key] = (uid, allocation)

    def most(self, key: ObjectKey) -> int | None:
        """The replicas that an endpoint may have, as of its last plan; None: not limited."""
        found = self._allocations.get(key)
        return None if found is None else found[1].most

    def namespaces(self) -> Iterator[tuple[str, Limit, Amount]]:
        """Each namespace with a quota and endpoints: its limit, and the used amount."""
        names = sorted({key.namespace for key in self._endpoints}) if self._quotas else []
        for name in names:
            limit = limit_of(self._quotas, self._labels(name))
            if limit is None:
                continue
            used = Amount()
            for place, _ in self._endpoints.of(("namespace", name)):
                used = used.plus(self._claim(place).reserved)
            yield name, limit, used

    def _claim(self, key: ObjectKey) -> Claim:
        entry = self._endpoints.get(key)
        assert entry is not None  # noqa: S101 - the callers have its key from the store
        known = self._claims.get(key)
        if known is None or known[0] != entry.version:
            known = self._claims[key] = (entry.version, claim_of(entry.facts.value))
        claim, deployment = known[1], self._deployments.facts(key)
        held, cores = Amount(), claim.cores
        if deployment is not None:
            replicas = max(deployment.wanted, *(scaler.most for scaler in self._scalers_of(key)), 0)
            held = Amount(replicas * (deployment.cores or cores), replicas)
            # The pods of an earlier spec serve until pods of the present one are ready.
            cores = max(cores, deployment.cores)
        uid, allocation = self._allocations.get(key, ("", None))
        given = allocation.amount if allocation is not None and uid == entry.uid else Amount()
        return claim.having(held.at_least(given), cores=cores)

    def _scalers_of(self, key: ObjectKey) -> Iterator[ScalerFacts]:
        for store in self._scalers:
            for _, entry in store.of(("endpoint", *key)):
                yield entry.facts

    def _on_endpoint(self, change: StoreChange[PackedObject]) -> None:
        if change.new is None:
            self._claims.pop(change.key, None)
            self._allocations.pop(change.key, None)
