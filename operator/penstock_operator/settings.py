"""Everything about the operator that can be set, and the one source of its flags, variables and documentation.

A setting is a field of one of the groups below. Its name gives the flag (`--store-uri`) and the environment variable
(`PENSTOCK_OPERATOR_STORE_URI`); its description gives unit and reason.
"""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

import penstock
from penstock.errors import SettingError, closest
from penstock.settings import Setting, SettingsGroup, described, load, setting
from penstock_operator.plan.installation import PlanSettings, StoreVolume

PREFIX = "PENSTOCK_OPERATOR_"
DOCUMENT = "docs/reference/operator.md"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ClusterSettings(SettingsGroup):
    """Which cluster, and what of it."""

    kubeconfig: str = setting(
        "", "File that leads to the cluster. Empty: the service account of the pod, or else $KUBECONFIG."
    )
    namespaces: tuple[str, ...] = setting(
        (), "Namespaces whose ModelEndpoints are looked after, comma-separated. Empty: all of them."
    )
    operator_namespace: str = setting(
        "",
        "Namespace of the operator itself: its Lease lies there, and network policies let it in from there. Empty: "
        "that of the service account, or else penstock-system.",
    )
    api_timeout_seconds: float = setting(15.0, "No call to the API server takes longer.", unit="s", gt=0)


class LeaderSettings(SettingsGroup):
    """Which of several replicas works."""

    lease_name: str = setting("penstock-operator", "Name of the Lease that the leader holds.", min_length=1)
    identity: str = setting("", "Name of this replica in the Lease. Empty: the host's name and a random part.")
    lease_duration_seconds: float = setting(
        10.0,
        "Another replica takes over when the Lease has not been renewed for this long. Rounded up to whole seconds in "
        "the Lease.",
        unit="s",
        gt=0,
    )
    lease_deadline_seconds: float = setting(
        8.0, "The leader ends itself when it could not renew for this long. Less than the duration.", unit="s", gt=0
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
    """What the pods run."""

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
        "CPU that a pod of a gateway asks for. It may use more; 0 where nodes have nothing but cores to give away.",
        unit="quantity",
        min_length=1,
    )
    toolchain: str = setting(
        penstock.__version__,
        "Version of what is inside the optimizer image. Part of the key of every optimisation: another one optimises "
        "every model again.",
        min_length=1,
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = setting("IfNotPresent", "As in a pod's containers.")
    image_pull_secrets: tuple[str, ...] = setting(
        (), "Names of Secrets, in the endpoint's namespace, that pull the images; comma-separated."
    )
    extra_env: tuple[str, ...] = setting(
        (), "Environment of job and serving pods, comma-separated NAME=VALUE: HF_ENDPOINT, proxies."
    )

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        for pair in self.extra_env:
            if not pair.partition("=")[0] or "=" not in pair:
                raise ValueError(f"extra_env {pair!r} is not NAME=VALUE")
        return self


class StoreSettings(SettingsGroup):
    """Where optimised models lie."""

    store_uri: str = setting(
        "file:///var/lib/penstock/artefacts",
        "The artefact store: a folder mounted into every pod, or s3://bucket/prefix and what else fsspec knows.",
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
        "Secret in the endpoint's namespace whose keys become environment variables of job and serving pods: "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and the like.",
    )
    store_collect_seconds: float = setting(
        0.0,
        "Once in this time the store is cleared of what nothing refers to any more. Only where this operator sees "
        "everybody who uses the store: no other cluster, and no namespaces that it does not look after. 0: never.",
        unit="s",
        ge=0,
    )
    store_unused_seconds: float = setting(
        604_800.0, "How old that must be: since it was published, or published again.", unit="s", ge=0
    )

    @model_validator(mode="after")
    def _one_volume(self) -> Self:
        if self.store_host_path and self.store_claim:
            raise ValueError("store_host_path and store_claim are both set: keep one")
        if (self.store_host_path or self.store_claim) and not self.store_uri.startswith("file:"):
            raise ValueError(f"a volume is set for the store {self.store_uri}, which needs none: leave it out")
        return self


class JobSettings(SettingsGroup):
    """How patiently models are optimised."""

    max_attempts: int = setting(5, "Runs of one optimisation, where another run can help.", unit="runs", ge=1)
    backoff_seconds: float = setting(10.0, "Wait before the second run; doubles with each further one.", unit="s", gt=0)
    backoff_limit_seconds: float = setting(600.0, "No wait is longer.", unit="s", gt=0)
    job_overtime_seconds: float = setting(
        900.0, "What a job may take over its budget (image, download, export) before it is ended.", unit="s", ge=0
    )
    unused_grace_seconds: float = setting(
        3600.0, "An OptimizedModel that no endpoint uses is deleted after this.", unit="s", ge=0
    )
    job_memory: str = setting(
        "4Gi", "Memory of an optimisation pod when neither the endpoint nor the model's size says.", unit="quantity"
    )
    runtime_memory: str = setting(
        "2Gi", "Memory of a serving pod while the model's size is not known.", unit="quantity"
    )


class WorkSettings(SettingsGroup):
    """How the operator goes about it."""

    workers: int = setting(
        8,
        "Endpoints that are reconciled at the same time. Each waits for the API server most of the time; more would "
        "only queue there.",
        ge=1,
        le=100,
    )
    resync_seconds: float = setting(
        900.0,
        "Everything is looked at again after about this, whether anything happened or not: from the caches, so without "
        "a call to the API server; and ModelEndpoints are listed once.",
        unit="s",
        gt=0,
    )
    progress_seconds: float = setting(
        5.0, "Between two looks at the log of a running job, for `Optimizing 7/23`.", unit="s", gt=0
    )
    probe_timeout_seconds: float = setting(3.0, "For a serving pod to say on /info where it runs.", unit="s", gt=0)
    probe_concurrency: int = setting(16, "Serving pods that are asked at the same time.", ge=1)


class LoadSettings(SettingsGroup):
    """How the load of endpoints is read."""

    scaling_interval_seconds: float = setting(
        2.0,
        "Between two looks at the load of the endpoints that scale; more where a look takes over a quarter of it.",
        unit="s",
        ge=0.1,
        le=20,
    )
    scrape_timeout_seconds: float = setting(
        2.0, "For a serving pod to give its metrics, where no Prometheus is asked.", unit="s", gt=0
    )
    scrape_concurrency: int = setting(64, "Serving pods whose metrics are read at the same time.", ge=1)
    prometheus_url: str = setting(
        "",
        "The Prometheus that scrapes the serving pods, for endpoints that name none. Empty: the operator reads the "
        "pods itself.",
    )
    prometheus_token_file: str = setting("", "File with a bearer token for it; read again with every question.")
    prometheus_ca_file: str = setting("", "File with the certificates (PEM) that it is trusted by.")
    keda: bool = setting(
        False,
        "KEDA is installed: the operator keeps a ScaledObject for endpoints in the mode KEDA. Without it they scale by "
        "whatever object you make for them.",
    )
    prometheus_timeout_seconds: float = setting(5.0, "For a Prometheus to answer a question.", unit="s", gt=0)
    prometheus_concurrency: int = setting(16, "Questions to Prometheus at the same time.", ge=1)
    prometheus_interval_seconds: float = setting(
        15.0,
        "How often Prometheus scrapes the pods, and how often it is asked. Rates are taken over four of these and at "
        "least 30 s.",
        unit="s",
        ge=1,
        le=45,
    )


class ServerSettings(SettingsGroup):
    """Metrics, liveness and readiness."""

    host: str = setting("0.0.0.0", "Address to listen on.", min_length=1)
    port: int = setting(9090, "Port of /metrics, /healthz and /readyz; 0 takes a free one and logs it.", ge=0, le=65535)
    silence_limit_seconds: float = setting(
        240.0,
        "Not alive when a watch has heard nothing for this long (API servers send a bookmark a minute), or work has "
        "waited this long without any being done.",
        unit="s",
        gt=0,
    )


class LogSettings(SettingsGroup):
    """What is written to standard error."""

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severity that is logged.")
    log_format: Literal["json", "text"] = setting("json", "One JSON object a line, or plain lines for a terminal.")


class Settings(SettingsGroup):
    """All of them, by concern."""

    cluster: ClusterSettings = ClusterSettings()
    leader: LeaderSettings = LeaderSettings()
    images: ImageSettings = ImageSettings()
    store: StoreSettings = StoreSettings()
    jobs: JobSettings = JobSettings()
    work: WorkSettings = WorkSettings()
    scaling: LoadSettings = LoadSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()

    @classmethod
    def load(cls, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> Settings:
        """Settings from flags (by name; None is "not given") over environment over defaults.

        SettingError names the variable or flag, the value and what to write instead, also for variables that begin with
        PENSTOCK_OPERATOR_ and are no setting: the prefix is the operator's alone.
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
        """The name of this process in the Lease: never that of an earlier process, or of a sibling on the same host."""
        return self.leader.identity or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"

    def plan_settings(self) -> PlanSettings:
        """The part that plans depend on."""
        volume = None
        if self.store.store_host_path or self.store.store_claim:
            volume = StoreVolume(host_path=self.store.store_host_path, claim=self.store.store_claim)
        pairs = (pair.partition("=") for pair in self.images.extra_env)
        return PlanSettings(
            runtime_image=self.images.runtime_image,
            optimizer_image=self.images.optimizer_image,
            gateway_image=self.images.gateway_image,
            gateway_cpu=self.images.gateway_cpu,
            toolchain=self.images.toolchain,
            store_uri=self.store.store_uri,
            store_volume=volume,
            store_secret=self.store.store_secret,
            store_collect_seconds=self.store.store_collect_seconds,
            store_unused_seconds=self.store.store_unused_seconds,
            image_pull_policy=self.images.image_pull_policy,
            image_pull_secrets=self.images.image_pull_secrets,
            operator_namespace=self.operator_namespace,
            max_attempts=self.jobs.max_attempts,
            backoff_seconds=self.jobs.backoff_seconds,
            backoff_limit_seconds=self.jobs.backoff_limit_seconds,
            job_overtime_seconds=self.jobs.job_overtime_seconds,
            unused_grace_seconds=self.jobs.unused_grace_seconds,
            job_memory=self.jobs.job_memory,
            runtime_memory=self.jobs.runtime_memory,
            resync_seconds=self.work.resync_seconds,
            keda=self.scaling.keda,
            prometheus_url=self.scaling.prometheus_url,
            extra_env=tuple((name, value) for name, _, value in pairs),
        )


SETTINGS: tuple[Setting, ...] = described(Settings, PREFIX)
"""Every setting, in the order of the groups."""


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[Setting, str, str]]:
    """The variables that are the operator's, which the prefix says; SettingError for one that is no setting."""
    by_name = {one.name: one for one in SETTINGS}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or _is_service_link(variable, text):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in by_name:
            close = closest(name, by_name)
            hint = f"Did you mean {PREFIX}{close.upper()}?" if close else f"{DOCUMENT} lists the settings"
            raise SettingError(f"{variable} is not a setting", field=variable, remedy=hint)
        yield by_name[name], variable, text


_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*")


def _is_service_link(variable: str, text: str) -> bool:
    """What the kubelet sets for a Service named penstock-operator, unless the pod says enableServiceLinks: false."""
    name = variable.removeprefix(PREFIX)
    return _SERVICE_LINK.fullmatch(name) is not None or (name == "PORT" and "://" in text)
