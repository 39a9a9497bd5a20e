"""Deleting from the artefact store what nothing refers to any more: which jobs, where, and what they have to keep.

The store may be a folder of each node, a volume of each namespace, or a service: a collection is a job beside an
endpoint, since that is where the volume, the Secret and the account are by which pods reach the store. It is handed the
list of what is referred to, has no token for the API, and leaves alone whatever is younger than it was told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.artefact_store import ALGORITHM, DIGITS_KEPT, StoreScheme, StoreUri
from penstock.resources.pod import Pod
from penstock_operator.plan.names import CONTAINER, INSTANCE, MANAGED_BY, MANAGER, NAME
from penstock_operator.plan.pod_template import CONTAINER_SECURITY, POD_SECURITY, TMP, environment, scratch
from penstock_operator.plan.settings import Json, PlanSettings
from penstock_operator.plan.store import store_access

STORE = "penstock-store"
KEEP_FOLDER = "/etc/penstock"
KEEP_KEY = "keep.json"
MEMORY = "256Mi"
DEADLINE_SECONDS = 900
"""The older the list of what is kept, the likelier that it lacks something. Listing a store takes seconds."""
SHORTEST_KEPT_SECONDS = 3600
"""A finished job stays at least as long, for its log."""


@dataclass(frozen=True)
class Home:
    """An endpoint beside which a collection can run."""

    namespace: str
    pod: Pod
    """What it says of its pods: account, pull secrets."""


@dataclass(frozen=True)
class Target:
    """One collection."""

    home: Home
    node: str = ""
    """The node whose folder it is; empty where the store is reached from any."""


def targets(homes: Sequence[Home], nodes: Iterable[Json], settings: PlanSettings) -> tuple[Target, ...]:
    """All that is to be collected. `homes`: one for each namespace with endpoints; none, and nothing is done."""
    if not homes:
        return ()
    first = min(homes, key=lambda home: home.namespace)
    if StoreUri.parse(settings.store_uri).scheme is not StoreScheme.FILE:
        return (Target(first),)
    if settings.store_volume is not None and settings.store_volume.claim:
        return tuple(Target(home) for home in sorted(homes, key=lambda home: home.namespace))
    return tuple(Target(first, name) for name in sorted(node["metadata"]["name"] for node in nodes if _is_ready(node)))


def _is_ready(node: Json) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in conditions)


def name_of(target: Target, period: int) -> str:
    """Of the job and its list: one for each target and period, whoever makes it."""
    digest = hashlib.sha256(f"{target.home.namespace}/{target.node}".encode()).hexdigest()[:8]
    return f"{STORE}-{period}-{digest}"


def is_collection(job: str) -> bool:
    """Whether a job of this name is one of these."""
    return job.startswith(f"{STORE}-")


def job(target: Target, period: int, settings: PlanSettings) -> Json:
    """The job of a target for this period."""
    name, store = name_of(target, period), store_access(settings, writes=True)
    tmp_volume, tmp_mount = scratch("tmp", TMP)
    container: Json = {
        "name": CONTAINER,
        "image": settings.runtime_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-m", "penstock_runtime.store", "collect"],
        "args": [
            "--keep-file",
            f"{KEEP_FOLDER}/{KEEP_KEY}",
            "--older-than-seconds",
            f"{settings.store_unused_seconds:g}",
        ],
        "env": environment(settings, store.env, {}),
        "securityContext": CONTAINER_SECURITY,
        # No CPU: a thousandth of one would keep a node's last whole core from everybody.
        "resources": {"requests": {"memory": MEMORY}, "limits": {"memory": MEMORY}},
        "volumeMounts": [*store.mounts, {"name": "keep", "mountPath": KEEP_FOLDER, "readOnly": True}, tmp_mount],
    }
    if store.env_from:
        container["envFrom"] = list(store.env_from)
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
        # Wherever an endpoint may have been placed.
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
            # As long as the period, so that it is known to have been done.
            "ttlSecondsAfterFinished": max(SHORTEST_KEPT_SECONDS, int(settings.store_collect_seconds)),
            "template": {"metadata": {"labels": _labels(name)}, "spec": pod},
        },
    }


def keep_list(made: Json, digests: Iterable[str]) -> Json:
    """What the job, as the API has it, must keep: its pod waits for this ConfigMap."""
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
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
            ],
        },
        "data": {KEEP_KEY: json.dumps({"keep": kept}, separators=(",", ":"))},
    }


def _labels(name: str) -> dict[str, str]:
    return {NAME: STORE, INSTANCE: name, MANAGED_BY: MANAGER}
