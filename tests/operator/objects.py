"""Objects as the API server returns them, with the fields that these tests need."""

from __future__ import annotations

from typing import Any

from penstock_operator.endpoint.optimization.job import job_labels
from penstock_operator.facts import names

Json = dict[str, Any]


def metadata(name: str, version: int, labels: dict[str, str] | None = None, **more: Any) -> Json:
    return {
        "name": name,
        "namespace": "a",
        "resourceVersion": str(version),
        "uid": f"uid-{name}",
        "creationTimestamp": "2026-11-21T19:00:00Z",
        "labels": labels or {},
        **more,
    }


def endpoint(name: str, version: int = 1, *, status: Json | None = None, **spec: Any) -> Json:
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ModelEndpoint",
        "metadata": metadata(name, version, generation=1),
        "spec": {"model": "hf://org/model@main", "task": "text-classification", **spec},
        "status": status or {},
    }


def optimized_model(name: str, version: int = 1, *, status: Json | None = None) -> Json:
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "OptimizedModel",
        "metadata": metadata(name, version, generation=1),
        "spec": {},
        "status": status or {},
    }


def runtime_pod(name: str, of: str, version: int = 1, *, ip: str = "", node: str = "", ready: bool = False) -> Json:
    value = _pod(name, version, names.runtime_labels(of), ip=ip, node=node, ready=ready)
    value["metadata"]["ownerReferences"] = controller(f"{of}-1")
    return value


def controller(name: str) -> list[Json]:
    """The owner references of an object that this one created."""
    return [{"name": name, "uid": f"uid-{name}", "controller": True}]


def deployment(name: str, *, of: str = "", version: int = 3, replicas: int = 1) -> Json:
    """The Deployment of an endpoint; `of`: of its gateway, with this name."""
    labels = names.gateway_labels(of) if of else names.runtime_labels(name)
    return {
        "metadata": metadata(name, version, labels, generation=1, ownerReferences=controller(of or name)),
        "spec": {"replicas": replicas, "template": {}},
        "status": {"observedGeneration": 1, "replicas": replicas, "updatedReplicas": replicas},
    }


def replica_set(deployment: str, version: int = 3) -> Json:
    """The first ReplicaSet of a Deployment."""
    references = controller(deployment)
    return {"metadata": metadata(f"{deployment}-1", version, ownerReferences=references), "spec": {"replicas": 1}}


def job_pod(
    name: str, of: str, attempt: int = 1, version: int = 1, *, phase: str = "Running", ip: str = "10.0.0.9"
) -> Json:
    value = _pod(name, version, job_labels(of, attempt), phase=phase, ip=ip)
    value["metadata"]["ownerReferences"] = controller(f"{of}-{attempt}")
    return value


def job(of: str, attempt: int = 1, version: int = 1) -> Json:
    labels = job_labels(of, attempt)
    return {
        "metadata": metadata(f"{of}-{attempt}", version, labels, generation=1, ownerReferences=controller(of)),
        "spec": {"template": {"spec": {"containers": [{"name": names.CONTAINER}]}}},
        "status": {},
    }


def _pod(
    name: str,
    version: int,
    labels: dict[str, str],
    *,
    ip: str = "10.0.0.9",
    node: str = "n",
    phase: str = "Running",
    ready: bool = False,
) -> Json:
    return {
        "metadata": metadata(name, version, labels),
        "spec": {"nodeName": node} if node else {},
        "status": {
            "phase": phase if ip else "Pending",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": names.CONTAINER, "restartCount": 0, "ready": ready}],
        },
    }
