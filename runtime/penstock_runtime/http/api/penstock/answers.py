"""What `/info` shows: model, plan, machine, and the results of the optimisation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.serving.status import ServerPhase


def info(service: ModelService) -> dict[str, Any]:
    """The body of `/info`, without the fields of text-embeddings-inference."""
    status, settings = service.status, service.settings
    manifest, candidate = status.manifest, status.candidate()
    value: dict[str, Any] = {
        "name": status.name,
        "task": status.task.value,
        "phase": status.phase.value,
        "plan": None
        if status.plan is None
        else {**status.plan.model_dump(mode="json"), "summary": status.plan.summary},
        "artefact": None
        if manifest is None
        else {
            "key": manifest.key,
            "digest": status.digest or None,
            "created": manifest.created,
            "model": manifest.model.model_dump(mode="json"),
            "objective": manifest.objective,
            "cpu": manifest.cpu.model_dump(mode="json"),
            "cores": manifest.cores,
            "speed_up": {str(tokens): ratio for tokens, ratio in manifest.speed_up.items()},
            "capacity": manifest.capacity.model_dump(mode="json")["points"],
        },
        "verdict": None
        if candidate is None
        else {
            "outcome": candidate.outcome.value,
            "reason": candidate.reason,
            "metrics": []
            if candidate.verdict is None
            else [metric.model_dump(mode="json") for metric in candidate.verdict.metrics],
        },
        "optimization": None if status.optimization is None else status.optimization.as_json(),
        "limits": {
            "max_body_bytes": settings.limits.max_body_bytes,
            "max_inputs": settings.limits.max_inputs,
            "max_queue_rows": settings.queue.max_queue_rows,
            "max_queue_tokens": settings.queue.max_queue_tokens,
            "deadline_seconds": settings.queue.deadline_seconds,
            **status.limits,
        },
        "access": {"tokens": status.tokens},
        "host": _host(service),
        "predictor": None
        if service.predictor is None
        else {name: fact for name, fact in service.predictor.facts().items() if name not in {"task", "plan"}},
    }
    if status.capacity is not None:
        value["capacity"] = status.capacity.as_json()
    shadow = service.metrics.live_guard()
    if shadow is not None:
        value["live_guard"] = shadow.as_json()
    if status.optimization_error:
        value["optimization_error"] = status.optimization_error
    if status.phase is ServerPhase.LOADING:
        value["message"] = status.message
    return value


def _host(service: ModelService) -> dict[str, Any] | None:
    host, grant = service.status.host, service.status.grant
    if host is None:
        return None
    return {
        "cpu": host.cpu.model_dump(mode="json"),
        "cores_found": host.usable,
        "cpus_allowed": list(host.allowed),
        "affinity": list(host.affinity),
        "cpuset": None if host.cpuset is None else list(host.cpuset),
        "threads_per_core": max((len(core.cpus) for core in host.cores), default=1),
        "quota": host.quota,
        "memory": asdict(host.memory),
        "cores": None
        if grant is None
        else {
            "granted": grant.cores,
            "cpus": list(grant.cpus),
            "siblings": list(grant.siblings),
            "numa_nodes": list(grant.nodes),
            "pinned": grant.pinned,
            "findings": list(grant.findings),
        },
    }
