"""Jobs that remove unreferenced artefacts from the artefact store: which jobs, where, and what they must keep.

The store may be a folder of each node, a volume of each namespace, or a service. A job runs in the namespace of an
endpoint, which has the volume, the Secret and the service account to reach the store. It gets the list of referenced
artefacts, has no API token, and keeps everything younger than the given age.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.artefact_store import ALGORITHM, DIGITS_KEPT, StoreScheme, StoreUri
from penstock.resources.pod import Pod
from penstock_operator.plan.installation import Json, PlanSettings
from penstock_operator.plan.job_network import identity_variables, network_policy, reaches_metadata
from penstock_operator.plan.names import CONTAINER, INSTANCE, MANAGED_BY, MANAGER, NAME
from penstock_operator.plan.pod_template import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    PYTHON,
    TMP,
    environment,
    scratch,
    store_access,
)

STORE = "penstock-store"
KEEP_FOLDER = "/etc/penstock"
KEEP_KEY = "keep.json"
MEMORY = "256Mi"
DEADLINE_SECONDS = 900
"""Limit of a job: its list of referenced artefacts becomes outdated. Listing a store takes seconds."""
SHORTEST_KEPT_SECONDS = 3600
"""A finished job stays at least this long, for its log."""


@dataclass(frozen=True)
class CollectionHome:
    """An endpoint in whose namespace a job can run."""

    namespace: str
    pod: Pod
    """Its pod settings: service account, pull secrets."""


@dataclass(frozen=True)
class CollectionTarget:
    """One job."""

    home: CollectionHome
    node: str = ""
    """The node whose folder it is; empty where the store is reachable from any node."""


def targets(
    homes: Sequence[CollectionHome], nodes: Iterable[Json], settings: PlanSettings
) -> tuple[CollectionTarget, ...]:
    """All jobs of a period. `homes`: one for each namespace with endpoints; without any, there are no jobs."""
    if not homes:
        return ()
    first = min(homes, key=lambda home: home.namespace)
    if StoreUri.parse(settings.store_uri).scheme is not StoreScheme.FILE:
        return (CollectionTarget(first),)
    if settings.store_volume is not None and settings.store_volume.claim:
        return tuple(CollectionTarget(home) for home in sorted(homes, key=lambda home: home.namespace))
    return tuple(
        CollectionTarget(first, name) for name in sorted(node["metadata"]["name"] for node in nodes if _is_ready(node))
    )


def _is_ready(node: Json) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in conditions)


def name_of(target: CollectionTarget, period: int) -> str:
    """Name of the job and its list: one for each target and period."""
    digest = hashlib.sha256(f"{target.home.namespace}/{target.node}".encode()).hexdigest()[:8]
    return f"{STORE}-{period}-{digest}"


def is_collection(job: str) -> bool:
    """Whether a job has such a name."""
    return job.startswith(f"{STORE}-")


def job(target: CollectionTarget, period: int, settings: PlanSettings) -> Json:
    """The job of a target for this period."""
    name, store = name_of(target, period), store_access(settings, writes=True)
    tmp_volume, tmp_mount = scratch("tmp", TMP)
    container: Json = {
        "name": CONTAINER,
        "image": settings.runtime_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [*PYTHON, "penstock_runtime.store", "collect"],
        "args": [
            "--keep-file",
            f"{KEEP_FOLDER}/{KEEP_KEY}",
            "--older-than-seconds",
            f"{settings.store_unused_seconds:g}",
        ],
        "env": environment(settings, store.env, identity_variables(target.home.pod), secrets=store.secrets),
        "securityContext": CONTAINER_SECURITY,
        # No CPU request: even 1m would keep the node's last whole core from being allocated.
        "resources": {"requests": {"memory": MEMORY}, "limits": {"memory": MEMORY}},
        "volumeMounts": [*store.mounts, {"name": "keep", "mountPath": KEEP_FOLDER, "readOnly": True}, tmp_mount],
    }
    pod: Json = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [*store.volumes, {"name": "keep", "configMap": {"name": name}}, tmp_volume],
    }
    if target.node:
        only = {"key": "metadata.name", "operator": "In", "values": [target.node]}
        terms = {"nodeSelectorTerms": [{"matchFields": [only]}]}
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
        # An endpoint may run on any node.
        pod["tolerations"] = [{"operator": "Exists"}]
    secrets = [*(secret.name for secret in target.home.pod.image_pull_secrets), *settings.image_pull_secrets]
    if secrets:
        pod["imagePullSecrets"] = [{"name": one} for one in dict.fromkeys(secrets)]
    if target.home.pod.service_account_name is not None:
        pod["serviceAccountName"] = target.home.pod.service_account_name
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


def policy(made: Json, target: CollectionTarget, settings: PlanSettings) -> Json:
    """The NetworkPolicy of the job's pod, which waits for the list of what it must keep."""
    name = made["metadata"]["name"]
    metadata = reaches_metadata(target.home.pod, settings)
    return network_policy(name, target.home.namespace, _labels(name), _owner(made), metadata=metadata)


def keep_list(made: Json, digests: Iterable[str]) -> Json:
    """The ConfigMap of what the job must keep; the job's pod waits for it."""
    metadata = made["metadata"]
    begin = len(ALGORITHM) + 1
    kept = sorted({digest[begin : begin + DIGITS_KEPT] for digest in digests})
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": _labels(metadata["name"]),
            "ownerReferences": [_owner(made)],
        },
        "data": {KEEP_KEY: json.dumps({"keep": kept}, separators=(",", ":"))},
    }


def _owner(made: Json) -> Json:
    return {"apiVersion": "batch/v1", "kind": "Job", "name": made["metadata"]["name"], "uid": made["metadata"]["uid"]}


def _labels(name: str) -> dict[str, str]:
    return {NAME: STORE, INSTANCE: name, MANAGED_BY: MANAGER}
