"""The settings of what the administrator allows endpoints to ask for; `settings` has all groups."""

from __future__ import annotations

import posixpath
from typing import Self

from pydantic import model_validator

from penstock.settings import SettingsGroup, setting
from penstock_operator.facts.tenants import AllowedSources, AllowList, HostRule, NamespaceQuota, read_rules


class PolicySettings(SettingsGroup):
    """What ModelEndpoints may ask for. An endpoint that asks for something else is not accepted.

    Names may end in `*`. `*` alone does not match names that Kubernetes gives a meaning: keys in the domains
    kubernetes.io and k8s.io, labels such as `app`, and priority classes that begin with `system-`.
    """

    allowed_file_prefixes: tuple[str, ...] = setting(
        (), "Folders of the nodes whose models file:// sources may name, comma-separated. Empty: no file:// sources."
    )
    allowed_sources: str = setting(
        "",
        "Sources of models by namespace, as a JSON list of rules such as "
        '`[{"namespaceSelector": {"matchLabels": {"team": "a"}}, "sources": ["hf://org/", "s3://bucket/models/"]}]`. '
        "Empty: all sources. As soon as there is a rule, endpoints of a namespace may name what its rules list. "
        "file:// sources are not listed here, but in allowed_file_prefixes.",
    )
    allowed_tolerations: tuple[str, ...] = setting(
        (),
        "Keys of the taints in spec.pod.tolerations, comma-separated. Tolerations of hardware classes need no entry.",
    )
    allowed_node_selectors: tuple[str, ...] = setting(
        AllowList.node_selectors, "Keys of the node labels in spec.pod.nodeSelector, comma-separated."
    )
    allowed_labels: tuple[str, ...] = setting((), "Keys in spec.pod.labels, comma-separated, such as `team,cost/*`.")
    allowed_annotations: tuple[str, ...] = setting((), "Keys in spec.pod.annotations, comma-separated.")
    allowed_priority_classes: tuple[str, ...] = setting((), "Names in spec.pod.priorityClassName, comma-separated.")
    allowed_service_accounts: tuple[str, ...] = setting(
        (), "Names in spec.pod.serviceAccountName in addition to `default`, comma-separated."
    )
    allowed_ingress_annotations: tuple[str, ...] = setting(
        AllowList.ingress_annotations,
        "Keys in spec.exposure.ingress.annotations, comma-separated. Annotations of an ingress controller can change "
        "its configuration for all users: allow single keys of it, never all.",
    )
    exposure_hosts: str = setting(
        "",
        "Hosts that endpoints may use in spec.exposure, as a JSON list of rules such as "
        '`[{"namespaceSelector": {"matchLabels": {"team": "a"}}, "hosts": ["*.a.example.com"]}]`. Empty: none, so that '
        "no endpoint can be exposed.",
    )
    quotas: str = setting(
        "",
        "How many cores and replicas the endpoints of a namespace may have together, as a JSON list such as "
        '`[{"namespaceSelector": {"matchLabels": {"team": "a"}}, "cores": 16, "replicas": 8}]`. Of several that select '
        "a namespace the smallest number counts. Empty: no limits.",
    )
    shared_artefacts: bool = setting(
        False,
        "All namespaces share one artefact store, and optimization.artefact may name any artefact in it. Otherwise "
        "each namespace has a store of its own, and an OptimizedModel of the endpoint's namespace must have the "
        "artefact.",
    )

    @model_validator(mode="after")
    def _patterns(self) -> Self:
        for prefix in self.allowed_file_prefixes:
            if prefix == "/" or posixpath.normpath("/" + prefix.lstrip("/")) != prefix:
                raise ValueError(
                    f"allowed_file_prefixes has {prefix!r}: write the absolute path of a folder below /, without `.`, "
                    "`..` and a slash at its end"
                )
        _ = read_rules("allowed_sources", self.allowed_sources, AllowedSources)
        _ = read_rules("quotas", self.quotas, NamespaceQuota)
        _ = read_rules("exposure_hosts", self.exposure_hosts, HostRule)
        for name, patterns in self._lists().items():
            for pattern in patterns:
                if "*" in pattern[:-1]:
                    raise ValueError(f"{name} has {pattern!r}: * may only be the last character")
        return self

    def allow_list(self) -> AllowList:
        """The settings as plans take them."""
        lists = {name.removeprefix("allowed_"): patterns for name, patterns in self._lists().items()}
        sources = read_rules("allowed_sources", self.allowed_sources, AllowedSources)
        hosts = read_rules("exposure_hosts", self.exposure_hosts, HostRule)
        return AllowList(**lists, sources=sources, hosts=hosts, shared_artefacts=self.shared_artefacts)

    def _lists(self) -> dict[str, tuple[str, ...]]:
        """The lists of names by field."""
        return {name: value for name, value in self if isinstance(value, tuple)}
