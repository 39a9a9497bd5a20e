"""Notices that somebody edits a ConfigMap that endpoints take texts from.

These ConfigMaps are the users': they have no label of ours to select them by, and one watch for each of thousands would
be too many. So all of the cluster's are watched, by their metadata alone, and those that no endpoint names are passed
over. Nothing is watched while no endpoint takes its texts from anywhere.
"""

from __future__ import annotations

import asyncio

from penstock_operator.cluster.informer import Informer
from penstock_operator.cluster.port import ClusterPort
from penstock_operator.cluster.store import Difference, Packed
from penstock_operator.watch.cluster_cache import World


class TextsWatch:
    """Keeps `world.text_sources`."""

    def __init__(self, port: ClusterPort, world: World, namespaces: tuple[str, ...]) -> None:
        self._informers = tuple(Informer(port, world.text_sources, namespace=one) for one in namespaces or ("",))
        self._wanted = asyncio.Event()
        world.endpoints.listen(self._on_endpoint)

    @property
    def silence_seconds(self) -> dict[str, float]:
        """Of each watch since it last heard anything; empty while nothing is watched."""
        if not self._wanted.is_set():
            return {}
        return {f"texts: {informer.name}": informer.silence_seconds for informer in self._informers}

    async def run(self) -> None:
        """Until cancelled."""
        await self._wanted.wait()
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run())

    def _on_endpoint(self, change: Difference[Packed]) -> None:
        if not self._wanted.is_set() and any(index[0] == "texts" for index in change.indexes):
            self._wanted.set()
