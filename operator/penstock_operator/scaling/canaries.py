"""The loop that judges canaries: reads the pods of both plans of an endpoint with a canary, and publishes the outcome.

The counts are in the memory of this process, from the first reading on: a new leader begins a canary's time again. The
outcome is in the status of the endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from penstock.logs import log_event
from penstock_operator.cluster.errors import NotLeading
from penstock_operator.cluster.store import ObjectKey
from penstock_operator.control.cache import ClusterCache
from penstock_operator.decide.canary import CanaryOutcome, CanaryTrial, PlanCounter
from penstock_operator.decide.measurement import PodReading
from penstock_operator.endpoint.spec import ParsedEndpoint, read_endpoint
from penstock_operator.facts.names import CANARY, canary_name
from penstock_operator.facts.pods import PodFacts
from penstock_operator.facts.scaling import CanaryReport
from penstock_operator.facts.workloads import DeploymentFacts
from penstock_operator.scaling.read.scrape import PodScraper, address_of

logger = logging.getLogger(__name__)


@dataclass
class _Running:
    """The state of one canary."""

    identity: tuple[str, str]
    """The uid of its Deployment, and the template that it tries."""
    begin: float
    """Since when a pod of it is ready, in seconds of a monotonic clock."""
    trial: CanaryTrial
    old: PlanCounter = field(default_factory=PlanCounter)
    new: PlanCounter = field(default_factory=PlanCounter)
    over: bool = False


class CanaryLoop:
    """Runs while this process leads."""

    def __init__(self, cache: ClusterCache, scraper: PodScraper, *, interval_seconds: float) -> None:
        self._cache = cache
        self._scraper = scraper
        self._interval_seconds = interval_seconds
        self._running: dict[ObjectKey, _Running] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with self._scraper:
            while True:
                await self.tick(time.monotonic())
                await asyncio.sleep(self._interval_seconds)

    async def tick(self, now: float) -> None:
        """Look at every canary once; `now`: seconds of a monotonic clock."""
        found: dict[ObjectKey, DeploymentFacts] = {}
        for place, entry in self._cache.deployments.of((CANARY,)):
            # Anyone who may create Deployments may give one these labels.
            keys = (ObjectKey(*index[1:]) for index in entry.index if index[0] == "endpoint")
            found |= {key: entry.facts for key in keys if place.name == canary_name(key.name)}
        for key in self._running.keys() - found.keys():
            del self._running[key]
            self._cache.put_canary(key, None)
        for key, deployment in found.items():
            try:
                await self._look(key, deployment, now)
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
        pods = {pod.uid: pod for pod in self._cache.canary_pods(key) if pod.template == deployment.template}
        ready = [pod for pod in pods.values() if _answers(pod)]
        identity, running = (deployment.uid, deployment.template), self._running.get(key)
        if running is None or running.identity != identity:
            if not ready or canary is None:
                return
            running = self._running[key] = _Running(identity, now, CanaryTrial(60.0 * canary.minutes))
        if running.over:
            return
        await self._read(running.new, ready, new=True)
        await self._read(running.old, [pod for pod in self._cache.runtime_pods(key) if _answers(pod)], new=False)
        old, new = running.old.counts, running.new.counts
        found, trial = running.trial.look(old, new, now - running.begin)
        if trial == running.trial and found.outcome is CanaryOutcome.CONTINUE:
            return
        running.trial, running.over = trial, found.outcome is not CanaryOutcome.CONTINUE
        logger.info(
            "canary: %s",
            found.message,
            extra=log_event("CanaryJudged", object=str(key), reason=found.reason or found.outcome),
        )
        self._cache.put_canary(
            key,
            CanaryReport(
                template=deployment.template,
                outcome=found.outcome,
                reason=found.reason,
                message=found.message,
                requests=0 if new is None else new.requests,
                errors=0 if new is None else new.errors,
            ),
        )

    async def _read(self, counter: PlanCounter, pods: list[PodFacts], *, new: bool) -> None:
        readings = await self._scraper.scrape(address_of(pod) for pod in pods)
        for pod in pods:
            reading = readings[pod.name]
            if isinstance(reading, PodReading):
                counter.put(pod.uid, reading, new=new)


def _answers(pod: PodFacts) -> bool:
    return bool(pod.ip) and pod.phase == "Running" and (pod.ready or pod.deleting)
