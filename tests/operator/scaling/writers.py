"""The writers of the number of replicas over time, from every version of a Deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock_operator.cluster.api import DEPLOYMENT, ClusterPort, ResourceKind

Writer = tuple[str, str]
"""Field manager and subresource."""

OPERATOR: Writer = ("penstock-operator", "")
HPA: Writer = ("kube-controller-manager", "scale")


def writers_of(value: dict[str, Any]) -> frozenset[Writer]:
    """The owners of `spec.replicas`, by managedFields."""
    return frozenset(
        (entry["manager"], entry.get("subresource", ""))
        for entry in value["metadata"].get("managedFields", [])
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    )


@dataclass
class Chronicle:
    """The history of one object."""

    seen: list[tuple[int, frozenset[Writer]]] = field(default_factory=list)
    """Number and writers, of each version in turn."""

    @property
    def numbers(self) -> list[int]:
        """The numbers, one after the other, without repetitions."""
        return [number for index, (number, _) in enumerate(self.seen) if not index or self.seen[index - 1][0] != number]

    @property
    def writers(self) -> list[frozenset[Writer]]:
        """The writers, one after the other, without repetitions; a version without an owner of the number is
        left out."""
        found = [writers for _, writers in self.seen if writers]
        return [one for index, one in enumerate(found) if not index or found[index - 1] != one]


@asynccontextmanager
async def chronicle(
    port: ClusterPort, namespace: str, name: str = "emotion", kind: ResourceKind = DEPLOYMENT
) -> AsyncIterator[Chronicle]:
    """Follow the object from now on."""
    kept = Chronicle()

    async def follow() -> None:
        present = await port.get(kind, name, namespace)
        assert present is not None
        kept.seen.append((present["spec"]["replicas"], writers_of(present)))
        since = present["metadata"]["resourceVersion"]
        while True:  # a server may end a stream
            async for change in port.watch(kind, namespace, resource_version=since):
                value = change.object
                since = value["metadata"]["resourceVersion"]
                if change.type in {"ADDED", "MODIFIED"} and value["metadata"]["name"] == name:
                    kept.seen.append((value["spec"]["replicas"], writers_of(value)))

    task = asyncio.create_task(follow())
    try:
        yield kept
        assert not task.done(), "the watch of the writers has ended"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
