"""The optimisation job: one pod, pinned like the runtime, on a node of the class, without a token for the API."""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.artefact_store import StoreScheme, StoreUri
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.source import ModelSource, Scheme
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.memory import job_memory
from penstock_operator.plan.names import API_VERSION, job_labels, job_name, model_labels
from penstock_operator.plan.observed import OptimizedModelFacts
from penstock_operator.plan.optimized_model import Optimization, texts_file
from penstock_operator.plan.pod_template import TMP, environment, pod_spec, resources, scratch
from penstock_operator.plan.settings import Json, PlanSettings
from penstock_operator.plan.store import store_access

SPEC_FOLDER = "/etc/penstock"
SPEC_KEY = "spec.json"
TEXTS_KEY = "texts.txt"
WORK = "/var/lib/penstock/work"
CLAIMS = "/var/run/penstock/claims"
"""Where `pvc://claim/path` is looked for (`penstock_runtime.models.sources`)."""
KEPT_SECONDS = 86_400
"""A finished job stays for a day: its log is what people want to see when it failed."""
GRACE_SECONDS = 30
"""From SIGTERM to SIGKILL: a job says that it was interrupted, and its partial work stays usable."""


def config_map(model: Optimization, facts: OptimizedModelFacts, namespace: str, texts: Sequence[str] | None) -> Json:
    """What the job reads: the spec, and the texts as they were when the key was made."""
    data = {SPEC_KEY: json.dumps(model.spec.to_object(), sort_keys=True, indent=1)}
    if model.spec.texts_digest is not None and texts is not None:
        data[TEXTS_KEY] = texts_file(texts)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{model.name}-spec",
            "namespace": namespace,
            "labels": model_labels(model.name),
            "ownerReferences": [_owner(facts)],
        },
        "data": data,
    }


def job(
    model: Optimization,
    facts: OptimizedModelFacts,
    endpoint: Endpoint,
    hardware: HardwareClassSpec,
    settings: PlanSettings,
) -> Json:
    """The run that `model` says is to start now, with the endpoint's wishes for its pod.

    Applied once: the template of a Job cannot be changed. SpecError when the class's devices are not whole.
    """
    labels = job_labels(model.name, model.start)
    pod = _pod(model, endpoint, hardware, settings)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(model.name, model.start),
            "namespace": endpoint.namespace,
            "labels": labels,
            "ownerReferences": [_owner(facts)],
        },
        "spec": {
            # Whether to run again is decided by what went wrong, which the Job controller cannot know.
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {
                "metadata": {
                    "labels": {**endpoint.spec.pod.labels, **labels},
                    "annotations": {
                        # An autoscaler of nodes would throw away what was measured.
                        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                        "karpenter.sh/do-not-disrupt": "true",
                        **endpoint.spec.pod.annotations,
                    },
                },
                "spec": pod,
            },
        },
    }


def _pod(model: Optimization, endpoint: Endpoint, hardware: HardwareClassSpec, settings: PlanSettings) -> Json:
    spec = model.spec
    store = store_access(settings, writes=True)
    spec_volume: Json = {"name": "spec", "configMap": {"name": f"{model.name}-spec"}}
    spec_mount: Json = {"name": "spec", "mountPath": SPEC_FOLDER, "readOnly": True}
    work_volume, work_mount = scratch("work", WORK)
    tmp_volume, tmp_mount = scratch("tmp", TMP)
    volumes, mounts = _model_volume(spec.source, settings)
    values = {
        "PENSTOCK_SPEC": f"{SPEC_FOLDER}/{SPEC_KEY}",
        "PENSTOCK_WORK": WORK,
        "HOME": WORK,
    }
    if spec.texts_digest is not None:
        values["PENSTOCK_TEXTS"] = f"{SPEC_FOLDER}/{TEXTS_KEY}"
    container: Json = {
        "image": settings.optimizer_image,
        "command": ["python", "-m", "penstock_optimizer.pod"],
        "env": environment(settings, store.env, values),
        "resources": resources(
            hardware, spec.cores, job_memory(endpoint.spec.pod, settings, factor=model.memory_factor)
        ),
        "volumeMounts": [*store.mounts, spec_mount, work_mount, tmp_mount, *mounts],
    }
    # The credentials of the model last: where both Secrets have a key, the download is what they are for here.
    sources = list(store.env_from)
    if spec.model_credentials is not None:
        sources.append({"secretRef": {"name": spec.model_credentials.secret_name}})
    if sources:
        container["envFrom"] = sources
    pod = pod_spec(
        container,
        hardware=hardware,
        pod=endpoint.spec.pod,
        settings=settings,
        volumes=[*store.volumes, spec_volume, work_volume, tmp_volume, *volumes],
    )
    pod["restartPolicy"] = "Never"
    pod["terminationGracePeriodSeconds"] = GRACE_SECONDS
    # The pod's, not the Job's: that one would count the time in which no node had room.
    pod["activeDeadlineSeconds"] = int(spec.optimization.budget_seconds + settings.job_overtime_seconds)
    return pod


def _model_volume(source: ModelSource, settings: PlanSettings) -> tuple[list[Json], list[Json]]:
    """What a model needs mounted that is in a volume of the cluster, or in a folder of the nodes."""
    if source.scheme is Scheme.PVC:
        claim = source.location.partition("/")[0]
        volume: Json = {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return [volume], [{"name": "model", "mountPath": f"{CLAIMS}/{claim}", "readOnly": True}]
    if source.scheme is Scheme.FILE:
        store = StoreUri.parse(settings.store_uri)
        if store.scheme is StoreScheme.FILE and f"{source.location}/".startswith(f"{store.location}/"):
            return [], []
        volume = {"name": "model", "hostPath": {"path": source.location, "type": "Directory"}}
        return [volume], [{"name": "model", "mountPath": source.location, "readOnly": True}]
    return [], []


def _owner(facts: OptimizedModelFacts) -> Json:
    return {
        "apiVersion": API_VERSION,
        "kind": "OptimizedModel",
        "name": facts.name,
        "uid": facts.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
