"""The common parts of the pods of jobs and runtimes: memory, access to the artefact store, node selection, security.

Pods have Guaranteed QoS: one container with integer CPUs and requests equal to limits. Only such pods get exclusive
cores from a kubelet with static CPU management.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.artefact_store import StoreScheme, StoreUri
from penstock.prices.pod_costs import PROCESS, measured_pod_bytes, unmeasured_pod_bytes
from penstock.resources.endpoint import Caches
from penstock.resources.endpoint_parts.guard import LiveGuard
from penstock.resources.endpoint_parts.pod import Pod
from penstock.resources.fields.text_fields import parse_quantity
from penstock.resources.hardware_class import HardwareClassSpec, SelectorOperator
from penstock.resources.result import ArtefactReference, Result
from penstock_operator.endpoint.pods.credentials import secret_variables
from penstock_operator.facts.installation import PlanSettings, StoreVolume
from penstock_operator.facts.names import CONTAINER, Json

MEBIBYTE = 2**20
ROUND_TO = 64 * MEBIBYTE
NEURON_PROCESS = 3072 * MEBIBYTE
"""Memory of the host for the process that owns the NeuronCores: published metrics of one encoder on one core show 2 to
3 GB. The files of the artefact, which it loads, are counted besides."""


def in_bytes(text: str) -> int:
    """A memory quantity in bytes, rounded up."""
    return math.ceil(parse_quantity(text))


def quantity(memory_bytes: int) -> str:
    """Bytes as a quantity, rounded up to 64 Mi: the same need gives the same text."""
    return f"{-(-memory_bytes // ROUND_TO) * ROUND_TO // MEBIBYTE}Mi"


def runtime_memory(
    pod: Pod,
    settings: PlanSettings,
    *,
    result: Result | None,
    artefact: ArtefactReference | None,
    caches: Caches | None = None,
    devices: bool = False,
    live: LiveGuard | None = None,
) -> int:
    """Memory in bytes of a runtime pod that serves this artefact: the endpoint's value, else from the measurement,
    else from the size of the artefact; the last two with the caches' memory. The limit equals the request.

    `devices`: Inferentia computes. The job has not measured the pod's need.
    """
    if pod.memory is not None:
        return in_bytes(pod.memory)
    kept = caches.total_bytes if caches is not None else 0
    if devices:
        size = artefact.bytes if artefact is not None and artefact.bytes else in_bytes(settings.runtime_memory)
        return size + NEURON_PROCESS + PROCESS + kept
    kept += 0 if live is None or result is None else live.memory_bytes(result.parameters)
    if result is not None and result.resident_bytes:
        return measured_pod_bytes(result.resident_bytes) + kept
    if artefact is not None and artefact.bytes:
        return max(in_bytes(settings.runtime_memory) // 2, unmeasured_pod_bytes(artefact.bytes)) + kept
    return in_bytes(settings.runtime_memory) + kept


VOLUME = "store"


@dataclass(frozen=True)
class StoreAccess:
    """How a pod reaches the artefact store: a volume for a folder, variables of a Secret for a service."""

    env: tuple[Json, ...]
    secrets: tuple[Json, ...] = ()
    """Variables with values from keys of the store's Secret."""
    volumes: tuple[Json, ...] = ()
    mounts: tuple[Json, ...] = ()


def store_access(settings: PlanSettings, uri: StoreUri, *, writes: bool, only: str = "") -> StoreAccess:
    """For a job (`writes`), or for a runtime pod, which only reads. `uri`: the whole store, or a namespace's.

    Of a volume, only the folder of `uri` is mounted, or of that only the folder `only`: the pod does not see what other
    namespaces have there. In an object store, its credentials decide that.
    """
    env: tuple[Json, ...] = ({"name": "PENSTOCK_STORE_URI", "value": str(uri)},)
    if uri.scheme is not StoreScheme.FILE:
        if settings.store_endpoint_url:
            env += ({"name": "AWS_ENDPOINT_URL", "value": settings.store_endpoint_url},)
        secret = settings.store_secret if writes else settings.store_read_secret or settings.store_secret
        return StoreAccess(env, tuple(secret_variables(secret, uri.scheme)) if secret else ())
    where = settings.store_volume or StoreVolume(host_path=settings.whole_store.location)
    volume: Json = {"name": VOLUME}
    if where.claim:
        volume["persistentVolumeClaim"] = {"claimName": where.claim, "readOnly": not writes}
    else:
        # Not DirectoryOrCreate: the kubelet would create it for root, and no job could write to it.
        volume["hostPath"] = {"path": where.host_path, "type": "Directory"}
    path = f"{uri.location}/{only}" if only else uri.location
    mount: Json = {"name": VOLUME, "mountPath": path, "readOnly": not writes}
    folder = path.removeprefix(settings.whole_store.location).strip("/")
    if folder:
        # If it does not exist, the kubelet creates it with the mode and, if that has setgid, the group of the volume.
        mount["subPath"] = folder
    return StoreAccess(env, volumes=(volume,), mounts=(mount,))


PYTHON = ("python", "-I", "-u", "-m")
"""Start of the command of pods: no module comes from the current folder or from PYTHON* variables."""
TMP = "/tmp"  # noqa: S108 - an emptyDir of the pod


def pod_security(settings: PlanSettings) -> Json:
    """The security context of a pod. Without a user, the platform's admission sets user and group."""
    user = settings.pod_user
    ids = {"runAsUser": user, "runAsGroup": user, "fsGroup": user} if user else {}
    return {
        "runAsNonRoot": True,
        **ids,
        # Without it, each start would change the owner of every file of a large volume.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


CA_FOLDER = "/etc/penstock/ca"
"""The ConfigMap with CA certificates is mounted at this path."""
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
"""Variables by which OpenSSL, requests and the AWS clients find CA certificates."""


def trusting(container: Json, volumes: Sequence[Json], settings: PlanSettings) -> tuple[Json, list[Json]]:
    """The container and the volumes of its pod, with the installation's CA certificates if it has any."""
    if not settings.ca_config_map:
        return container, list(volumes)
    known = {entry["name"] for entry in container["env"]}
    file = f"{CA_FOLDER}/{settings.ca_key}"
    found = {
        **container,
        "env": [*container["env"], *({"name": name, "value": file} for name in CA_VARIABLES if name not in known)],
        "volumeMounts": [*container["volumeMounts"], {"name": "ca", "mountPath": CA_FOLDER, "readOnly": True}],
    }
    return found, [*volumes, {"name": "ca", "configMap": {"name": settings.ca_config_map}}]


CONTAINER_SECURITY: Json = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
}


def resources(hardware: HardwareClassSpec, cores: int, memory_bytes: int, disk_bytes: int) -> Json:
    """Requests equal to limits: whole CPUs, memory, and the class's devices; and the disk of the node. SpecError where
    devices are not whole."""
    amounts = {name: str(amount) for name, amount in hardware.requests(cores).items()}
    amounts["memory"] = quantity(memory_bytes)
    return with_disk({"requests": dict(amounts), "limits": dict(amounts)}, disk_bytes)


DISK = "ephemeral-storage"
LOGS = 512 * MEBIBYTE
"""Disk for the logs of a pod, which the kubelet rotates: 50 MiB by default."""
SMALL_DISK = 256 * MEBIBYTE
"""Scratch space of pods that store no model."""


def with_disk(resources: Json, disk_bytes: int) -> Json:
    """Resources with a limit on the scratch volumes, `disk_bytes`, and the logs together. The request is smaller: the
    limit is for the worst, and the class of a pod's QoS does not depend on it."""
    parts = {"requests": requested_disk(disk_bytes), "limits": disk_bytes + LOGS}
    return {part: {**resources[part], DISK: quantity(size)} for part, size in parts.items()}


def requested_disk(disk_bytes: int) -> int:
    """Bytes that a pod requests of its node for scratch volumes of at most `disk_bytes`."""
    return disk_bytes // 8


def runtime_disk(artefact: ArtefactReference | None, settings: PlanSettings) -> int:
    """Bytes of the scratch volumes of a serving pod."""
    return settings.runtime_disk + (0 if artefact is None else artefact.bytes or 0)


def scratch(name: str, path: str, size_bytes: int = SMALL_DISK) -> tuple[Json, Json]:
    """An emptyDir volume of at most this size and its mount: the root file system is read-only. Without a limit, a pod
    could fill the disk of its node, and the kubelet would evict others."""
    return {"name": name, "emptyDir": {"sizeLimit": quantity(size_bytes)}}, {"name": name, "mountPath": path}


def environment(
    settings: PlanSettings, given: Sequence[Json], values: Mapping[str, str], *, secrets: Sequence[Json] = ()
) -> list[Json]:
    """Environment variables: keys of Secrets, overridden by the installation's, overridden by the operator's. Each name
    once, or the API server refuses it."""
    ours = {entry["name"]: entry for entry in (*given, *({"name": key, "value": text} for key, text in values.items()))}
    extra = {name: {"name": name, "value": value} for name, value in settings.extra_env if name not in ours}
    from_secrets = {entry["name"]: entry for entry in secrets if entry["name"] not in {*extra, *ours}}
    return [*extra.values(), *from_secrets.values(), *ours.values()]


def pod_spec(
    container: Json,
    *,
    hardware: HardwareClassSpec,
    pod: Pod,
    settings: PlanSettings,
    volumes: Sequence[Json],
    spread_over: Mapping[str, str] | None = None,
) -> Json:
    """The spec of a pod with this one container, on nodes of this class.

    `spread_over`: labels of the pods to spread over nodes; None: no spreading.
    """
    container, volumes = trusting(container, volumes, settings)
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(settings),
        "containers": [
            {
                "name": CONTAINER,
                "imagePullPolicy": settings.image_pull_policy,
                "securityContext": CONTAINER_SECURITY,
                "terminationMessagePath": "/dev/termination-log",
                "terminationMessagePolicy": "File",
                **container,
            }
        ],
        "volumes": list(volumes),
        "tolerations": [toleration.to_object() for toleration in (*hardware.tolerations, *pod.tolerations)],
    }
    terms = _terms(hardware, pod)
    if terms:
        spec["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        }
    if hardware.scheduler_name is not None:
        spec["schedulerName"] = hardware.scheduler_name
    if hardware.runtime_class_name is not None:
        spec["runtimeClassName"] = hardware.runtime_class_name
    if spread_over is not None:
        spec["topologySpreadConstraints"] = _spread(pod, spread_over)
    secrets = dict.fromkeys([*(secret.name for secret in pod.image_pull_secrets), *settings.image_pull_secrets])
    if secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in secrets]
    if pod.service_account_name is not None:
        spec["serviceAccountName"] = pod.service_account_name
    if pod.priority_class_name is not None:
        spec["priorityClassName"] = pod.priority_class_name
    return {key: value for key, value in spec.items() if value not in ([], {})}


def _terms(hardware: HardwareClassSpec, pod: Pod) -> list[Json]:
    """Node selector terms: each of the class's terms with the endpoint's nodeSelector and the architecture added."""
    both: list[Json] = []
    if hardware.architecture is not None:
        both.append(_one_of("kubernetes.io/arch", hardware.architecture.value))
    both += [_one_of(key, value) for key, value in sorted(pod.node_selector.items())]
    terms: list[Json] = []
    for term in hardware.node_selector_terms:
        own = [
            {
                "key": entry.key,
                "operator": entry.operator.value,
                **({"values": list(entry.values)} if entry.values else {}),
            }
            for entry in term.match_expressions
        ]
        terms.append({"matchExpressions": [*own, *both]})
    if not terms and both:
        terms.append({"matchExpressions": both})
    return terms


def _one_of(key: str, value: str) -> Json:
    return {"key": key, "operator": SelectorOperator.IN.value, "values": [value]}


def _spread(pod: Pod, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The endpoint's constraints; else spread over nodes where possible, so that one lost node is not the whole
    endpoint."""
    asked: list[Json] = [
        {
            "topologyKey": entry.topology_key,
            "maxSkew": entry.max_skew,
            "whenUnsatisfiable": entry.when_unsatisfiable.value,
        }
        for entry in pod.topology_spread_constraints
    ] or [{"topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}]
    # Old and new pods of a rollout are spread separately.
    return [
        {**entry, "labelSelector": {"matchLabels": dict(labels)}, "matchLabelKeys": ["pod-template-hash"]}
        for entry in asked
    ]
