"""What an installation decides for all of its endpoints: images, the artefact store, patience.

A pure value: `penstock_operator.settings` reads it from flags and the environment and documents it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StoreVolume:
    """What is mounted where a `file://` store lies: exactly one of the two."""

    host_path: str = ""
    """A folder of every node (shared between the nodes, or the cluster has one node)."""
    claim: str = ""
    """The name of a PersistentVolumeClaim in the namespace of the endpoint."""


@dataclass(frozen=True)
class PlanSettings:
    """The settings that plans depend on."""

    runtime_image: str
    optimizer_image: str
    toolchain: str
    """Version of what is inside the optimizer image; a new one makes new keys."""
    store_uri: str = "file:///var/lib/penstock/artefacts"
    store_volume: StoreVolume | None = None
    """None with a `file://` store: a hostPath at the store's own path."""
    store_secret: str = ""
    """A Secret in the endpoint's namespace whose keys become environment variables of job and runtime pods (S3
    credentials and endpoint). Empty: none."""
    store_collect_seconds: float = 0.0
    """The store is cleared of what nothing refers to once in this time; 0: never."""
    store_unused_seconds: float = 604_800.0
    """Of that, what is older than this."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    operator_namespace: str = "penstock-system"
    """Pods of this namespace may reach `/info` of runtime pods."""
    max_attempts: int = 5
    """Runs of one optimisation job, where another run can help."""
    backoff_seconds: float = 10.0
    """Wait before the second run; doubles with each further one."""
    backoff_limit_seconds: float = 600.0
    """No wait is longer."""
    job_overtime_seconds: float = 900.0
    """What a job may take over its budget (image, download, export) before it is ended."""
    unused_grace_seconds: float = 3600.0
    """An OptimizedModel that no endpoint uses is deleted after this."""
    job_memory: str = "4Gi"
    """Memory of the optimisation pod when neither the endpoint nor the model's size says."""
    runtime_memory: str = "2Gi"
    """Memory of a runtime pod while the model's size is not known yet."""
    resync_seconds: float = 300.0
    """Everything is looked at again after this, whether anything happened or not."""
    gateway_image: str = "localhost/penstock-gateway"
    gateway_cpu: str = "100m"
    """CPU that a pod of a gateway asks for; it may use more."""
    keda: bool = False
    """KEDA is installed: the operator keeps the ScaledObjects of endpoints in that mode."""
    prometheus_url: str = ""
    """For KEDA to ask, where an endpoint names none."""
    extra_env: tuple[tuple[str, str], ...] = ()
    """Environment of job and runtime pods (proxies, HF_ENDPOINT): name and value."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.store_volume is not None and bool(self.store_volume.host_path) == bool(self.store_volume.claim):
            raise ValueError("store_volume: give either a host_path or a claim")
        if self.max_attempts < 1:
            raise ValueError("max_attempts: at least 1")


Json = dict[str, Any]
"""An object as the API has it."""
