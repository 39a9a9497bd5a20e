"""The Deployment of the runtime pods."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from penstock.artefact_store import Digest, StoreScheme
from penstock.resources.endpoint import ModelEndpointSpec
from penstock.resources.endpoint_parts.serving import PROMPT_TASKS
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.tasks import TaskName
from penstock_operator.endpoint.pods.network import identity_variables
from penstock_operator.endpoint.pods.template import (
    PYTHON,
    TMP,
    StoreAccess,
    environment,
    pod_spec,
    resources,
    runtime_disk,
    runtime_memory,
    scratch,
    store_access,
)
from penstock_operator.endpoint.replica_count import ReplicaTarget
from penstock_operator.endpoint.serving import ServingChoice
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import (
    ARTEFACT,
    CORES,
    FP32,
    GRPC_PORT,
    HTTP_PORT,
    INTERNAL_PORT,
    OPTIMIZED_MODEL,
    TEMPLATE_HASH,
    Json,
    runtime_labels,
    runtime_selector,
)

KEYS = "/var/run/penstock/keys"
"""The Secret of `spec.auth` is mounted at this path."""
CERTIFICATE = "/var/run/penstock/tls"
"""The Secret of `spec.tls` is mounted at this path."""
CACHE = "/var/lib/penstock/cache"
"""The artefact is downloaded to this path: an emptyDir of the pod."""
SERVING_POD = "penstock_runtime.pod"
MEASURING_POD = "penstock_optimizer.capacity"
"""The same with a measurement of its capacity before it is ready: on Inferentia, where the job had no device."""
MIN_READY_SECONDS = 2
"""A new pod that crashes immediately must not replace an old one."""
PROGRESS_DEADLINE_SECONDS = 900
"""A rollout without progress for this time is reported as stuck; image pull, download and warm-up fit into it."""
FINISH_SECONDS = 35
"""After the last accepted request: slightly longer than the 30 s of one request (PENSTOCK_DEADLINE_SECONDS)."""
STREAM_SECONDS = 300
"""The same for text generation: 3,000 tokens at ten a second."""
MARGIN_SECONDS = 5
"""Between the process's own limit and the kubelet's SIGKILL."""
RELEASE_SECONDS = 30
"""The same on Inferentia: the process that owns the NeuronCores ends first. One that is killed releases them late, and
the next pod waits for them."""


@dataclass(frozen=True)
class Drain:
    """How a pod ends, in seconds from SIGTERM. delay < limit < grace."""

    delay: int
    """It continues to accept requests while the Service removes it."""
    limit: int
    """The process ends by itself."""
    grace: int
    """The kubelet kills it."""

    @classmethod
    def of(cls, spec: ModelEndpointSpec, *, devices: bool = False) -> Drain:
        """For `spec.rollout`. `devices`: of a pod that computes on Inferentia."""
        usual = STREAM_SECONDS if spec.task is TaskName.TEXT_GENERATION else FINISH_SECONDS
        finish = usual if spec.rollout.finish_seconds is None else spec.rollout.finish_seconds
        limit = spec.rollout.drain_seconds + finish
        return cls(spec.rollout.drain_seconds, limit, limit + (RELEASE_SECONDS if devices else MARGIN_SECONDS))


def deployment(
    endpoint: ParsedEndpoint,
    serving: ServingChoice,
    hardware: HardwareClassSpec,
    replicas: ReplicaTarget,
    settings: PlanSettings,
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
    made = endpoint.owned("apps/v1", "Deployment", spec)
    made["metadata"]["annotations"] = {CORES: str(serving.cores), **({FP32: "true"} if serving.fp32 else {})}
    return made


def template(
    endpoint: ParsedEndpoint, serving: ServingChoice, hardware: HardwareClassSpec, settings: PlanSettings
) -> Json:
    """The pod template. Values that the optimisation depended on come from `serving`, which may be older than the
    spec."""
    pod = endpoint.spec.pod
    labels = {**pod.labels, **runtime_labels(endpoint.name)}
    if serving.optimized_model:
        labels[OPTIMIZED_MODEL] = serving.optimized_model
    store = artefact_access(serving, endpoint.namespace, settings)
    disk = runtime_disk(serving.artefact, settings)
    cache_volume, cache_mount = scratch("cache", CACHE, disk)
    tmp_volume, tmp_mount = scratch("tmp", TMP, disk)
    key_volumes, key_mounts = key_volume(endpoint)
    tls_volumes, tls_mounts = tls_volume(endpoint)
    memory = runtime_memory(
        pod,
        settings,
        result=serving.measured,
        artefact=serving.artefact,
        caches=endpoint.spec.serving.caches,
        devices=hardware.neuron is not None,
        live=endpoint.spec.guard.live,
    )
    values = _environment(endpoint, serving, hardware)
    if settings.whole_store.scheme is not StoreScheme.FILE:
        values |= identity_variables(pod.service_account_name)
    # What no OptimizedModel records need not be measured.
    measures = hardware.neuron is not None and bool(serving.optimized_model)
    container: Json = {
        "image": settings.runtime_image_for(hardware.target),
        "command": [*PYTHON, MEASURING_POD if measures else SERVING_POD],
        "env": environment(settings, store.env, values, secrets=store.secrets),
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "internal", "containerPort": INTERNAL_PORT, "protocol": "TCP"},
            *([{"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"}] if endpoint.spec.serving.grpc else []),
        ],
        "resources": resources(hardware, serving.cores, memory, disk),
        "volumeMounts": [*store.mounts, cache_mount, tmp_mount, *key_mounts, *tls_mounts],
        **PROBES,
    }
    spec = pod_spec(
        container,
        hardware=hardware,
        pod=pod,
        settings=settings,
        volumes=[*store.volumes, cache_volume, tmp_volume, *key_volumes, *tls_volumes],
        spread_over=runtime_selector(endpoint.name),
    )
    drain = Drain.of(endpoint.spec, devices=hardware.neuron is not None)
    spec["terminationGracePeriodSeconds"] = drain.grace
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(INTERNAL_PORT),
        "prometheus.io/path": "/metrics",
        **pod.annotations,
        ARTEFACT: serving.digest,
    }
    made: Json = {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}
    annotations[TEMPLATE_HASH] = template_hash(made)
    return made


def artefact_access(serving: ServingChoice, namespace: str, settings: PlanSettings) -> StoreAccess:
    """Read access to the store that has the artefact: the namespace's; or the whole store, where versions without
    stores of namespaces put the artefacts of all. Of those the pod sees only its own."""
    digest = Digest.parse(serving.digest)
    whole, wanted = settings.whole_store, settings.store_of(namespace)
    stores = (wanted, whole, whole.of_namespace(namespace))
    store = next((store for store in stores if store.of(digest) == serving.uri), wanted)
    only = digest.hexadecimal if store == whole != wanted else ""
    return store_access(settings, store, writes=False, only=only)


def key_volume(endpoint: ParsedEndpoint) -> tuple[list[Json], list[Json]]:
    """Volumes and mounts of the bearer tokens. As a volume, changes reach running pods. Optional: the pod starts
    without the Secret, refuses all requests and reports it; otherwise it would wait without a visible reason."""
    if endpoint.spec.auth is None:
        return [], []
    secret: Json = {"secretName": endpoint.spec.auth.secret_name, "optional": True, "defaultMode": 0o440}
    return [{"name": "keys", "secret": secret}], [{"name": "keys", "mountPath": KEYS, "readOnly": True}]


def tls_volume(endpoint: ParsedEndpoint) -> tuple[list[Json], list[Json]]:
    """Volumes and mounts of the certificate. Optional, as the keys are: the process ends with an error that names
    the remedy."""
    if endpoint.spec.tls is None:
        return [], []
    secret: Json = {"secretName": endpoint.spec.tls.secret_name, "optional": True, "defaultMode": 0o440}
    return [{"name": "tls", "secret": secret}], [{"name": "tls", "mountPath": CERTIFICATE, "readOnly": True}]


def template_hash(value: Json) -> str:
    """Hash of a template as the operator writes it: the API server's defaults must not look like changes."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _environment(endpoint: ParsedEndpoint, serving: ServingChoice, hardware: HardwareClassSpec) -> dict[str, str]:
    drain = Drain.of(endpoint.spec)
    values = {
        "PENSTOCK_ARTEFACT": serving.digest,
        "PENSTOCK_NAME": endpoint.name,
        "PENSTOCK_TASK": serving.task.value,
        "PENSTOCK_CORES": str(serving.cores),
        "PENSTOCK_THREADS_PER_CORE": str(hardware.threads_per_core),
        "PENSTOCK_CACHE": CACHE,
        "PENSTOCK_HOST": "0.0.0.0",
        "PENSTOCK_PORT": str(HTTP_PORT),
        "PENSTOCK_INTERNAL_PORT": str(INTERNAL_PORT),
        **({"PENSTOCK_FP32": "true"} if serving.fp32 else {}),
        "PENSTOCK_TRUNCATE": "true" if serving.truncate else "false",
        "PENSTOCK_DRAIN_DELAY_SECONDS": str(drain.delay),
        "PENSTOCK_DRAIN_LIMIT_SECONDS": str(drain.limit),
    }
    if endpoint.spec.guard.live is not None:
        values["PENSTOCK_LIVE_GUARD_SHARE"] = repr(endpoint.spec.guard.live.cpu_share)
    if endpoint.spec.serving.grpc:
        values["PENSTOCK_GRPC_PORT"] = str(GRPC_PORT)
    prompts = endpoint.spec.serving.prompts if serving.task in PROMPT_TASKS else None
    for name, given in (("PROMPTS", prompts), ("GUARD_POLICY", endpoint.spec.serving.guard_policy)):
        if given is not None:
            values[f"PENSTOCK_{name}"] = json.dumps(given.to_object(), ensure_ascii=False, sort_keys=True)
    if endpoint.spec.auth is not None:
        values["PENSTOCK_AUTH_TOKEN_FOLDER"] = KEYS
    if endpoint.spec.tls is not None:
        values["PENSTOCK_TLS_CERTIFICATE"] = f"{CERTIFICATE}/tls.crt"
        values["PENSTOCK_TLS_KEY"] = f"{CERTIFICATE}/tls.key"
    if serving.max_input_tokens is not None:
        values["PENSTOCK_MAX_INPUT_TOKENS"] = str(serving.max_input_tokens)
    if endpoint.spec.serving.caches is not None:
        values |= endpoint.spec.serving.caches.environment
    objective = _objective_milliseconds(endpoint, serving)
    if objective is not None:
        # It becomes a bucket of the latency histogram, so that the share of requests within it is exact.
        values["PENSTOCK_OBJECTIVE_P95_MILLISECONDS"] = repr(float(objective))
    if hardware.neuron is not None:
        # With Neuron devices the CPU settings do not apply.
        del values["PENSTOCK_CORES"], values["PENSTOCK_THREADS_PER_CORE"]
        values["PENSTOCK_NEURON_TARGET"] = hardware.neuron.generation.value
        values["PENSTOCK_NEURON_CORES"] = str(serving.cores)
    return values


def _objective_milliseconds(endpoint: ParsedEndpoint, serving: ServingChoice) -> float | None:
    """The p95 objective that the served artefact was measured for; else the endpoint's. Of text generation: the
    objective on the time to the first token."""
    if endpoint.spec.task is TaskName.TEXT_GENERATION:
        tokens = serving.measured.token_capacity if serving.measured is not None else None
        measured = None if tokens is None else tokens.first_token_objective_milliseconds
        return measured or endpoint.spec.objective.first_token_milliseconds
    latency = endpoint.spec.objective.latency
    if serving.target is not None:
        # A pod measures the capacity later: the limit of that curve must not change the template.
        return serving.stated_p95_milliseconds or (None if latency is None else latency.p95_milliseconds)
    if serving.measured is not None and serving.measured.capacity.p95_objective_milliseconds is not None:
        return serving.measured.capacity.p95_objective_milliseconds
    return None if latency is None else latency.p95_milliseconds


def _get(path: str, *, every: int, failures: int, timeout: int) -> Json:
    return {
        "httpGet": {"path": path, "port": "internal"},
        "periodSeconds": every,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }


PROBES: Json = {
    # The process listens within seconds and loads afterwards: loading delays readiness, not start-up.
    "startupProbe": _get("/healthz", every=1, failures=120, timeout=2),
    # Every second: the endpoint becomes ready as fast as its pods.
    "readinessProbe": _get("/readyz", every=1, failures=3, timeout=2),
    # A minute without an answer is normal under full load, and a restart would lose the requests.
    "livenessProbe": _get("/healthz", every=10, failures=6, timeout=5),
}
