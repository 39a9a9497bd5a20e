"""OptimizedModels that come back from a backup while the operator runs: kubectl creates all, and then writes the status
of each (docs/how-to/back-up-and-restore.md)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock_operator.control import unused_models
from penstock_operator.endpoint.optimization import unused
from testbed.cluster import Cluster
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl
from tests.operator import kubelet
from tests.operator.running import become_true, running

ENDPOINT = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "ModelEndpoint",
    "metadata": {"name": "emotion"},
    "spec": {"model": "hf://org/emotion@main", "task": "text-classification", "scaling": {"mode": "None"}},
}


def backup(kubectl: Kubectl) -> dict[str, Any]:
    """The one OptimizedModel, as the page writes it to a file."""
    (found,) = kubectl.items("optimizedmodels")
    metadata = {key: found["metadata"][key] for key in ("name", "namespace", "labels")}
    return {**found, "metadata": metadata}


@pytest.mark.slow
def test_a_restored_model_is_kept_until_its_status_comes_and_an_endpoint_that_was_too_early_gives_up_its_job(
    nodeless: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_crds(nodeless)
    kind = {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}}
    nodeless.kubectl.apply(kind)
    # The time after which an OptimizedModel without users is deleted.
    for module in (unused, unused_models):
        monkeypatch.setattr(module, "NEW_SECONDS", 0.0)

    async def scenario(kubectl: Kubectl) -> None:
        async with running(nodeless.kubeconfig, kubectl.namespace) as operator:
            await asyncio.to_thread(kubectl.apply, ENDPOINT)
            await asyncio.to_thread(kubelet.succeed, kubectl, await asyncio.to_thread(kubelet.pod_of_job, kubectl))
            assert await operator.rest()
            await asyncio.to_thread(kubectl, "delete", "modelendpoint", "emotion")
            assert await operator.rest()
            saved = backup(kubectl)
            assert saved["status"]["phase"] == "Ready"
            saved["status"]["lastUsed"] = "2026-01-01T00:00:00Z"  # it was unused when the backup was made
            await asyncio.to_thread(kubectl, "delete", "optimizedmodels", "--all")
            await become_true(lambda: not kubectl.items("optimizedmodels,jobs,deployments"))

            await asyncio.to_thread(kubectl, "create", "--filename", "-", text=json.dumps(saved))
            assert await operator.rest()
            (created,) = kubectl.items("optimizedmodels")
            assert "status" not in created

            await asyncio.to_thread(kubectl.apply, ENDPOINT)
            assert await operator.rest()
            assert len(kubectl.items("jobs")) == 1
            status = ("replace", "--subresource", "status", "--filename", "-")
            await asyncio.to_thread(kubectl, *status, text=json.dumps(saved))
            assert await operator.rest()
            await become_true(lambda: not kubectl.items("jobs"))
            (restored,) = kubectl.items("optimizedmodels")
            assert restored["metadata"]["uid"] == created["metadata"]["uid"]
            assert "ownerReferences" not in restored["metadata"]
            assert restored["status"]["artefact"] == saved["status"]["artefact"]
            (deployment,) = kubectl.items("deployments")
            annotations = deployment["spec"]["template"]["metadata"]["annotations"]
            assert annotations["penstock.dev/artefact"] == saved["status"]["artefact"]["digest"]

            # It has no owner whose end would delete it at once, and its grace time begins now.
            await asyncio.to_thread(kubectl, "delete", "modelendpoint", "emotion")
            await become_true(lambda: not kubectl.items("deployments"))
            assert await operator.rest()
            (unused,) = kubectl.items("optimizedmodels")
            assert unused["metadata"]["uid"] == created["metadata"]["uid"]
            assert unused["status"]["lastUsed"] > created["metadata"]["creationTimestamp"]

    with nodeless.temporary_namespace("restore") as namespace:
        asyncio.run(scenario(nodeless.kubectl.within(namespace)))
