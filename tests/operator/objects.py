"""Objects as the API server returns them, with the fields that these tests need."""

from __future__ import annotations

from typing import Any

from penstock_operator.plan import names

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
    return _pod(name, version, names.runtime_labels(of), ip=ip, node=node, ready=ready)


def job_pod(name: str, of: str, attempt: int = 1, version: int = 1, *, phase: str = "Running") -> Json:
    value = _pod(name, version, names.job_labels(of, attempt), phase=phase)
    value["metadata"]["ownerReferences"] = [{"name": f"{of}-{attempt}", "controller": True}]
    return value


def job(of: str, attempt: int = 1, version: int = 1) -> Json:
    labels = names.job_labels(of, attempt)
    return {"metadata": metadata(f"{of}-{attempt}", version, labels, generation=1), "spec": {}, "status": {}}


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
