"""The operator's settings: the one source of its flags, environment variables and their documentation.

A setting is a field of a group below: its name gives the flag (`--store-uri`) and `PENSTOCK_OPERATOR_STORE_URI`.
"""

from __future__ import annotations

import math
import re
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

import penstock
from penstock.errors import SettingError, closest
from penstock.resources.fields.text_fields import is_quantity, parse_quantity
from penstock.resources.optimized_model import SEARCH_REVISION
from penstock.settings import Setting, SettingsGroup, described, load, setting
from penstock_operator.endpoint.prometheus_urls import HOST_PATTERN
from penstock_operator.facts.installation import PlanSettings, StoreVolume
from penstock_operator.facts.tenants import NamespaceQuota, read_rules
from penstock_operator.inferentia_settings import InferentiaSettings
from penstock_operator.policy_settings import PolicySettings

PREFIX = "PENSTOCK_OPERATOR_"
DOCUMENT = "docs/reference/operator.md"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _pairs(setting_name: str, texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Names and values of a setting whose entries are NAME=VALUE. ValueError names the first that is not."""
    found = [text.partition("=") for text in texts]
    for text, (name, equals, _) in zip(texts, found, strict=True):
        if not name or not equals:
            raise ValueError(f"{setting_name} {text!r} is not NAME=VALUE")
    return tuple((name, value) for name, _, value in found)


class ClusterSettings(SettingsGroup):
    """The cluster and the namespaces."""

    kubeconfig: str = setting(
        "", "kubeconfig file of the cluster. Empty: the service account of the pod, or else $KUBECONFIG."
    )
    namespaces: tuple[str, ...] = setting(
        (), "Namespaces whose ModelEndpoints are reconciled, comma-separated. Empty: all namespaces."
    )
    ignored_namespaces: tuple[str, ...] = setting(
        (), "Namespaces whose ModelEndpoints another operator reconciles, comma-separated."
    )
    operator_namespace: str = setting(
        "",
        "Namespace of the operator itself, which has its Lease. Empty: the service account's, or else penstock-system.",
    )
    api_timeout_seconds: float = setting(15.0, "Time-out of calls to the API server.", unit="s", gt=0)
    monitoring_labels: tuple[str, ...] = setting(
        ("penstock.dev/monitoring=true",),
        "Labels of the namespaces whose pods may read the metrics of serving pods and gateways, comma-separated "
        "NAME=VALUE: the namespace of Prometheus. The operator's own namespace always may. Empty: no other.",
    )

    gateway_api: bool = setting(
        False, "The Gateway API is installed: endpoints may have an HTTPRoute (spec.exposure.httpRoute)."
    )

    @model_validator(mode="after")
    def _labels(self) -> Self:
        _ = _pairs("monitoring_labels", self.monitoring_labels)
        return self


class LeaderSettings(SettingsGroup):
    """Leader election."""

    lease_name: str = setting("penstock-operator", "Name of the Lease that the leader holds.", min_length=1)
    identity: str = setting("", "Name of this replica in the Lease. Empty: the host name and a random part.")
    lease_duration_seconds: float = setting(
        10.0,
        "Another replica takes over when the Lease has not been renewed for this long. Rounded up to whole seconds in "
        "the Lease.",
        unit="s",
        gt=0,
    )
    lease_deadline_seconds: float = setting(
        8.0, "The leader ends when it could not renew the Lease for this long. Less than the duration.", unit="s", gt=0
    )
    lease_interval_seconds: float = setting(1.25, "Between renewals.", unit="s", gt=0)

    @model_validator(mode="after")
    def _one_leads(self) -> Self:
        if self.lease_deadline_seconds + self.lease_interval_seconds >= self.lease_duration_seconds:
            raise ValueError(
                f"lease_deadline_seconds {self.lease_deadline_seconds:g} and lease_interval_seconds "
                f"{self.lease_interval_seconds:g} reach lease_duration_seconds {self.lease_duration_seconds:g}: two "
                "replicas could lead. Raise the duration"
            )
        return self


class ImageSettings(SettingsGroup):
    """The images of the pods."""

    runtime_image: str = setting(
        f"localhost/penstock-runtime:{penstock.__version__}", "Image of the serving pods.", min_length=1
    )
    optimizer_image: str = setting(
        f"localhost/penstock-optimizer:{penstock.__version__}", "Image of the optimisation jobs.", min_length=1
    )
    gateway_image: str = setting(
        f"localhost/penstock-gateway:{penstock.__version__}", "Image of the gateways' pods.", min_length=1
    )
    gateway_cpu: str = setting(
        "100m",
        "CPU request of a gateway pod, without a limit; 0 where all cores of the nodes are for model pods.",
        unit="quantity",
        min_length=1,
    )
    gateway_role: str = setting(
        "penstock-operator-gateway",
        "ClusterRole, made by the chart, that lets a gateway read the endpoint slices of its namespace.",
        min_length=1,
    )
    toolchain: str = setting(
        penstock.__version__,
        "Version of the content of the optimizer image. Part of the key of every optimisation.",
        min_length=1,
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = setting("IfNotPresent", "As in a pod's containers.")
    image_pull_secrets: tuple[str, ...] = setting(
        (), "Names of Secrets, in the endpoint's namespace, that pull the images; comma-separated."
    )
    extra_env: tuple[str, ...] = setting(
        (),
        "Environment of jobs, serving pods and gateways, comma-separated NAME=VALUE: HF_ENDPOINT, proxies. It "
        "overrides keys of Secrets, and nothing that the operator sets itself. A comma in a value is written `\\,`.",
    )

    pod_user: int = setting(
        65_532,
        "User and group id of the pods, and owner of the files in their volumes. 0: the platform chooses them, as "
        "OpenShift does.",
        ge=0,
    )
    ca_config_map: str = setting(
        "",
        "ConfigMap, in each endpoint's namespace, with all CA certificates that job and serving pods trust. Empty: "
        "those of the images.",
    )
    ca_key: str = setting("ca.crt", "Key of that ConfigMap, with PEM certificates.", min_length=1)

    @model_validator(mode="after")
    def _env(self) -> Self:
        _ = _pairs("extra_env", self.extra_env)
        return self


class StoreSettings(SettingsGroup):
    """The artefact store."""

    store_uri: str = setting(
        "file:///var/lib/penstock/artefacts",
        "The artefact store: a folder mounted into every pod, s3://bucket/prefix, gs://bucket/prefix or "
        "az://container/prefix. Each namespace has a store of its own in its folder namespaces/NAMESPACE.",
        min_length=1,
    )
    store_host_path: str = setting(
        "",
        "Folder of the nodes that is mounted for a file:// store. Empty, and no claim: the folder that the URI names.",
    )
    store_claim: str = setting(
        "",
        "PersistentVolumeClaim (in the endpoint's namespace, ReadWriteMany on several nodes) that is mounted for a "
        "file:// store.",
    )
    store_secret: str = setting(
        "",
        "Secret in the endpoint's namespace with the credentials of the store for job and serving pods: "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the like (docs/how-to/private-models.md lists the keys).",
    )
    store_read_secret: str = setting(
        "",
        "Secret in the endpoint's namespace with credentials that can only read the store, for serving pods. Empty: "
        "that of store_secret.",
    )
    store_endpoint_url: str = setting(
        "", "URL of the S3 server, for s3:// stores and s3:// models. Empty: AWS, or AWS_ENDPOINT_URL in extra_env."
    )
    store_collect_seconds: float = setting(
        0.0,
        "Interval between removals of unreferenced artefacts from the store. Only where this operator reconciles all "
        "users of the store: no other cluster, and no other namespaces. 0: never.",
        unit="s",
        ge=0,
    )
    store_unused_seconds: float = setting(
        604_800.0, "Minimum age of a removed artefact since it was last published.", unit="s", ge=0
    )

    store_collect_account: str = setting(
        "", "Service account, in the operator's namespace, of the jobs that remove artefacts. Empty: default."
    )
    store_collect_secret: str = setting(
        "",
        "Secret, in the operator's namespace, that these jobs use instead of the store's: it allows to delete. Empty: "
        "one with the name of the store's Secret.",
    )

    @model_validator(mode="after")
    def _one_volume(self) -> Self:
        if self.store_host_path and self.store_claim:
            raise ValueError("store_host_path and store_claim are both set: keep one")
        if (self.store_host_path or self.store_claim) and not self.store_uri.startswith("file:"):
            raise ValueError(f"a volume is set for the store {self.store_uri}, which needs none: leave it out")
        if self.store_endpoint_url and not self.store_uri.startswith("s3:"):
            raise ValueError(f"store_endpoint_url is for s3:// stores, and store_uri is {self.store_uri}: leave it out")
        return self


class JobSettings(SettingsGroup):
    """Retries, time limits and memory of optimisation jobs."""

    max_attempts: int = setting(
        5, "Maximum number of runs of one optimisation when the failure is retryable.", unit="runs", ge=1
    )
    search_revision: int = setting(
        SEARCH_REVISION,
        "After an upgrade, models whose result has a lower revision are optimised again. Raise it to optimise all.",
        ge=0,
    )
    max_concurrent_optimizations: int = setting(
        1,
        "Optimisation jobs that run at the same time in the whole cluster; the others wait, and each namespace "
        "gets one slot in a round. A job whose pod does not run after 300 s no longer keeps others waiting.",
        unit="jobs",
        ge=1,
    )
    max_concurrent_rollouts: int = setting(
        1,
        "Endpoints whose serving pods are replaced at the same time in the whole cluster; the others wait, and scale "
        "with their old pods meanwhile. Each namespace gets one slot in a round. A rollout without progress for 900 s "
        "no longer keeps others waiting. New endpoints do not wait.",
        unit="endpoints",
        ge=1,
    )
    backoff_seconds: float = setting(
        10.0, "Delay before the second run; it doubles with each further run.", unit="s", gt=0
    )
    backoff_limit_seconds: float = setting(600.0, "Longest delay between runs.", unit="s", gt=0)
    job_overtime_seconds: float = setting(
        900.0, "Longest time of a job beyond its budget: image, download, export.", unit="s", ge=0
    )
    unused_grace_seconds: float = setting(
        3600.0, "An OptimizedModel that no endpoint uses is deleted after this time.", unit="s", ge=0
    )
    metadata_for_accounts: bool = setting(
        False,
        "Pods of endpoints that name a service account may reach the metadata service of their node, which other pods "
        "may not: for identities that are handed out there.",
    )
    job_memory: str = setting(
        "4Gi", "Memory of an optimisation pod when the endpoint does not set it.", unit="quantity"
    )
    runtime_memory: str = setting("2Gi", "Memory of a serving pod while the model's size is unknown.", unit="quantity")
    job_disk: str = setting(
        "64Gi", "Disk of its node for an optimisation pod, which requests an eighth. A model may take half of it."
    )
    runtime_disk: str = setting(
        "8Gi", "Disk of its node for a serving pod, besides the size of its artefact. It requests an eighth of both."
    )

    @model_validator(mode="after")
    def _disks(self) -> Self:
        for name, text in (("job_disk", self.job_disk), ("runtime_disk", self.runtime_disk)):
            if not is_quantity(text) or parse_quantity(text) < 2 * 2**30:
                raise ValueError(f"{name} is {text!r}, not a quantity from 2Gi: write 64Gi")
        return self


class WorkSettings(SettingsGroup):
    """Concurrency and intervals of the reconcile loop."""

    workers: int = setting(
        8,
        "Endpoints that are reconciled at the same time. Each waits for the API server most of the time; more would "
        "only queue there.",
        ge=1,
        le=100,
    )
    resync_seconds: float = setting(
        900.0,
        "Every endpoint is reconciled again after about this time even without an event, from the caches; Penstock's "
        "own kinds are listed once in this time.",
        unit="s",
        gt=0,
    )
    progress_seconds: float = setting(
        5.0,
        "Interval between reads of the progress of a running job, for `Optimizing 7/23` and the fp32 artefact. "
        "0: never; new endpoints then serve once their job has ended.",
        unit="s",
        ge=0,
    )
    texts_seconds: float = setting(
        30.0, "Interval between reads of a ConfigMap that endpoints take texts from.", unit="s", gt=0
    )
    probe_timeout_seconds: float = setting(
        3.0, "Time-out of a read of a pod: /info of a serving pod, /progress of a job's.", unit="s", gt=0
    )
    probe_concurrency: int = setting(16, "Pods that are read at the same time: /info, /progress of jobs.", ge=1)


class LoadSettings(SettingsGroup):
    """How the load of endpoints is read."""

    scaling_interval_seconds: float = setting(
        2.0,
        "Interval between reads of the load of the endpoints that scale; longer where a read takes over a quarter of "
        "it.",
        unit="s",
        ge=0.1,
        le=20,
    )
    scrape_timeout_seconds: float = setting(2.0, "Time-out of a scrape of a serving pod.", unit="s", gt=0)
    scrape_concurrency: int = setting(64, "Serving pods whose metrics are read at the same time.", ge=1)
    prometheus_url: str = setting(
        "",
        "The Prometheus that scrapes the serving pods, for endpoints that name none: it has the latency of their "
        "requests. Empty: the operator has it from its own scrapes of the pods, as the load.",
    )
    prometheus_hosts: tuple[str, ...] = setting(
        (),
        "Hosts of the Prometheus servers that endpoints may name, comma-separated: prometheus.monitoring.svc, "
        "*.monitoring.svc, each with or without a port, or :* for all; without one: 80, 443, 9090, 9091, "
        "9443. The operator's own is always allowed.",
    )
    prometheus_networks: tuple[str, ...] = setting(
        (),
        "Networks (such as 127.0.0.0/8), comma-separated, that a Prometheus of an endpoint may be in although they are "
        "loopback, link-local or a cloud's metadata service. For tests.",
    )
    prometheus_token_file: str = setting("", "File with a bearer token for it; read again for every query.")
    prometheus_ca_file: str = setting("", "File with the CA certificates (PEM) to verify it with.")
    hpa: bool = setting(
        True,
        "The operator keeps a HorizontalPodAutoscaler for endpoints in the mode HPA. Without it, create the object "
        "that scales them yourself.",
    )
    keda: bool = setting(
        False,
        "KEDA is installed: the operator keeps a ScaledObject for endpoints in the mode KEDA. Without it, create the "
        "object that scales them yourself.",
    )
    prometheus_timeout_seconds: float = setting(5.0, "Time-out of a query to a Prometheus.", unit="s", gt=0)
    prometheus_concurrency: int = setting(16, "Queries to Prometheus at the same time.", ge=1)
    prometheus_interval_seconds: float = setting(
        15.0,
        "Interval of Prometheus' scrapes of the pods, and of the queries. Rates are taken over four of these and at "
        "least 30 s.",
        unit="s",
        ge=1,
        le=45,
    )

    @model_validator(mode="after")
    def _hosts_and_networks(self) -> Self:
        for host in self.prometheus_hosts:
            if not HOST_PATTERN.fullmatch(host):
                raise ValueError(f"prometheus_hosts {host!r} is not HOST or *.DOMAIN, with or without :PORT or :*")
        for network in self.prometheus_networks:
            ip_network(network)
        return self


class ServerSettings(SettingsGroup):
    """Metrics, liveness and readiness."""

    host: str = setting("0.0.0.0", "Address to listen on.", min_length=1)
    port: int = setting(
        9090, "Port of /metrics, /healthz and /readyz; 0 takes a free port and logs it.", ge=0, le=65535
    )
    silence_limit_seconds: float = setting(
        240.0,
        "/healthz fails when a watch has received nothing for this long (API servers send a bookmark a minute), or "
        "work has waited this long without any being finished.",
        unit="s",
        gt=0,
    )


class LogSettings(SettingsGroup):
    """The log on standard error."""

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Lowest severity that is logged.")
    log_format: Literal["json", "text"] = setting("json", "One JSON object per line, or plain lines for a terminal.")


class Settings(SettingsGroup):
    """All settings, by group."""

    cluster: ClusterSettings = ClusterSettings()
    leader: LeaderSettings = LeaderSettings()
    images: ImageSettings = ImageSettings()
    inferentia: InferentiaSettings = InferentiaSettings()
    store: StoreSettings = StoreSettings()
    policy: PolicySettings = PolicySettings()
    jobs: JobSettings = JobSettings()
    work: WorkSettings = WorkSettings()
    scaling: LoadSettings = LoadSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()

    @classmethod
    def load(cls, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> Settings:
        """Settings from flags (by name; None is "not given") over environment over defaults.

        SettingError names the variable or flag, the value and what to write instead, also for variables that begin with
        PENSTOCK_OPERATOR_ and are not settings.
        """
        return load(cls, SETTINGS, _variables(environment), flags or {}, document=DOCUMENT)

    @property
    def operator_namespace(self) -> str:
        """The namespace of the operator itself."""
        if self.cluster.operator_namespace:
            return self.cluster.operator_namespace
        try:
            return NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        except OSError:
            return "penstock-system"

    def new_identity(self) -> str:
        """The name of this process in the Lease: different for each process, also on the same host."""
        return self.leader.identity or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"

    def plan_settings(self) -> PlanSettings:
        """The settings that plans depend on."""
        volume = None
        if self.store.store_host_path or self.store.store_claim:
            volume = StoreVolume(host_path=self.store.store_host_path, claim=self.store.store_claim)
        return PlanSettings(
            runtime_image=self.images.runtime_image,
            optimizer_image=self.images.optimizer_image,
            gateway_image=self.images.gateway_image,
            gateway_cpu=self.images.gateway_cpu,
            gateway_role=self.images.gateway_role,
            toolchain=self.images.toolchain,
            neuron=self.inferentia.plan_settings(),
            store_uri=self.store.store_uri,
            store_volume=volume,
            store_secret=self.store.store_secret,
            store_read_secret=self.store.store_read_secret,
            store_endpoint_url=self.store.store_endpoint_url,
            store_collect_seconds=self.store.store_collect_seconds,
            store_unused_seconds=self.store.store_unused_seconds,
            store_collect_account=self.store.store_collect_account,
            store_collect_secret=self.store.store_collect_secret,
            image_pull_policy=self.images.image_pull_policy,
            image_pull_secrets=self.images.image_pull_secrets,
            ignored_namespaces=frozenset(self.cluster.ignored_namespaces),
            operator_namespace=self.operator_namespace,
            monitoring_labels=_pairs("monitoring_labels", self.cluster.monitoring_labels),
            search_revision=self.jobs.search_revision,
            max_attempts=self.jobs.max_attempts,
            max_concurrent_optimizations=self.jobs.max_concurrent_optimizations,
            max_concurrent_rollouts=self.jobs.max_concurrent_rollouts,
            backoff_seconds=self.jobs.backoff_seconds,
            backoff_limit_seconds=self.jobs.backoff_limit_seconds,
            job_overtime_seconds=self.jobs.job_overtime_seconds,
            unused_grace_seconds=self.jobs.unused_grace_seconds,
            job_memory=self.jobs.job_memory,
            runtime_memory=self.jobs.runtime_memory,
            job_disk=math.ceil(parse_quantity(self.jobs.job_disk)),
            runtime_disk=math.ceil(parse_quantity(self.jobs.runtime_disk)),
            resync_seconds=self.work.resync_seconds,
            gateway_api=self.cluster.gateway_api,
            hpa=self.scaling.hpa,
            keda=self.scaling.keda,
            prometheus_url=self.scaling.prometheus_url,
            allowed=self.policy.allow_list(),
            quotas=read_rules("quotas", self.policy.quotas, NamespaceQuota),
            metadata_for_accounts=self.jobs.metadata_for_accounts,
            prometheus_hosts=self.scaling.prometheus_hosts,
            extra_env=_pairs("extra_env", self.images.extra_env),
            pod_user=self.images.pod_user,
            ca_config_map=self.images.ca_config_map,
            ca_key=self.images.ca_key,
        )


SETTINGS: tuple[Setting, ...] = described(Settings, PREFIX)
"""Every setting, in the order of the groups."""


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[Setting, str, str]]:
    """The variables with the operator's prefix; SettingError for one that is not a setting."""
    by_name = {one.name: one for one in SETTINGS}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or _is_service_link(variable, text):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in by_name:
            close = closest(name, tuple(by_name))
            hint = f"Did you mean {PREFIX}{close.upper()}?" if close else f"{DOCUMENT} lists the settings"
            raise SettingError(f"{variable} is not a setting", field=variable, remedy=hint)
        yield by_name[name], variable, text


_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*")


def _is_service_link(variable: str, text: str) -> bool:
    """Whether the kubelet set it for a Service named penstock-operator (pods with enableServiceLinks)."""
    name = variable.removeprefix(PREFIX)
    return _SERVICE_LINK.fullmatch(name) is not None or (name == "PORT" and "://" in text)
