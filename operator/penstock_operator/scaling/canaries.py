"""The input and output of canaries: reads the pods of both plans of an endpoint with a canary, and publishes what
`endpoint/objects/canary.py` decides.

The counts are in the memory of this process, from the first reading on: a new leader begins a canary's time again. The
outcome is in the status of the endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time

from penstock.logs import log_event
from penstock_operator.cluster.errors import NotLeading
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.decide.measurement import PodReading
from penstock_operator.endpoint.objects.canary import CanaryTrial, CanaryWatch
from penstock_operator.endpoint.spec import ParsedEndpoint, read_endpoint
from penstock_operator.facts.names import CANARY, canary_name
from penstock_operator.facts.pods import PodFacts
from penstock_operator.facts.workloads import DeploymentFacts
from penstock_operator.scaling.read.scrape import PodScraper, address_of

logger = logging.getLogger(__name__)


class CanaryLoop:
    """Runs while this process leads."""

    def __init__(self, cache: ClusterCache, scraper: PodScraper, *, interval_seconds: float) -> None:
        self._cache = cache
        self._scraper = scraper
        self._interval_seconds = interval_seconds
        self._watched: dict[ObjectKey, CanaryWatch] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with self._scraper:
            while True:
                await self.tick(time.monotonic())
                await asyncio.sleep(self._interval_seconds)

    async def tick(self, now: float) -> None:
        """Look at every canary once; `now`: seconds of a monotonic clock."""
        found: dict[ObjectKey, DeploymentFacts] = {}
        for deployment, entry in self._cache.deployments.of((CANARY,)):
            # Anyone who may create Deployments may give one these labels.
            keys = (ObjectKey(*index[1:]) for index in entry.index if index[0] == "endpoint")
            found |= {key: entry.facts for key in keys if deployment.name == canary_name(key.name)}
        for key in self._watched.keys() - found.keys():
            del self._watched[key]
            self._cache.put_canary(key, None)
        for key, facts in found.items():
            try:
                await self._look(key, facts, now)
            except NotLeading:
                raise
            except Exception as error:
                # A defect that one endpoint triggers must not stop the other canaries.
                logger.exception(
                    "judging the canary failed, retrying: this is a defect of the operator",
                    extra=log_event("CanaryDefect", object=str(key), reason=error),
                )

    async def _look(self, key: ObjectKey, deployment: DeploymentFacts, now: float) -> None:
        entry = self._cache.endpoints.get(key)
        endpoint = read_endpoint(entry.facts.value) if entry is not None else None
        canary = endpoint.spec.rollout.canary if isinstance(endpoint, ParsedEndpoint) else None
        pods = [pod for pod in self._cache.canary_pods(key) if pod.template == deployment.template and _answers(pod)]
        identity, watch = (deployment.uid, deployment.template), self._watched.get(key)
        if watch is None or watch.identity != identity:
            if not pods or canary is None:
                return
            watch = self._watched[key] = CanaryWatch(identity, now, CanaryTrial(60.0 * canary.minutes))
        if watch.over:
            return
        new = await self._read(pods)
        old = await self._read([pod for pod in self._cache.runtime_pods(key) if _answers(pod)])
        report = watch.look(old, new, now)
        if report is not None:
            reason = report.reason or report.outcome
            logger.info("canary: %s", report.message, extra=log_event("CanaryJudged", object=str(key), reason=reason))
            self._cache.put_canary(key, report)

    async def _read(self, pods: list[PodFacts]) -> dict[str, PodReading]:
        """The readings by the uid of the pod."""
        read = {pod.name: pod.uid for pod in pods}
        readings = await self._scraper.scrape(address_of(pod) for pod in pods)
        return {read[name]: reading for name, reading in readings.items() if isinstance(reading, PodReading)}


def _answers(pod: PodFacts) -> bool:
    return bool(pod.ip) and pod.phase == "Running" and (pod.ready or pod.deleting)
