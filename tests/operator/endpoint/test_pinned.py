"""Pinned artefacts: only those of the endpoint's namespace are served, and what serves already is not changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.resources.optimized_model import RESULT_FORMAT
from penstock_operator.endpoint.pods.template import in_bytes
from penstock_operator.endpoint.snapshot import ReconcilePlan
from penstock_operator.facts import names
from penstock_operator.facts.names import Ref
from penstock_operator.facts.tenants import AllowList
from penstock_operator.facts.workloads import ModelUser
from tests.operator.endpoint.kube import BASELINE, RESULT, SETTINGS, Kube, digest, result

FOREIGN = digest("e")
"""An artefact in the store that no OptimizedModel of this namespace has."""
SHARED = replace(SETTINGS, allowed=AllowList(shared_artefacts=True))


def pins(artefact: str) -> dict[str, str]:
    return {"mode": "Pinned", "artefact": artefact}


def condition(made: ReconcilePlan, kind: str) -> dict[str, Any]:
    (found,) = [entry for entry in made.status["conditions"] if entry["type"] == kind]
    return dict(found)


def test_an_artefact_of_another_namespace_is_refused_with_a_remedy_and_nothing_is_created() -> None:
    kube = Kube(optimization=pins(FOREIGN))
    made = kube.reconcile()

    accepted = condition(made, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "ArtefactNotAllowed")
    assert "No OptimizedModel of the namespace a has the artefact eeeeeeeeeeee" in accepted["message"]
    assert "mode: Auto" in accepted["message"]
    assert "policy.sharedArtefacts" in accepted["message"]
    assert condition(made, "Ready")["reason"] == "ArtefactNotAllowed"
    assert kube.objects == {}
    assert "plan" not in made.status
    assert not made.status.get("optimizedModel")


@pytest.mark.parametrize("status", [{}, {"phase": "Ready", "artefact": None}, {"job": FOREIGN, "progress": FOREIGN}])
def test_only_the_artefacts_in_the_status_of_an_optimized_model_count(status: dict[str, Any]) -> None:
    kube = Kube(optimization=pins(FOREIGN))
    kube.publish("earlier", RESULT)
    kube.objects["OptimizedModel", "earlier"] |= {"status": status}
    kube.objects["OptimizedModel", "earlier"]["metadata"]["annotations"] = {names.ARTEFACT: FOREIGN}

    assert condition(kube.reconcile(), "Accepted")["reason"] == "ArtefactNotAllowed"
    assert ("Deployment", kube.name) not in kube.objects


@pytest.mark.parametrize("artefact", [RESULT, BASELINE])
def test_an_artefact_of_an_optimized_model_that_no_endpoint_uses_is_served_and_the_model_is_kept(artefact: str) -> None:
    kube = Kube(optimization=pins(artefact))
    kube.publish("earlier", RESULT, baseline=BASELINE)
    made = kube.reconcile()

    assert condition(made, "Accepted")["status"] == "True"
    assert kube.artefact == artefact
    assert made.status["optimizedModel"] == "earlier"
    assert kube.observed().optimized_models[0].users == (ModelUser(kube.name, "uid-endpoint"),)
    assert not [kind for kind, _ in kube.objects if kind == "Job"]
    kube.pods_serve()
    assert condition(kube.reconcile(), "Ready")["status"] == "True"


def test_a_refused_pin_does_not_change_what_serves() -> None:
    kube = Kube().optimised()
    before = kube.template_hash
    kube.edit(optimization=pins(FOREIGN), replicas=3)
    made = kube.reconcile()

    assert condition(made, "Accepted")["reason"] == "ArtefactNotAllowed"
    assert condition(made, "Available")["status"] == "True"
    assert (kube.artefact, kube.template_hash) == (RESULT, before)
    assert made.status["plan"]["digest"] == RESULT
    assert kube.deployment["spec"]["replicas"] == 1


def test_pods_go_on_serving_after_the_optimized_model_of_their_pinned_artefact_was_deleted() -> None:
    kube = Kube(optimization=pins(RESULT))
    kube.publish("earlier", RESULT)
    kube.reconcile()
    kube.pods_serve()
    kube.reconcile()
    before = kube.template_hash
    del kube.objects["OptimizedModel", "earlier"]
    made = kube.reconcile()

    assert condition(made, "Accepted")["reason"] == "ArtefactNotAllowed"
    assert condition(made, "Available")["status"] == "True"
    assert (kube.artefact, kube.template_hash) == (RESULT, before)


def test_the_administrator_may_allow_every_artefact_of_the_store() -> None:
    kube = Kube(optimization=pins(FOREIGN), settings=SHARED)
    made = kube.reconcile()

    assert condition(made, "Accepted")["status"] == "True"
    assert kube.artefact == FOREIGN
    assert not made.status.get("optimizedModel")


def test_pinning_what_serves_keeps_its_optimized_model() -> None:
    kube = Kube().optimised()
    model = kube.endpoint["status"]["optimizedModel"]
    kube.edit(optimization=pins(RESULT))

    assert kube.reconcile().status["optimizedModel"] == model


def test_another_optimized_model_with_the_pinned_artefact_replaces_no_pod() -> None:
    kube = Kube(optimization=pins(RESULT))
    kube.publish("model-b", RESULT)
    kube.reconcile()
    before = kube.template_hash
    kube.publish("model-a", RESULT)
    made = kube.reconcile()

    assert kube.template_hash == before
    assert made.status["optimizedModel"] == "model-b"


@pytest.mark.parametrize("shared", [False, True])
def test_pinning_the_fp32_graph_of_a_running_search_ends_its_job_unless_another_endpoint_waits_for_it(
    shared: bool,
) -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_runs(baseline=True)
    kube.reconcile()
    kube.pods_serve()
    kube.reconcile()
    job, model = kube.job, kube.endpoint["status"]["optimizedModel"]
    if shared:
        kube.other_users[model] = [ModelUser("other", "uid-other")]
    kube.edit(optimization=pins(BASELINE))
    kube.reconcile()

    assert kube.artefact == BASELINE
    assert (Ref("Job", job) in kube.deleted) is not shared


def test_an_artefact_of_a_later_format_is_refused_and_what_serves_stays() -> None:
    kube = Kube().optimised()
    before = kube.template_hash
    kube.publish("later", FOREIGN)
    kube.objects["OptimizedModel", "later"]["spec"]["toolchain"]["format"] = RESULT_FORMAT + 1
    kube.edit(optimization=pins(FOREIGN))
    made = kube.reconcile()

    accepted = condition(made, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "ArtefactNotForVersion")
    assert "A later version of Penstock made the artefact eeeeeeeeeeee" in accepted["message"]
    assert "mode: Auto" in accepted["message"]
    assert (kube.artefact, kube.template_hash) == (RESULT, before)
    # The same artefact by a release whose format this one reads.
    kube.publish("present", FOREIGN)
    assert condition(kube.reconcile(), "Accepted")["status"] == "True"
    assert kube.artefact == FOREIGN


def test_pinning_what_serves_replaces_no_pod() -> None:
    """Its memory was measured by its optimisation."""
    kube = Kube().optimised()
    before = kube.template_hash
    kube.edit(optimization=pins(RESULT))
    kube.reconcile()

    assert kube.template_hash == before


@pytest.mark.parametrize(("artefact", "size"), [(RESULT, 20_000_000_000), (BASELINE, 30_000_000_000)])
def test_pods_of_a_pinned_artefact_have_the_memory_that_it_needs(artefact: str, size: int) -> None:
    kube = Kube(optimization=pins(artefact))
    kube.publish("earlier", RESULT, baseline=BASELINE)
    status = kube.objects["OptimizedModel", "earlier"]["status"]
    status["result"] = result(residentBytes=20_000_000_000).to_object()
    status["baseline"]["bytes"] = 30_000_000_000
    kube.reconcile()
    resources = kube.deployment["spec"]["template"]["spec"]["containers"][0]["resources"]

    assert in_bytes(resources["limits"]["memory"]) > size
