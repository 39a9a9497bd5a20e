"""Counts at the moment of a scrape: endpoints by how they are, objects in the caches, the age of what was heard."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_operator.metrics import PREFIX
from penstock_operator.watch.cluster_cache import World


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
        for (_, status, reason), count in sorted(self._world.endpoints.sizes("ready").items()):
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
