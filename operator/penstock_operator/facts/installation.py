"""Settings of an installation that plans depend on: images, the artefact store, time limits.

`penstock_operator.settings` reads them from flags and the environment and documents them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.artefact_store import StoreUri
from penstock.hardware import NeuronGeneration
from penstock.resources.optimized_model import SEARCH_REVISION
from penstock_operator.facts.tenants import AllowList, NamespaceQuota


@dataclass(frozen=True)
class StoreVolume:
    """The volume that is mounted for a `file://` store: exactly one of the two fields is set."""

    host_path: str = ""
    """A folder of every node (shared between the nodes, unless the cluster has one node)."""
    claim: str = ""
    """The name of a PersistentVolumeClaim in the namespace of the endpoint."""


@dataclass(frozen=True)
class NeuronSettings:
    """The images of Inferentia, and the pods that compile for it: on nodes without devices."""

    runtime_image: str = "localhost/penstock-runtime-neuron"
    optimizer_image: str = "localhost/penstock-optimizer-neuron"
    legacy_runtime_image: str = "localhost/penstock-runtime-neuron-legacy"
    """Of Inf1: its packages need other versions of Python and PyTorch."""
    legacy_optimizer_image: str = "localhost/penstock-optimizer-neuron-legacy"
    compile_cpus: int = 8
    compile_memory: str = "24Gi"
    compile_seconds: float = 7200.0
    """Time that a compile job may take beyond its budget before it is ended."""


@dataclass(frozen=True)
class PlanSettings:
    """The settings that plans depend on."""

    runtime_image: str
    optimizer_image: str
    toolchain: str
    """Version of the content of the optimizer image; a new version gives new OptimizedModel keys."""
    search_revision: int = SEARCH_REVISION
    """Results of lower revisions are replaced after an upgrade; others are kept."""
    neuron: NeuronSettings = field(default_factory=NeuronSettings)
    store_uri: str = "file:///var/lib/penstock/artefacts"
    store_volume: StoreVolume | None = None
    """None with a `file://` store: a hostPath at the path of the store."""
    store_secret: str = ""
    """A Secret in the endpoint's namespace with the credentials of the store, for job and runtime pods. Empty: none."""
    store_read_secret: str = ""
    """The same for runtime pods alone, which only read. Empty: `store_secret`."""
    store_endpoint_url: str = ""
    """URL of the S3 server. Empty: AWS."""
    store_collect_seconds: float = 0.0
    """Interval between removals of unreferenced artefacts from the store; 0: never."""
    store_unused_seconds: float = 604_800.0
    """Only unreferenced artefacts older than this are removed."""
    store_collect_account: str = ""
    """Service account, in the operator's namespace, of the jobs that remove them. Empty: `default`."""
    store_collect_secret: str = ""
    """As `store_secret`, for these jobs. Empty: the Secret named `store_secret`, in the operator's namespace."""
    max_concurrent_optimizations: int = 1
    """Optimisation jobs that run at the same time in the whole cluster."""
    max_concurrent_rollouts: int = 1
    """Endpoints that replace their pods at the same time in the whole cluster."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    ignored_namespaces: frozenset[str] = frozenset()
    """Namespaces with endpoints that another operator plans."""
    operator_namespace: str = "penstock-system"
    """Pods of this namespace may reach the internal port of runtime pods."""
    monitoring_labels: tuple[tuple[str, str], ...] = (("penstock.dev/monitoring", "true"),)
    """Labels (name and value) of further namespaces with pods that may; empty: none."""
    max_attempts: int = 5
    """Maximum number of runs of one optimisation job when the failure is retryable."""
    backoff_seconds: float = 10.0
    """Delay before the second run; it doubles with each further run."""
    backoff_limit_seconds: float = 600.0
    """Longest delay."""
    job_overtime_seconds: float = 900.0
    """Time that a job may take beyond its budget (image, download, export) before it is ended."""
    unused_grace_seconds: float = 3600.0
    """An OptimizedModel that no endpoint uses is deleted after this time."""
    job_memory: str = "4Gi"
    """Memory of the optimisation pod when the endpoint does not set it."""
    runtime_memory: str = "2Gi"
    """Memory of a runtime pod while the model's size is unknown."""
    job_disk: int = 64 * 2**30
    """Bytes. Most disk of its node that an optimisation pod may use. A model may take half of it."""
    runtime_disk: int = 8 * 2**30
    """The same of a runtime pod, besides the size of its artefact."""
    resync_seconds: float = 300.0
    """Every endpoint is planned again after this time, even without an event."""
    gateway_image: str = "localhost/penstock-gateway"
    gateway_cpu: str = "100m"
    """CPU request of a gateway pod; it has no CPU limit."""
    gateway_role: str = "penstock-operator-gateway"
    """ClusterRole that lets a gateway read the endpoint slices of its namespace."""
    gateway_api: bool = False
    """The Gateway API is installed: the operator creates HTTPRoutes."""
    hpa: bool = True
    """The operator creates HorizontalPodAutoscalers for endpoints in the mode HPA."""
    keda: bool = False
    """KEDA is installed: the operator creates ScaledObjects for endpoints in the mode KEDA."""
    prometheus_url: str = ""
    """The Prometheus that KEDA queries when an endpoint names none."""
    allowed: AllowList = field(default_factory=AllowList)
    quotas: tuple[NamespaceQuota, ...] = ()
    """How much the endpoints of a namespace may have together."""
    metadata_for_accounts: bool = False
    """Pods with a service account other than `default` may reach the metadata service of their node."""
    prometheus_hosts: tuple[str, ...] = ()
    """Hosts of the Prometheus servers that endpoints may name as well: `host`, `*.domain`, with or without a port."""
    extra_env: tuple[tuple[str, str], ...] = ()
    """Environment of job and runtime pods (proxies, HF_ENDPOINT): name and value."""
    pod_user: int = 65_532
    """User and group id of the pods; 0: the platform chooses them (OpenShift)."""
    ca_config_map: str = ""
    """A ConfigMap in each endpoint's namespace (and the operator's) with the CA certificates that jobs and runtime pods
    trust. Empty: the certificates of the images."""
    ca_key: str = "ca.crt"
    """Its key, with PEM certificates."""

    def __post_init__(self) -> None:
        """Reject contradictory settings."""
        if self.store_volume is not None and bool(self.store_volume.host_path) == bool(self.store_volume.claim):
            raise ValueError("store_volume: give either a host_path or a claim")
        if self.max_attempts < 1:
            raise ValueError("max_attempts: at least 1")

    def runtime_image_for(self, target: NeuronGeneration | None) -> str:
        """The image of runtime pods that serve on these devices; None: on CPUs."""
        if target is None:
            return self.runtime_image
        legacy = target is NeuronGeneration.INF1
        return self.neuron.legacy_runtime_image if legacy else self.neuron.runtime_image

    def optimizer_image_for(self, target: NeuronGeneration | None) -> str:
        """The image of jobs that compile for these devices; None: that optimise for CPUs."""
        if target is None:
            return self.optimizer_image
        legacy = target is NeuronGeneration.INF1
        return self.neuron.legacy_optimizer_image if legacy else self.neuron.optimizer_image

    @property
    def whole_store(self) -> StoreUri:
        """The store of the installation, with the stores of all namespaces."""
        return StoreUri.parse(self.store_uri)

    def store_of(self, namespace: str) -> StoreUri:
        """The store that the jobs of a namespace write to: its own, unless the administrator lets all namespaces share
        artefacts."""
        return self.whole_store if self.allowed.shared_artefacts else self.whole_store.of_namespace(namespace)
