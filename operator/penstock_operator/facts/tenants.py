"""The administrator's rules: the sources of models, the quotas and hosts of namespaces, and the settings of pods.

The chart's values `policy.allowedSources`, `policy.quotas` and `policy.exposure.hosts` are lists of such rules, each
for the namespaces that its selector includes. `penstock_operator.limits.quotas` counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from penstock.resources.base import Spec
from penstock.resources.core import ModelSource, Scheme
from penstock.resources.endpoint_parts.exposure import HOST_PATTERN
from penstock.resources.fields.rules import TextRule
from penstock.resources.hardware_class import NamespaceSelector

SourcePrefix = Annotated[
    str,
    Field(
        max_length=512, pattern=r"^(hf|s3|gs|az|oci|pvc|pkg)://([A-Za-z0-9._=+-]+(:[0-9]+)?(/[A-Za-z0-9._=+-]+)*/?)?$"
    ),
]
"""`hf://`, `hf://organisation/`, `s3://bucket/folder/`, `oci://registry:5000/team/`: everything below it."""


class AllowedSources(Spec):
    """Sources of models that endpoints of these namespaces may name."""

    namespace_selector: NamespaceSelector = NamespaceSelector()
    """Without fields: all namespaces."""
    sources: tuple[SourcePrefix, ...] = Field(min_length=1, max_length=64)


class NamespaceQuota(Spec):
    """How much the endpoints of each of these namespaces may have together."""

    namespace_selector: NamespaceSelector = NamespaceSelector()
    """Without fields: all namespaces."""
    cores: int | None = Field(default=None, ge=0)
    """Cores of all replicas. None: not limited."""
    replicas: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.cores is None and self.replicas is None:
            raise ValueError("write cores, replicas or both")
        return self


class HostRule(Spec):
    """Hosts that the endpoints of some namespaces may use (`spec.exposure.host`)."""

    hosts: tuple[
        Annotated[
            str,
            TextRule(rf"(\*\.)?{HOST_PATTERN}", "{self} is not a host", "Write emotion.example.com or *.example.com"),
        ],
        ...,
    ] = Field(min_length=1)
    """Names, or `*.` and a domain for all names in it."""
    namespace_selector: NamespaceSelector
    """Required, so that a host is open to all namespaces only where `{}` is written."""


RuleType = TypeVar("RuleType", bound=Spec)


def read_rules(name: str, text: str, kind: type[RuleType]) -> tuple[RuleType, ...]:
    """The rules in a JSON list; an empty text has none. ValueError names the setting, the field and the problem."""
    try:
        values = json.loads(text or "[]")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(values, list):
        raise ValueError(f"{name} is not a JSON list of rules")  # noqa: TRY004 - as the other problems of a text
    rules = []
    for place, value in enumerate(values):
        try:
            rules.append(kind.model_validate(value))
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in (place, *first["loc"]))
            raise ValueError(f"{name}{where}: {first['msg']}") from error
    return tuple(rules)


def allowed_sources(rules: Sequence[AllowedSources], labels: Mapping[str, str]) -> tuple[str, ...]:
    """What endpoints of a namespace with these labels may name: the sources of all rules that select it."""
    return tuple(source for rule in rules if rule.namespace_selector.includes(labels) for source in rule.sources)


def is_covered(source: ModelSource, prefixes: Sequence[str]) -> bool:
    """Whether the source is below one of these prefixes. They end at a part of the path, with or without a slash:
    `hf://organisation` does not cover `hf://organisation-of-others/model`. Folders of nodes have their own list."""
    if source.scheme is Scheme.FILE:
        return True
    text = f"{source.scheme.value}://{source.location}/"
    return any(text.startswith(prefix if prefix.endswith("/") else f"{prefix}/") for prefix in prefixes)


@dataclass(frozen=True)
class AllowList:
    """The sources and pod settings that endpoints may use (`penstock_operator.endpoint.spec`). Names may end in `*`."""

    file_prefixes: tuple[str, ...] = ()
    """Folders of the nodes with models that `file://` sources may name: absolute paths without `.` and `..`."""
    sources: tuple[AllowedSources, ...] = ()
    """Other sources by namespace. Empty: all. As soon as there is a rule, a namespace has the sources of its rules."""
    tolerations: tuple[str, ...] = ()
    """Keys of taints."""
    node_selectors: tuple[str, ...] = (
        "kubernetes.io/arch",
        "node.kubernetes.io/instance-type",
        "topology.kubernetes.io/region",
        "topology.kubernetes.io/zone",
    )
    """Keys of node labels."""
    labels: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    priority_classes: tuple[str, ...] = ()
    service_accounts: tuple[str, ...] = ()
    """Service accounts in addition to `default`."""
    ingress_annotations: tuple[str, ...] = ("cert-manager.io/*",)
    """Keys of the annotations of Ingresses."""
    hosts: tuple[HostRule, ...] = ()
    """Hosts of Ingresses and HTTPRoutes; empty: no endpoint can be exposed."""
    shared_artefacts: bool = False
    """Namespaces share one store. Endpoints may pin any artefact in it, also one that no OptimizedModel of their
    namespace has."""


_WELL_KNOWN_DOMAINS = (
    "kubernetes.io", "k8s.io", "x-k8s.io", "karpenter.sh", "openshift.io",
    # Cloud roles.
    "azure.workload.identity", "iam.amazonaws.com", "eks.amazonaws.com", "iam.gke.io", "cloud.google.com",
    # Networks and addresses of a pod.
    "k8s.v1.cni.cncf.io", "v1.multus-cni.io", "cni.projectcalico.org", "projectcalico.org", "cilium.io", "ovn.org",
    "vpc.amazonaws.com",
    # Containers, files and secrets that a webhook adds.
    "istio.io", "linkerd.io", "consul.hashicorp.com", "vault.hashicorp.com", "dapr.io", "opentelemetry.io",
    # Seccomp and devices of older runtimes and of CRI-O.
    "container.apparmor.security.beta.kubernetes.io", "cdi.k8s.io", "io.kubernetes.cri-o", "nvidia.com",
)  # fmt: skip
"""Domains that Kubernetes, or what runs on many clusters, reads: `*` alone does not allow their names."""


_WELL_KNOWN_LABELS = frozenset({"app", "k8s-app", "name", "run", "component", "tier", "release", "aadpodidbinding"})
"""Labels without a domain by which Services or cloud identities often select pods."""


def is_allowed(name: str, patterns: Sequence[str], reserved: Callable[[str], bool]) -> bool:
    """Whether a pattern matches: the name itself, or its beginning followed by `*`.

    A reserved name needs a pattern that begins like a reserved one: `*` alone does not allow `node.kubernetes.io/x`.
    """
    for pattern in patterns:
        start = pattern.removesuffix("*")
        if name == pattern:
            return True
        if start != pattern and name.startswith(start) and (reserved(start) or not reserved(name)):
            return True
    return False


def is_well_known(key: str) -> bool:
    """Whether a label, annotation or taint has a meaning for Kubernetes, or for what runs on most clusters."""
    domain, slash, _ = key.rpartition("/")
    if not slash:
        return key in _WELL_KNOWN_LABELS
    return any(domain == known or domain.endswith(f".{known}") for known in _WELL_KNOWN_DOMAINS)


def is_of_the_system(priority_class: str) -> bool:
    """Whether a priority class is one of Kubernetes itself."""
    return priority_class.startswith("system-")
