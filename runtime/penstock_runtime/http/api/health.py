"""Routes for operation: liveness, readiness, metrics, information."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock import __version__
from penstock.resources.core import ModelSource
from penstock.tasks import TaskName
from penstock_runtime.errors import NotReady
from penstock_runtime.http.api.bodies import json_response
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.serving.status import ServerPhase

PLAIN = b"text/plain; charset=utf-8"


class HealthRoutes:
    """The handlers."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    def alive(self, _: Request) -> Response:
        """`/healthz`: the process is alive, also while it loads or drains: a restart would not help."""
        return Response(b"ok\n", content_type=PLAIN)

    def ready(self, _: Request) -> Response:
        """`/readyz`: 200 when requests are accepted, else NotReady with the reason."""
        self.require_ready()
        return Response(b"ready\n", content_type=PLAIN)

    def require_ready(self) -> None:
        """NotReady unless new requests are accepted."""
        status = self._service.status
        if status.phase is ServerPhase.DRAINING:
            raise NotReady(status.failure or "the server is draining", remedy="Ask another replica")
        if not self._service.ready:
            raise NotReady(status.message)
        if status.tokens == 0:
            raise NotReady(
                "no bearer token is known, so every request would be refused",
                remedy="Put one into the folder of --auth-token-folder, or into the Secret that is mounted there",
            )

    def metrics(self, request: Request) -> Response:
        """`/metrics`: the text format, or OpenMetrics if requested."""
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        text, content_type = self._service.metrics.exposition(accept)
        return Response(text, content_type=content_type)

    def info(self, _: Request) -> Response:
        """`/info`: model, plan, machine, and the results of the optimisation."""
        return json_response(info(self._service))

    def tei_info(self, _: Request) -> Response:
        """`/info` of the port for requests, if there is an internal port: what clients of text-embeddings-inference
        read."""
        return json_response(tei_info(self._service))


_TEI_POOLINGS = {"last": "last-token"}
"""Names of text-embeddings-inference for poolings that have another name here."""


def tei_info(service: ModelService) -> dict[str, Any]:
    """The fields of `/info` of text-embeddings-inference; those that do not apply here are null."""
    status, settings = service.status, service.settings
    model_id, revision = status.name, None
    if status.manifest is not None and status.manifest.model.source.startswith("hf://"):
        source = ModelSource.parse(status.manifest.model.source)
        model_id, revision = source.repository, source.revision
    labels = {
        "id2label": {str(index): label for index, label in enumerate(status.labels)},
        "label2id": {label: index for index, label in enumerate(status.labels)},
    }
    kinds: dict[TaskName, dict[str, Any]] = {
        TaskName.FEATURE_EXTRACTION: {"embedding": {"pooling": _TEI_POOLINGS.get(status.pooling, status.pooling)}},
        TaskName.SENTENCE_SIMILARITY: {"embedding": {"pooling": _TEI_POOLINGS.get(status.pooling, status.pooling)}},
        TaskName.TEXT_RANKING: {"reranker": labels},
        TaskName.TEXT_CLASSIFICATION: {"classifier": labels},
    }
    return {
        "model_id": model_id,
        "model_sha": revision,
        "model_dtype": None if status.plan is None else status.plan.recipe.precision.value,
        "model_type": kinds.get(status.task, {}),
        "max_concurrent_requests": settings.queue.max_queue_rows,
        "max_input_length": status.limits.get("max_input_tokens"),
        "max_batch_tokens": settings.queue.max_queue_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.limits.max_inputs,
        "auto_truncate": status.truncate,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def info(service: ModelService) -> dict[str, Any]:
    """The body of `/info`: that of text-embeddings-inference, and much more."""
    status, settings = service.status, service.settings
    manifest, candidate = status.manifest, status.candidate()
    value: dict[str, Any] = {
        **tei_info(service),
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
