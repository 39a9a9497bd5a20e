"""The part of a kubelet that these tests need: a job's pod runs, and ends with a termination message."""

from __future__ import annotations

import json
import time
from typing import Any

from penstock.resources.job_summary import Summary
from penstock.resources.result import ArtefactReference
from penstock_operator.facts.names import CONTAINER
from testbed.kubectl import Kubectl

DIGEST = "sha256:" + "ab" * 32


def artefact(namespace: str = "a") -> ArtefactReference:
    """As a job of this namespace publishes it, with the default settings of the operator."""
    uri = f"file:///var/lib/penstock/artefacts/namespaces/{namespace}/{'ab' * 32}"
    return ArtefactReference(digest=DIGEST, uri=uri, bytes=90_000_000)


RESULT: dict[str, Any] = {
    "plan": {
        "summary": "onnxruntime-int8, 1x1 threads",
        "engine": "onnxruntime",
        "precision": "int8-dynamic",
        "streams": 1,
        "threadsPerStream": 1,
        "batching": "single",
    },
    "accuracy": {"withinBudget": True},
    "speedUp": 3.1,
    "cpu": {"vendor": "GenuineIntel", "family": 6, "model": 106, "stepping": 6, "modelName": "x", "isa": "avx512-vnni"},
    "cores": 1,
}


def pod_of_job(kubectl: Kubectl, *, within: float = 240.0) -> str:
    """The name of the one job's pod, once the Job controller has made it."""
    deadline = time.monotonic() + within
    while True:
        pods = kubectl.items("pods", "app.kubernetes.io/name=penstock-optimizer")
        if pods:
            return str(pods[0]["metadata"]["name"])
        assert time.monotonic() < deadline, "the job has no pod"
        time.sleep(0.05)


def run(kubectl: Kubectl, pod: str) -> None:
    """The pod's container runs."""
    state = {"running": {"startedAt": "2026-11-21T19:00:00Z"}}
    container = {"name": CONTAINER, "image": "x", "imageID": "x", "ready": True, "restartCount": 0, "state": state}
    status = {"phase": "Running", "podIP": "192.0.2.1", "containerStatuses": [container]}
    kubectl("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))


def finish(kubectl: Kubectl, pod: str, message: str, *, code: int = 0) -> None:
    """The pod's container has ended."""
    phase = "Succeeded" if code == 0 else "Failed"
    ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "message": message}
    status = {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "False", "reason": "PodCompleted"}],
        "containerStatuses": [
            {
                "name": CONTAINER,
                "image": "x",
                "imageID": "x",
                "ready": False,
                "restartCount": 0,
                "state": {"terminated": ended},
            }
        ],
    }
    kubectl("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))


def succeed(kubectl: Kubectl, pod: str) -> None:
    """The optimisation has found something."""
    published = artefact(kubectl.namespace).to_object()
    summary = Summary.model_validate({"succeeded": True, "artefact": published, "result": RESULT})
    finish(kubectl, pod, summary.to_message())
