"""Jobs that remove unreferenced artefacts from the artefact store: which jobs, where, and which artefacts they must
keep.

A store that namespaces share, which is a folder of each node or a service, is collected in the operator's namespace
with an account of its own: in a user's namespace the user could forge the list of artefacts to keep, and delete the
artefacts of another. Its job goes over the stores of all namespaces, and keeps in each the artefacts that the namespace
refers to. A claim can be mounted in its own namespace only; the job there has the store of that namespace. The list is
in the arguments of the job, which cannot be changed. A job has no API token, and keeps everything younger than the
given age.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.artefact_store import ALGORITHM, DIGITS_KEPT, StoreScheme
from penstock.resources.endpoint_parts.pod import Pod
from penstock_operator.endpoint.pods.network import identity_variables, network_policy, reaches_metadata
from penstock_operator.endpoint.pods.template import (
    CONTAINER_SECURITY,
    PYTHON,
    SMALL_DISK,
    TMP,
    environment,
    pod_security,
    scratch,
    store_access,
    trusting,
    with_disk,
)
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import CONTAINER, INSTANCE, MANAGED_BY, MANAGER, NAME, Json

STORE = "penstock-store"
POLICY_NAME = f"{STORE}-jobs"
_COMMON_LABELS = {NAME: STORE, MANAGED_BY: MANAGER}
NODE_CONDITIONS = "node.kubernetes.io/"
"""Prefix of the taints of nodes that are cordoned, short of something, or not ready."""
DIGESTS_IN_ARGUMENT = 4_000
"""A process can have long argument lists, but no single argument over 128 KiB."""
MOST_DIGESTS = 40_000
"""Of a list: the API server takes objects of up to 1.5 MiB."""
MEMORY = "256Mi"
DEADLINE_SECONDS = 900
"""Limit of a job: its list of referenced artefacts becomes outdated. Listing a store takes seconds."""
SHORTEST_KEPT_SECONDS = 3600
"""A finished job stays at least this long, for its log."""


@dataclass(frozen=True)
class CollectionHome:
    """A namespace in which a job can run."""

    namespace: str
    pod: Pod = field(default_factory=Pod)
    """The pod settings of one of its endpoints, for the pull secrets; none in the operator's namespace."""


@dataclass(frozen=True)
class CollectionTarget:
    """One job."""

    home: CollectionHome
    node: str = ""
    """The node that has the folder; empty where the store is reachable from any node."""
    taints: tuple[tuple[str, str, str], ...] = ()
    """Of that node: key, value, effect."""


def targets(
    homes: Sequence[CollectionHome], nodes: Iterable[Json], settings: PlanSettings
) -> tuple[CollectionTarget, ...]:
    """All jobs of a period. `homes`: one for each namespace with endpoints; without any, there are no jobs."""
    if not homes:
        return ()
    if by_namespace(settings):
        return tuple(CollectionTarget(home) for home in sorted(homes, key=lambda home: home.namespace))
    own = CollectionHome(settings.operator_namespace)
    if settings.whole_store.scheme is not StoreScheme.FILE:
        return (CollectionTarget(own),)
    usable = (node for node in nodes if _is_ready(node))
    found = [CollectionTarget(own, node["metadata"]["name"], _taints(node)) for node in usable]
    healthy = [target for target in found if not any(key.startswith(NODE_CONDITIONS) for key, _, _ in target.taints)]
    return tuple(sorted(healthy, key=lambda target: target.node))


def by_namespace(settings: PlanSettings) -> bool:
    """Whether each namespace has a separate store: a claim."""
    return settings.store_volume is not None and bool(settings.store_volume.claim)


def _taints(node: Json) -> tuple[tuple[str, str, str], ...]:
    """The taints that keep pods away."""
    return tuple(
        (taint["key"], taint.get("value") or "", taint["effect"])
        for taint in (node.get("spec") or {}).get("taints") or []
        if taint["effect"] in {"NoSchedule", "NoExecute"}
    )


def _is_ready(node: Json) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in conditions)


def name_of(target: CollectionTarget, period: int) -> str:
    """Name of the job: one for each target and period."""
    digest = hashlib.sha256(f"{target.home.namespace}/{target.node}".encode()).hexdigest()[:8]
    return f"{STORE}-{period}-{digest}"


def is_collection(job: str) -> bool:
    """Whether a job has such a name."""
    return job.startswith(f"{STORE}-")


def job(target: CollectionTarget, period: int, settings: PlanSettings, keep: Sequence[str]) -> Json:
    """The job of a target for this period. `keep`: see `keep_arguments`; not empty."""
    if not keep:
        raise ValueError("a job that keeps nothing would delete the whole store")
    if settings.store_collect_secret:
        settings = replace(settings, store_secret=settings.store_collect_secret)
    uri = settings.store_of(target.home.namespace) if by_namespace(settings) else settings.whole_store
    name, store = name_of(target, period), store_access(settings, uri, writes=True)
    tmp_volume, tmp_mount = scratch("tmp", TMP)
    container: Json = {
        "name": CONTAINER,
        "image": settings.runtime_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [*PYTHON, "penstock_runtime.store", "collect"],
        "args": [
            *(f"--keep={argument}" for argument in keep),
            "--older-than-seconds",
            f"{settings.store_unused_seconds:g}",
        ],
        "env": environment(settings, store.env, identity_variables(_account(settings)), secrets=store.secrets),
        "securityContext": CONTAINER_SECURITY,
        # No CPU request: even 1m would keep the node's last whole core from being allocated.
        "resources": with_disk({"requests": {"memory": MEMORY}, "limits": {"memory": MEMORY}}, SMALL_DISK),
        "volumeMounts": [*store.mounts, tmp_mount],
    }
    container, volumes = trusting(container, [*store.volumes, tmp_volume], settings)
    pod: Json = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(settings),
        "containers": [container],
        "volumes": volumes,
    }
    if target.node:
        only = {"key": "metadata.name", "operator": "In", "values": [target.node]}
        terms = {"nodeSelectorTerms": [{"matchFields": [only]}]}
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    if target.taints:
        pod["tolerations"] = [
            {"key": key, "operator": "Equal", "value": value, "effect": effect} for key, value, effect in target.taints
        ]
    secrets = [*(secret.name for secret in target.home.pod.image_pull_secrets), *settings.image_pull_secrets]
    if secrets:
        pod["imagePullSecrets"] = [{"name": one} for one in dict.fromkeys(secrets)]
    if account := _account(settings):
        pod["serviceAccountName"] = account
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": target.home.namespace, "labels": _labels(name)},
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            # As long as the period, so that the job of this period is known to exist.
            "ttlSecondsAfterFinished": max(SHORTEST_KEPT_SECONDS, int(settings.store_collect_seconds)),
            "template": {"metadata": {"labels": _labels(name)}, "spec": pod},
        },
    }


def policy(namespace: str, settings: PlanSettings) -> Json:
    """The NetworkPolicy of the pods of all these jobs in a namespace.

    It has no owner: it must exist before the first job, and stays for the next one.
    """
    return network_policy(
        POLICY_NAME, namespace, _COMMON_LABELS, metadata=reaches_metadata(_account(settings), settings)
    )


def keep_arguments(references: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """The values of `--keep` for the digests that namespaces refer to: `NAMESPACE/DIGITS,DIGITS...` with the first
    digits of each. Under an empty name: without a namespace, for the store of one.

    ValueError if they are more than fit into a job.
    """
    begin, count, arguments = len(ALGORITHM) + 1, 0, []
    for namespace, digests in sorted(references.items()):
        found = sorted({digest[begin : begin + DIGITS_KEPT] for digest in digests})
        count += len(found)
        pieces = (found[at : at + DIGESTS_IN_ARGUMENT] for at in range(0, len(found), DIGESTS_IN_ARGUMENT))
        arguments += [f"{namespace}/{','.join(piece)}".removeprefix("/") for piece in pieces]
    if count > MOST_DIGESTS:
        raise ValueError(f"{count} artefacts are referenced: a job takes {MOST_DIGESTS}")
    return tuple(arguments)


def _account(settings: PlanSettings) -> str:
    """The service account of the jobs; empty: `default`, which those in the namespaces of claims always have."""
    return "" if by_namespace(settings) else settings.store_collect_account


def _labels(name: str) -> dict[str, str]:
    return {**_COMMON_LABELS, INSTANCE: name}
