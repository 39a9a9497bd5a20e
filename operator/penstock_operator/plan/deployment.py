"""The Deployment of the runtime: pods that own their cores, replaced without losing a request."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from penstock.resources.hardware_class import HardwareClassSpec
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.memory import runtime_memory
from penstock_operator.plan.names import (
    ARTEFACT,
    HTTP_PORT,
    OPTIMIZED_MODEL,
    TEMPLATE_HASH,
    runtime_labels,
    runtime_selector,
)
from penstock_operator.plan.pod_template import TMP, environment, pod_spec, resources, scratch
from penstock_operator.plan.replicas import Replicas
from penstock_operator.plan.serving import Serving
from penstock_operator.plan.settings import Json, PlanSettings
from penstock_operator.plan.store import store_access

CACHE = "/var/lib/penstock/cache"
"""Where the artefact is fetched to: a volume of the pod, gone with it."""
MIN_READY_SECONDS = 2
"""A new pod that dies at once must not end an old one."""
PROGRESS_DEADLINE_SECONDS = 900
"""A rollout that gets nowhere for this long is said to be stuck: image, artefact and warm-up fit into it."""
FINISH_SECONDS = 35
"""After the last accepted request: a little over the 30 s that one may take (PENSTOCK_DEADLINE_SECONDS)."""
MARGIN_SECONDS = 5
"""Between the process's own limit and the kubelet's SIGKILL."""


@dataclass(frozen=True)
class Drain:
    """How a pod ends, in seconds from SIGTERM. delay < limit < grace."""

    delay: int
    """Goes on accepting while the Service forgets it."""
    limit: int
    """Its own last moment."""
    grace: int
    """The kubelet's."""

    @classmethod
    def of(cls, drain_seconds: int) -> Drain:
        """For `spec.rollout.drainSeconds`."""
        limit = drain_seconds + FINISH_SECONDS
        return cls(drain_seconds, limit, limit + MARGIN_SECONDS)


def deployment(
    endpoint: Endpoint, serving: Serving, hardware: HardwareClassSpec, replicas: Replicas, settings: PlanSettings
) -> Json:
    """The desired Deployment. SpecError when the class's devices are not whole."""
    spec: Json = {
        "selector": {"matchLabels": runtime_selector(endpoint.name)},
        "revisionHistoryLimit": 3,
        "minReadySeconds": MIN_READY_SECONDS,
        "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": endpoint.spec.rollout.max_surge, "maxUnavailable": 0},
        },
        "template": template(endpoint, serving, hardware, settings),
    }
    if replicas.written:
        spec["replicas"] = replicas.wanted
    return endpoint.owned("apps/v1", "Deployment", spec)


def template(endpoint: Endpoint, serving: Serving, hardware: HardwareClassSpec, settings: PlanSettings) -> Json:
    """The pod template. What the optimisation depended on comes from `serving`, which may be older than the spec."""
    pod = endpoint.spec.pod
    labels = {**pod.labels, **runtime_labels(endpoint.name)}
    if serving.optimized_model:
        labels[OPTIMIZED_MODEL] = serving.optimized_model
    store = store_access(settings, writes=False)
    cache_volume, cache_mount = scratch("cache", CACHE)
    tmp_volume, tmp_mount = scratch("tmp", TMP)
    memory = runtime_memory(pod, settings, result=serving.result, artefact=serving.artefact)
    container: Json = {
        "image": settings.runtime_image,
        "command": ["python", "-m", "penstock_runtime.pod"],
        "env": environment(settings, store.env, _environment(endpoint, serving, hardware)),
        "ports": [{"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"}],
        "resources": resources(hardware, serving.cores, memory),
        "volumeMounts": [*store.mounts, cache_mount, tmp_mount],
        **PROBES,
    }
    if store.env_from:
        container["envFrom"] = list(store.env_from)
    spec = pod_spec(
        container,
        hardware=hardware,
        pod=pod,
        settings=settings,
        volumes=[*store.volumes, cache_volume, tmp_volume],
        spread_over=runtime_selector(endpoint.name),
    )
    spec["terminationGracePeriodSeconds"] = Drain.of(endpoint.spec.rollout.drain_seconds).grace
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(HTTP_PORT),
        "prometheus.io/path": "/metrics",
        **pod.annotations,
        ARTEFACT: serving.digest,
    }
    made: Json = {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}
    annotations[TEMPLATE_HASH] = template_hash(made)
    return made


def template_hash(value: Json) -> str:
    """Of a template as we write it: the API server's defaults must not look like changes."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _environment(endpoint: Endpoint, serving: Serving, hardware: HardwareClassSpec) -> dict[str, str]:
    drain = Drain.of(endpoint.spec.rollout.drain_seconds)
    values = {
        "PENSTOCK_ARTEFACT": serving.digest,
        "PENSTOCK_NAME": endpoint.name,
        "PENSTOCK_TASK": serving.task.value,
        "PENSTOCK_CORES": str(serving.cores),
        "PENSTOCK_THREADS_PER_CORE": str(hardware.threads_per_core),
        "PENSTOCK_CACHE": CACHE,
        "PENSTOCK_HOST": "0.0.0.0",
        "PENSTOCK_PORT": str(HTTP_PORT),
        "PENSTOCK_TRUNCATE": "true" if serving.truncate else "false",
        "PENSTOCK_DRAIN_DELAY_SECONDS": str(drain.delay),
        "PENSTOCK_DRAIN_LIMIT_SECONDS": str(drain.limit),
    }
    if serving.max_input_tokens is not None:
        values["PENSTOCK_MAX_INPUT_TOKENS"] = str(serving.max_input_tokens)
    objective = _objective_milliseconds(endpoint, serving)
    if objective is not None:
        # A bound of the latency histogram: the share of good answers is then counted and not guessed.
        values["PENSTOCK_OBJECTIVE_P95_MILLISECONDS"] = repr(float(objective))
    if hardware.neuron is not None:
        # They are about CPUs, and here the devices do the work.
        del values["PENSTOCK_CORES"], values["PENSTOCK_THREADS_PER_CORE"]
    return values


def _objective_milliseconds(endpoint: Endpoint, serving: Serving) -> float | None:
    """The p95 that what serves was measured for: where the endpoint states none, the one that its curve was cut at."""
    if serving.result is not None and serving.result.capacity.p95_objective_milliseconds is not None:
        return serving.result.capacity.p95_objective_milliseconds
    latency = endpoint.spec.objective.latency
    return None if latency is None else latency.p95_milliseconds


def _get(path: str, *, every: int, failures: int, timeout: int) -> Json:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": every,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }


PROBES: Json = {
    # The process listens within seconds and only then fetches and loads: what takes long is readiness, not this.
    "startupProbe": _get("/healthz", every=1, failures=120, timeout=2),
    # Every second: the endpoint is as fast to come as its pods are to be found ready.
    "readinessProbe": _get("/readyz", every=1, failures=3, timeout=2),
    # A minute of silence: all cores compute, and a restart would only lose what they have.
    "livenessProbe": _get("/healthz", every=10, failures=6, timeout=5),
}
