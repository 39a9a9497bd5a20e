"""The life of endpoints, from `kubectl apply` to `kubectl delete`, on an installation that helm made."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from testbed.kubectl import Kubectl
from tests.endtoend_cluster.installation import WITH_CAPACITY, Endpoint, Installation, Json, cpus
from tests.endtoend_cluster.load import constant_load, predict, until_answered

pytestmark = pytest.mark.slow

New = Callable[[str], Endpoint]

CHILDREN = "pods,deployments,replicasets,services,endpointslices,poddisruptionbudgets,networkpolicies"


def children(kubectl: Kubectl, name: str) -> list[str]:
    """The objects of an endpoint, as `kind/name`."""
    return [
        f"{one['kind']}/{one['metadata']['name']}" for one in kubectl.items(CHILDREN, f"penstock.dev/endpoint={name}")
    ]


def until_gone(kubectl: Kubectl, name: str, *, seconds: float = 300) -> None:
    """Wait until all objects of an endpoint are deleted; returns the seconds, and the time at which its pods ended."""
    began = time.monotonic()
    while left := children(kubectl, name):
        assert time.monotonic() - began < seconds, f"{left} are still there after {seconds:g} s"
        time.sleep(0.1)
    print(f"nothing was left of {name} after {time.monotonic() - began:.1f} s")


def test_an_applied_endpoint_answers_is_optimised_and_owns_its_cores(endpoint: New) -> None:
    first = endpoint("first")
    first.apply()

    # The fp32 graph answers during the search.
    body = first.until(lambda body: first.condition("Available", body).get("status") == "True", "available")
    address = first.address()
    answer = until_answered(address, seconds=300)
    assert answer.status == 200
    assert len(answer.vector) == 384
    assert float(answer.headers["x-compute-time"]) > 0

    body = first.until_optimised()
    assert body["status"]["plan"]["summary"]
    assert body["status"]["plan"]["optimizedModel"] == body["status"]["optimizedModel"]
    assert first.condition("CoresPinned", body)["status"] == "True"
    assert predict(address).status == 200
    check_pinned(first, body)


def check_pinned(one: Endpoint, body: Json) -> None:
    """What the pods report equals the kernel's state of their processes: one core, not shared."""
    (pod,) = one.pods()
    (report,) = [entry for entry in body["status"]["pods"] if entry["name"] == pod["metadata"]["name"]]

    assert pod["status"]["qosClass"] == "Guaranteed"
    assert len(cpus(pod)) == 1
    assert report["pinned"] is True
    assert {int(report["cpus"])} == cpus(pod)


def test_two_endpoints_share_a_result_and_never_a_core(endpoint: New, shared_kubectl: Kubectl) -> None:
    first, second = endpoint("first"), endpoint("second")
    first.apply()
    result = first.until_optimised()["status"]["optimizedModel"]
    results = len(shared_kubectl.items("optimizedmodels"))

    began = time.monotonic()
    second.apply()
    second.until(lambda body: bool(body.get("status", {}).get("url")), "known")
    # Of two cores one may still be busy with what `prepare_capacity` asked for.
    until_answered(second.address(), seconds=600)
    print(f"apply to first answer with a cached artefact: {time.monotonic() - began:.1f} s")

    assert second.until_optimised()["status"]["optimizedModel"] == result
    assert len(shared_kubectl.items("optimizedmodels")) == results
    (mine,), (its,) = first.pods(), second.pods()
    assert cpus(mine)
    assert cpus(its)
    assert not cpus(mine) & cpus(its)


def test_a_spec_that_is_edited_under_load_costs_no_request(endpoint: New) -> None:
    edited = endpoint("edited")
    edited.apply()
    before = edited.until_optimised()["status"]["plan"]

    with constant_load(edited.address()) as load:
        load.more(40)
        # Another objective: another result, and it takes over.
        edited.apply(**WITH_CAPACITY)
        after = edited.until_optimised(other_than=before["digest"])["status"]["plan"]
        edited.kubectl("rollout", "status", f"deployment/{edited.name}", "--timeout=300s", timeout_seconds=330)
        load.more(10)

    assert load.failures == []
    assert after["optimizedModel"] != before["optimizedModel"]


def test_a_deleted_endpoint_leaves_nothing_behind(endpoint: New, shared_kubectl: Kubectl) -> None:
    doomed = endpoint("doomed")
    doomed.apply()
    doomed.until(lambda body: doomed.condition("Available", body).get("status") == "True", "available")
    assert children(shared_kubectl, "doomed")

    shared_kubectl("delete", "modelendpoint", "doomed", "--timeout=60s")

    until_gone(shared_kubectl, "doomed")


def test_without_an_operator_endpoints_still_answer_and_can_be_deleted(
    endpoint: New, installation: Installation, shared_kubectl: Kubectl
) -> None:
    orphan = endpoint("orphan")
    orphan.apply()
    orphan.until(lambda body: orphan.condition("Available", body).get("status") == "True", "available")
    address = orphan.address()

    installation.operators(0)
    try:
        assert until_answered(address, seconds=300).status == 200
        shared_kubectl("delete", "modelendpoint", "orphan", "--timeout=60s")
        until_gone(shared_kubectl, "orphan")
    finally:
        installation.operators(2)
