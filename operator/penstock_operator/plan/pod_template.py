"""What the pods of jobs and of runtimes have in common: whole cores of their own, on nodes of the class, and no rights.

Guaranteed QoS is the point of it: one container, integer CPUs, requests equal to limits. Only then does a kubelet with
static CPU management give a pod cores of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.resources.hardware_class import HardwareClassSpec, SelectorOperator
from penstock.resources.pod import Pod
from penstock_operator.plan.memory import quantity
from penstock_operator.plan.names import CONTAINER
from penstock_operator.plan.settings import Json, PlanSettings

UID = 65_532
"""Of the images' user; given in the pod, so that a namespace with restricted security takes any image."""
TMP = "/tmp"  # noqa: S108 - a volume of the pod's own

POD_SECURITY: Json = {
    "runAsNonRoot": True,
    "runAsUser": UID,
    "runAsGroup": UID,
    "fsGroup": UID,
    # Without it, a large volume would be walked file by file at each start.
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Json = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
}


def resources(hardware: HardwareClassSpec, cores: int, memory_bytes: int) -> Json:
    """Requests equal to limits: whole CPUs, memory, and the class's devices. SpecError where devices are not whole."""
    amounts = {name: str(amount) for name, amount in hardware.requests(cores).items()}
    amounts["memory"] = quantity(memory_bytes)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def scratch(name: str, path: str, *, bytes_limit: int | None = None) -> tuple[Json, Json]:
    """An empty volume and its mount: the root file system is read-only."""
    empty: Json = {} if bytes_limit is None else {"sizeLimit": quantity(bytes_limit)}
    return {"name": name, "emptyDir": empty}, {"name": name, "mountPath": path}


def environment(settings: PlanSettings, given: Sequence[Json], values: Mapping[str, str]) -> list[Json]:
    """Environment variables: the installation's, then ours, which win. Each name once, or the API server refuses it."""
    ours = {entry["name"]: entry for entry in (*given, *({"name": key, "value": text} for key, text in values.items()))}
    extra = {name: {"name": name, "value": value} for name, value in settings.extra_env if name not in ours}
    return [*extra.values(), *ours.values()]


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

    `spread_over`: labels of the pods to be spread over nodes; None: no spreading.
    """
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
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
    """Node selector terms: any of the class's, and each of them with what the endpoint and the architecture add."""
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
    """As the endpoint says; else over nodes, where that is possible: one lost node must not be the endpoint."""
    asked: list[Json] = [
        {
            "topologyKey": entry.topology_key,
            "maxSkew": entry.max_skew,
            "whenUnsatisfiable": entry.when_unsatisfiable.value,
        }
        for entry in pod.topology_spread_constraints
    ] or [{"topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}]
    # Old and new pods of a rollout are spread each among themselves.
    return [
        {**entry, "labelSelector": {"matchLabels": dict(labels)}, "matchLabelKeys": ["pod-template-hash"]}
        for entry in asked
    ]
