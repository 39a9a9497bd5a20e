"""What the operator asks of a cluster. One adapter: `penstock_operator.cluster.kubernetes`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock_operator.cluster.kinds import Json, Kind

WatchType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    items: tuple[Json, ...]
    resource_version: str
    """Of the whole list: where a watch goes on."""


@dataclass(frozen=True)
class Change:
    """One event of a watch; a bookmark's object has a resourceVersion and nothing else."""

    type: WatchType
    object: Json


class ClusterPort(Protocol):
    """A cluster. Every method raises a `ClusterError`, and retries by itself what passes by itself, for a while."""

    async def get(self, kind: Kind, name: str, namespace: str = "") -> Json | None:
        """One object; None when there is none."""

    def pages(self, kind: Kind, namespace: str = "", *, labels: str = "") -> AsyncIterator[Page]:
        """All objects, in pages. Expired when the list took so long that its beginning is gone."""

    def watch(
        self, kind: Kind, namespace: str = "", *, labels: str = "", resource_version: str
    ) -> AsyncIterator[Change]:
        """Changes since then, until the server ends the stream or it falls silent. Expired: list again."""

    async def apply(self, value: Json, *, subresource: str = "") -> Json:
        """Server-side apply as `penstock-operator`, with force; the object as it then is.

        A `metadata.resourceVersion` in it is a condition: Conflict when the object is another by now.
        """

    async def create(self, value: Json) -> Json:
        """A new object; Conflict when there is one of that name."""

    async def replace(self, value: Json) -> Json:
        """The whole object, on condition of its `metadata.resourceVersion`: Conflict otherwise."""

    async def disown(self, kind: Kind, value: Json, entries: Sequence[int]) -> Json:
        """Strike entries, by their place, from the managedFields of an object as it was read; the object as it then is.

        Conflict when it is another by now.
        """

    async def delete(self, kind: Kind, name: str, namespace: str = "", *, uid: str = "") -> bool:
        """Delete in the background; False when there was none (or none of that uid)."""

    async def log_tail(self, pod: str, namespace: str, *, lines: int, max_bytes: int) -> str:
        """The last lines of a pod's one container; empty while there are none."""
