"""The optimisation job: one pod without an API token. It is pinned like the runtime, on a node of the class; one that
compiles for Inferentia runs on a node without devices."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.resources.core import ModelSource, Scheme
from penstock.resources.endpoint_parts.pod import Pod
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.optimized_model import OptimizedModelSpec
from penstock_operator.endpoint.optimization.model import OptimizationState
from penstock_operator.endpoint.pods.credentials import secret_variables
from penstock_operator.endpoint.pods.network import identity_variables, network_policy, reaches_metadata
from penstock_operator.endpoint.pods.placement import JOB_DISK, PodRequirements
from penstock_operator.endpoint.pods.template import (
    PYTHON,
    TMP,
    environment,
    in_bytes,
    pod_spec,
    resources,
    scratch,
    store_access,
)
from penstock_operator.endpoint.spec import ParsedEndpoint, allowed_folder
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import API_VERSION, ATTEMPT, GROUP, INTERNAL_PORT, Json, job_name, model_labels
from penstock_operator.facts.workloads import OptimizedModelFacts

SPEC = f"{GROUP}/spec"
"""Annotation of the job's pod: the spec of the OptimizedModel as JSON."""
SPEC_FOLDER = "/etc/penstock"
SPEC_KEY = "spec.json"
TEXTS_KEY = "texts.txt"
WORK = "/var/lib/penstock/work"
CLAIMS = "/var/run/penstock/claims"
"""Where the job looks for `pvc://claim/path` (`penstock_runtime.models.sources`)."""
FILES = "/var/run/penstock/files"
"""Where the allowed folder of a `file://` source is mounted."""
KEPT_SECONDS = 86_400
"""A finished job stays for a day, for its log."""
GRACE_SECONDS = 30
"""From SIGTERM to SIGKILL: the job reports the interruption, and its partial work stays usable."""


@dataclass(frozen=True)
class JobHost:
    """The requests of the job's pod, and its nodes."""

    hardware: HardwareClassSpec
    cores: int
    pod: Pod
    memory_bytes: int
    disk_bytes: int
    """Of its scratch volumes, at most."""
    seconds: float
    """From its start to its end."""
    compiles: bool = False
    """It compiles for Inferentia."""

    @classmethod
    def of(
        cls, spec: OptimizedModelSpec, pod: Pod, hardware: HardwareClassSpec, settings: PlanSettings, *, factor: int = 1
    ) -> JobHost:
        """Of the job with this spec for endpoints with these pod settings. `factor`: on the memory.

        A job that compiles for Inferentia has other CPUs and memory. The endpoint's nodeSelector is for the
        serving pods, and may exclude all nodes without devices.
        """
        budget = spec.optimization.seconds(compiles=hardware.neuron is not None)
        if hardware.neuron is None:
            memory = job_memory(pod, settings.job_memory, factor=factor)
            return cls(hardware, spec.cores, pod, memory, settings.job_disk, budget + settings.job_overtime_seconds)
        return cls(
            hardware.compile_host,
            settings.neuron.compile_cpus,
            pod.model_copy(update={"node_selector": {}}),
            job_memory(pod, settings.neuron.compile_memory, factor=factor),
            settings.job_disk,
            budget + settings.neuron.compile_seconds,
            compiles=True,
        )

    def requirements(self, class_name: str) -> PodRequirements:
        """The requirements of the pod on its node. SpecError where devices are not whole."""
        needs = PodRequirements.of(
            class_name,
            self.hardware,
            self.pod,
            cores=self.cores,
            memory_bytes=self.memory_bytes,
            disk_bytes=self.disk_bytes,
        )
        return replace(needs, compiles=self.compiles, disk_setting=JOB_DISK)


def job_policy(
    model: OptimizationState, facts: OptimizedModelFacts, endpoint: ParsedEndpoint, settings: PlanSettings
) -> Json:
    """The NetworkPolicy of the job's pods: only the operator reads their progress."""
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}}}
    return network_policy(
        f"{model.name}-job",
        endpoint.namespace,
        model_labels(model.name),
        metadata=reaches_metadata(endpoint.spec.pod.service_account_name, settings),
        ingress=[{"ports": [{"port": INTERNAL_PORT, "protocol": "TCP"}], "from": [operator]}],
        owners=[_owner(facts)],
    )


def job(
    model: OptimizationState,
    facts: OptimizedModelFacts,
    endpoint: ParsedEndpoint,
    hardware: HardwareClassSpec,
    settings: PlanSettings,
) -> Json:
    """The job of run `model.start`, with the endpoint's pod settings. `hardware`: the endpoint's class.

    Applied once: a Job's template is immutable. SpecError when the class's devices are not whole.
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
            # Retries depend on the failure, which the Job controller does not know.
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {
                "metadata": {
                    "labels": {**endpoint.spec.pod.labels, **labels},
                    "annotations": {
                        # A node autoscaler would lose the measurements.
                        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                        "karpenter.sh/do-not-disrupt": "true",
                        **endpoint.spec.pod.annotations,
                        SPEC: json.dumps(model.spec.to_object(), sort_keys=True, ensure_ascii=False),
                    },
                },
                "spec": pod,
            },
        },
    }


def _pod(
    model: OptimizationState, endpoint: ParsedEndpoint, hardware: HardwareClassSpec, settings: PlanSettings
) -> Json:
    spec = model.spec
    host = JobHost.of(spec, endpoint.spec.pod, hardware, settings, factor=model.memory_factor)
    store = store_access(settings, settings.store_of(endpoint.namespace), writes=True)
    spec_volume: Json = {"name": "spec", "projected": {"sources": _inputs(spec)}}
    spec_mount: Json = {"name": "spec", "mountPath": SPEC_FOLDER, "readOnly": True}
    disk = host.disk_bytes
    work_volume, work_mount = scratch("work", WORK, disk)
    tmp_volume, tmp_mount = scratch("tmp", TMP, disk)
    volumes, mounts, model_values = _source_volumes(spec.sources.values(), settings)
    values = {
        **model_values,
        **identity_variables(endpoint.spec.pod.service_account_name),
        "PENSTOCK_SPEC": f"{SPEC_FOLDER}/{SPEC_KEY}",
        "PENSTOCK_WORK": WORK,
        "PENSTOCK_MODEL_MAX_BYTES": str(disk // 2),
        "PENSTOCK_PROGRESS_HOST": "0.0.0.0",
        "PENSTOCK_PROGRESS_PORT": str(INTERNAL_PORT),
        "HOME": WORK,
    }
    target = hardware.target
    if target is not None:
        values["PENSTOCK_NEURON_TARGET"] = target.value
    if spec.texts_digest is not None:
        values["PENSTOCK_TEXTS"] = f"{SPEC_FOLDER}/{TEXTS_KEY}"
    secrets = list(store.secrets)
    if spec.model_credentials is not None:
        # They come last and win: in this pod the variables of a store are for the download.
        for scheme in dict.fromkeys(source.scheme for source in spec.sources.values()):
            secrets += secret_variables(spec.model_credentials.secret_name, scheme)
    container: Json = {
        "image": settings.optimizer_image_for(target),
        "command": [*PYTHON, "penstock_optimizer.pod"],
        "env": environment(settings, store.env, values, secrets=secrets),
        "resources": resources(host.hardware, host.cores, host.memory_bytes, disk),
        "ports": [{"name": "progress", "containerPort": INTERNAL_PORT, "protocol": "TCP"}],
        "volumeMounts": [*store.mounts, spec_mount, work_mount, tmp_mount, *mounts],
    }
    pod = pod_spec(
        container,
        hardware=host.hardware,
        pod=host.pod,
        settings=settings,
        volumes=[*store.volumes, spec_volume, work_volume, tmp_volume, *volumes],
    )
    pod["restartPolicy"] = "Never"
    pod["terminationGracePeriodSeconds"] = GRACE_SECONDS
    # The pod's deadline, not the Job's, which would include the time without a free node.
    pod["activeDeadlineSeconds"] = int(host.seconds)
    return pod


def _inputs(spec: OptimizedModelSpec) -> list[Json]:
    """The files in the job's spec folder. No ConfigMap of the operator's own: it would need the right to write
    ConfigMaps of all namespaces.

    The texts are the user's ConfigMap. The job compares them with the digest in the spec.
    """
    annotation: Json = {"fieldPath": f"metadata.annotations['{SPEC}']"}
    sources: list[Json] = [{"downwardAPI": {"items": [{"path": SPEC_KEY, "fieldRef": annotation}]}}]
    texts = spec.workload.texts_from
    if texts is not None:
        item = {"key": texts.key, "path": TEXTS_KEY}
        # Optional: without the ConfigMap, the pod would wait without a visible reason.
        sources.append({"configMap": {"name": texts.config_map_name, "optional": True, "items": [item]}})
    return sources


def _source_volumes(
    sources: Iterable[ModelSource], settings: PlanSettings
) -> tuple[list[Json], list[Json], dict[str, str]]:
    """The volumes, mounts and variables for what the job reads in PersistentVolumeClaims, and in a folder of the
    nodes."""
    volumes: dict[str, Json] = {}
    values: dict[str, str] = {}
    for source in sources:
        folder = allowed_folder(source, settings.allowed) if source.scheme is Scheme.FILE else None
        if source.scheme is Scheme.PVC:
            claim = source.location.partition("/")[0]
            volumes.setdefault(f"{CLAIMS}/{claim}", {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
        elif folder is not None:
            # The allowed folder as a whole: the kubelet would follow a link below it to any folder of the node.
            volumes.setdefault(FILES, {"hostPath": {"path": folder[0], "type": "Directory"}})
            values.setdefault("PENSTOCK_FILE_PREFIX", folder[0])
            values["PENSTOCK_FILE_ROOT"] = FILES
    names = ("model", "index")[: len(volumes)]
    return (
        [{"name": name, **volume} for name, volume in zip(names, volumes.values(), strict=True)],
        [{"name": name, "mountPath": path, "readOnly": True} for name, path in zip(names, volumes, strict=True)],
        values,
    )


def _owner(facts: OptimizedModelFacts) -> Json:
    return {
        "apiVersion": API_VERSION,
        "kind": "OptimizedModel",
        "name": facts.name,
        "uid": facts.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def job_memory(pod: Pod, least: str, *, factor: int = 1) -> int:
    """Memory in bytes of an optimisation job, `least` at least: several engines load the model one after another, next
    to the reference model.

    `factor` applies to a run after one that ran out of memory.
    """
    asked = in_bytes(pod.memory) if pod.memory is not None else 0
    return max(asked, in_bytes(least)) * factor


def job_labels(optimized_model: str, attempt: int) -> dict[str, str]:
    """Labels of an optimisation job and its pod."""
    return {**model_labels(optimized_model), ATTEMPT: str(attempt)}
