"""The health of endpoints for Argo CD and Flux, for statuses that the operator writes, in real interpreters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import celpy
import pytest
import yaml
from celpy.adapter import json_to_cel
from lupa import lua51

from tests.operator.endpoint.kube import Kube, container
from tests.operator.endpoint.objects.test_canary import CanaryKube

GITOPS = Path(__file__).parents[3] / "examples/gitops"
ARGO: dict[str, str] = yaml.safe_load((GITOPS / "argocd-health.yaml").read_text())["data"]
(FLUX,) = yaml.safe_load((GITOPS / "flux-kustomization.yaml").read_text())["spec"]["healthCheckExprs"]
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def recursion_limit() -> Iterator[None]:
    """celpy raises it for the process."""
    before = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(before)


def argo(value: Json, kind: str = "ModelEndpoint") -> tuple[str, str]:
    """Health and message by Argo CD's script. Argo CD runs Lua 5.1 with few libraries: the script gets ipairs alone."""
    lua = lua51.LuaRuntime(unpack_returned_tuples=False)
    script = ARGO[f"resource.customizations.health.penstock.dev_{kind}"]
    run: Any = lua.eval("function(text, obj) return setfenv(loadstring(text), {obj = obj, ipairs = ipairs})() end")
    found = run(script, lua.table_from(value, recursive=True))
    return found["status"], found["message"]


def flux(value: Json) -> str:
    """The status by Flux's expressions, of which one at most may be true."""
    environment = celpy.Environment()
    facts = {name: json_to_cel(value.get(name, {})) for name in ("metadata", "spec", "status")}
    found = [
        name
        for name in ("inProgress", "failed", "current")
        if environment.program(environment.compile(FLUX[name])).evaluate(facts)
    ]
    assert len(found) == 1, found
    return found[0]


def seen(kube: Kube) -> Json:
    """The endpoint as the API server has it after a reconcile."""
    status = {**kube.reconcile().status, "observedGeneration": kube.endpoint["metadata"]["generation"]}
    return {**kube.endpoint, "status": status}


def new() -> Kube:
    return Kube()


def optimising() -> Kube:
    kube = Kube()
    kube.reconcile()
    kube.job_runs(7, 23, baseline=True)
    return kube


def waiting_to_retry() -> Kube:
    kube = Kube()
    kube.reconcile()
    kube.job_fails("ModelUnavailable", retryable=True)
    return kube


def failed() -> Kube:
    kube = Kube()
    kube.reconcile()
    kube.job_fails("ModelNotFound", retryable=False)
    return kube


def starting() -> Kube:
    kube = Kube()
    kube.reconcile()
    kube.job_succeeds()
    return kube


def serving() -> Kube:
    return Kube().optimised()


def rolling_out() -> Kube:
    kube = Kube().optimised()
    kube.edit(pod={"memory": "3Gi"})
    kube.reconcile()
    kube.deployment_status(updated=0, available=1, replicas=1, reason="ReplicaSetUpdated")
    return kube


def canary() -> Kube:
    kube = CanaryKube()
    kube.new_plan()
    return kube


def suspended() -> Kube:
    kube = Kube().optimised()
    kube.edit(suspend=True)
    kube.reconcile()
    kube.pods.clear()
    kube.deployment_status(updated=0, available=0, replicas=0)
    return kube


def without_a_class() -> Kube:
    return Kube(hardwareClass="nothing")


def without_an_image() -> Kube:
    kube = starting()
    kube.reconcile()
    kube.pod_of("p", containerStatuses=[container(waiting=("ImagePullBackOff", "no such image"))])
    return kube


def not_pinned() -> Kube:
    kube = Kube().optimised()
    kube.pods_serve(pinned=False)
    return kube


CASES: dict[str, tuple[Callable[[], Kube], str, str, str]] = {
    "new": (new, "OptimizationPending", "Progressing", "inProgress"),
    "being optimised": (optimising, "Optimizing", "Progressing", "inProgress"),
    "waiting to retry": (waiting_to_retry, "WaitingToRetry", "Progressing", "inProgress"),
    "failed": (failed, "ModelNotFound", "Degraded", "failed"),
    "starting": (starting, "Starting", "Progressing", "inProgress"),
    "serving": (serving, "Serving", "Healthy", "current"),
    "rolling out": (rolling_out, "RollingOut", "Progressing", "inProgress"),
    "canary": (canary, "CanaryRunning", "Progressing", "inProgress"),
    "suspended": (suspended, "Suspended", "Suspended", "current"),
    "no such class": (without_a_class, "HardwareClassNotFound", "Degraded", "failed"),
    "no image": (without_an_image, "ImagePullFailed", "Degraded", "failed"),
    "not pinned": (not_pinned, "NotWholeCores", "Degraded", "failed"),
}


@pytest.mark.parametrize(("make", "reason", "health", "status"), CASES.values(), ids=CASES.keys())
def test_the_health_is_that_of_the_operators_status(
    make: Callable[[], Kube], reason: str, health: str, status: str
) -> None:
    value = seen(make())
    (ready,) = [one for one in value["status"]["conditions"] if one["type"] == "Ready"]

    assert ready["reason"] == reason
    assert argo(value) == (health, f"{reason}: {ready['message']}")
    assert flux(value) == status


def test_an_endpoint_whose_change_the_operator_has_not_seen_is_in_progress() -> None:
    value = seen(serving())
    value["metadata"]["generation"] += 1

    assert argo(value) == ("Progressing", "the operator has not seen this version yet")
    assert flux(value) == "inProgress"
    for status in ({}, {"observedGeneration": value["metadata"]["generation"]}):
        without = {**value, "status": status}
        assert argo(without)[0] == "Progressing"
        assert flux(without) == "inProgress"
    assert argo({name: part for name, part in value.items() if name != "status"})[0] == "Progressing"


@pytest.mark.parametrize(
    ("make", "health"),
    [(optimising, "Progressing"), (waiting_to_retry, "Progressing"), (failed, "Degraded"), (serving, "Healthy")],
)
def test_an_optimized_model_has_a_health_too(make: Callable[[], Kube], health: str) -> None:
    kube = make()
    kube.reconcile()
    (value,) = [one for (kind, _), one in kube.objects.items() if kind == "OptimizedModel"]

    assert argo(value, "OptimizedModel")[0] == health
    assert argo({**value, "status": {}}, "OptimizedModel")[0] == "Progressing"


def test_both_tools_have_the_same_reasons() -> None:
    script = ARGO["resource.customizations.health.penstock.dev_ModelEndpoint"]
    progressing, suspended = (
        {part.split("=")[0].strip() for part in script.partition(f"local {name} = {{")[2].partition("}")[0].split(",")}
        - {""}
        for name in ("progressing", "suspended")
    )

    def reasons(expression: str) -> set[str]:
        return set(
            expression.partition("c.reason in [")[2].partition("]")[0].replace("'", "").replace(" ", "").split(",")
        )

    assert reasons(FLUX["inProgress"]) == progressing
    assert reasons(FLUX["failed"]) == progressing | suspended
    assert reasons(FLUX["current"]) == suspended
