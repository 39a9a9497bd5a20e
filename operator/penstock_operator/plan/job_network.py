"""The network of jobs: what their pods may reach, and whether their clients ask for the identity of the node.

A job downloads what a user named, so it must not reach the metadata service of its node, which hands out the node's
credentials, and no other pod has a reason to connect to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.resources.pod import Pod
from penstock_operator.plan.endpoint import DEFAULT_ACCOUNT
from penstock_operator.plan.installation import Json, PlanSettings

METADATA_ADDRESSES = {
    # AWS, Google, Azure and others; Azure's WireServer; Alibaba.
    "0.0.0.0/0": ("169.254.169.254/32", "168.63.129.16/32", "100.100.100.200/32"),
    # AWS; Google.
    "::/0": ("fd00:ec2::254/128", "fd20:ce::254/128"),
}
"""Block of all addresses -> those of the metadata services of clouds."""


def egress(*, metadata: bool) -> list[Json]:
    """Egress rules of a NetworkPolicy: all addresses but those of the metadata services; with `metadata` those too."""
    blocks = [
        {"ipBlock": {"cidr": cidr} if metadata else {"cidr": cidr, "except": list(excepted)}}
        for cidr, excepted in METADATA_ADDRESSES.items()
    ]
    # Some network plugins do not count pods, such as those of the cluster's DNS, among the addresses of a block.
    return [{"to": [{"namespaceSelector": {}}, *blocks]}]


def network_policy(name: str, namespace: str, labels: Mapping[str, str], owner: Json, *, metadata: bool) -> Json:
    """A NetworkPolicy for the pods of a job, which have these labels: no ingress, and `egress`."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels), "ownerReferences": [owner]},
        "spec": {
            "podSelector": {"matchLabels": dict(labels)},
            # Ingress without rules denies all.
            "policyTypes": ["Ingress", "Egress"],
            "egress": egress(metadata=metadata),
        },
    }


def has_identity(pod: Pod) -> bool:
    """Whether the pods have a service account of their own, which the administrator allowed."""
    return pod.service_account_name not in {None, DEFAULT_ACCOUNT}


def reaches_metadata(pod: Pod, settings: PlanSettings) -> bool:
    """Whether pods may reach the metadata service: with a service account, where the administrator wants it."""
    return settings.metadata_for_accounts and has_identity(pod)


WITHOUT_IDENTITY = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_GCE_CHECK": "true",
    "AZURE_TOKEN_CREDENTIALS": "EnvironmentCredential",
}
"""Variables with which the clients of object stores do not ask the metadata service: they fail at once instead of
after its time-outs."""


def identity_variables(pod: Pod) -> dict[str, str]:
    """The variables for the pods of an endpoint with these settings."""
    return {} if has_identity(pod) else dict(WITHOUT_IDENTITY)
