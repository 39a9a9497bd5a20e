"""Counts at the moment of a scrape: endpoints by how they are, objects in the caches, the age of what was heard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_operator.cluster.kinds import Json
from penstock_operator.metrics import PREFIX
from penstock_operator.world import World


class Census(Collector):
    """For the registry."""

    def __init__(self, world: World, ages: Callable[[], dict[str, float]]) -> None:
        self._world = world
        self._ages = ages

    def collect(self) -> Iterator[Metric]:
        """The families."""
        endpoints = GaugeMetricFamily(
            f"{PREFIX}endpoints", "ModelEndpoints by the status and reason of Ready", labels=["ready", "reason"]
        )
        states = Counter(
            _ready(entry.facts) for key in self._world.endpoints if (entry := self._world.endpoints.get(key))
        )
        for (status, reason), count in sorted(states.items()):
            endpoints.add_metric([status, reason], count)
        yield endpoints
        objects = GaugeMetricFamily(f"{PREFIX}objects", "Objects in the caches", labels=["kind"])
        for kind, store in self._world.stores.items():
            objects.add_metric([kind.name], len(store))
        yield objects
        silence = GaugeMetricFamily(
            f"{PREFIX}silence_seconds", "Since the last event, bookmark or progress of each; liveness", labels=["what"]
        )
        for what, age in sorted(self._ages().items()):
            silence.add_metric([what], age)
        yield silence


def _ready(endpoint: Json) -> tuple[str, str]:
    conditions = (endpoint.get("status") or {}).get("conditions") or []
    ready: Json = next((entry for entry in conditions if entry.get("type") == "Ready"), {})
    return str(ready.get("status") or "Unknown"), str(ready.get("reason") or "New")
