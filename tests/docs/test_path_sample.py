"""The files that a sample of metrics executes, up to the replica count in the Deployment, are those of the
architecture page.

Executed are a tick of the autoscaler after which a decision is published, and of the reconcile that follows the files
that read the decision or the replica count made from it: the rest of it is the path of an event.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from typing import Any, cast

import pytest

from penstock_operator.cluster.api import ClusterPort
from penstock_operator.control.cache import ClusterCache
from penstock_operator.endpoint.replica_count import ReplicaTarget
from penstock_operator.facts.names import Json
from penstock_operator.facts.scaling import DesiredScale
from penstock_operator.process import make_autoscaler
from penstock_operator.settings import LoadSettings
from tests.docs.executed import Recorder, _relative, compare, recorder
from tests.operator import objects
from tests.operator.endpoint.kube import SETTINGS, Kube
from tests.operator.scaling.pods import fleet

ADDRESSES = ("127.0.0.2", "127.0.0.3")
READ = {(DesiredScale, "replicas"), (ReplicaTarget, "wanted"), (ReplicaTarget, "written")}


def cache_of(kube: Kube) -> ClusterCache:
    """The objects of an optimised endpoint with two pods."""
    cache, version = ClusterCache(SETTINGS), iter(range(10, 10_000))

    def stored(value: Json) -> Json:
        number, made = str(next(version)), copy.deepcopy(value)
        made["metadata"] = {
            "namespace": "a", "creationTimestamp": "2026-11-21T19:00:00Z", "uid": f"uid-{number}",
            **made["metadata"], "resourceVersion": number,
        }  # fmt: skip
        return made

    for one in kube.classes.values():
        cache.classes.put(stored(one))
    for (kind, _), one in kube.objects.items():
        if kind == "OptimizedModel":
            cache.models.put(stored(one))
        elif kind == "Deployment":
            cache.deployments.put(stored({**one, "metadata": {**one["metadata"], "uid": "uid-emotion"}}))
    cache.endpoints.put(stored(kube.endpoint))
    cache.replica_sets.put(objects.replica_set("emotion"))
    for name, address in zip(("p0", "p1"), ADDRESSES, strict=True):
        cache.pods.put(objects.runtime_pod(name, "emotion", ip=address, node="n", ready=True))
    return cache


def optimised() -> Kube:
    """An endpoint with the pods of its optimised model."""
    kube = Kube()
    kube.reconcile()
    kube.job_succeeds()
    kube.reconcile()
    kube.pods_serve()
    kube.reconcile()
    return kube


async def published(cache: ClusterCache, one: Recorder) -> DesiredScale:
    """The decision of the first tick after the load has risen beyond the capacity; its files are recorded."""
    async with fleet() as pods:
        for address in ADDRESSES:
            await pods.add(address)
        autoscaler = make_autoscaler(cast("ClusterPort", None), cache, LoadSettings(), pod_port=pods.port)
        async with autoscaler:
            now = time.time()
            for tick in range(60):
                pods.share(400 if tick < 5 else 4_000, ADDRESSES)
                before = dict(cache.scales)
                one.files.clear()
                with one.record():
                    await autoscaler.tick(now + 5 * tick)
                if before and cache.scales != before:
                    return next(iter(cache.scales.values()))
    raise AssertionError("no decision changed")


def test_the_page_lists_the_files_that_a_sample_of_metrics_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    kube = optimised()
    with recorder() as one:
        scale = asyncio.run(published(cache_of(kube), one))
    # The pods that are scraped run in the same process here.
    files = {file for file in one.files if not file.startswith("runtime/")}
    kube.scale = scale

    def reading(kind: type) -> Any:
        def read(self: object, name: str) -> object:
            file = _relative(sys._getframe(1).f_code.co_filename)
            if (kind, name) in READ and file is not None:
                files.add(file)
            return object.__getattribute__(self, name)

        return read

    for kind in (DesiredScale, ReplicaTarget):
        monkeypatch.setattr(kind, "__getattribute__", reading(kind), raising=False)
    plan = kube.plan()

    assert any(value["spec"].get("replicas") == scale.replicas for value in plan.apply if value["kind"] == "Deployment")
    compare("sample", files)
