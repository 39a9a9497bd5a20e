"""The network of jobs: the addresses that their pods may reach, and whether their clients use the identity of the node.

A job downloads files of a user's choice, so it must not reach the metadata service of its node, which hands out the
node's credentials. Only the operator has a reason to connect to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import DEFAULT_ACCOUNT, Json

METADATA_ADDRESSES = tuple(
    map(
        ip_address,
        (
            "169.254.169.254",  # AWS, Google, Azure and others
            "168.63.129.16",  # Azure's WireServer
            "100.100.100.200",  # Alibaba
            "192.0.0.192",  # Oracle
            "fd00:ec2::254",  # AWS
            "fd20:ce::254",  # Google
        ),
    )
)
"""Services of clouds that give the credentials of a node, or of a pod's account, to each pod of the node."""


def egress(*, metadata: bool) -> list[Json]:
    """Egress rules of a NetworkPolicy: all addresses except the metadata services; with `metadata` these too."""
    blocks: list[Json] = []
    for version, everything in ((4, "0.0.0.0/0"), (6, "::/0")):
        services = [f"{one}/{one.max_prefixlen}" for one in METADATA_ADDRESSES if one.version == version]
        blocks.append({"ipBlock": {"cidr": everything} if metadata else {"cidr": everything, "except": services}})
    # Some network plugins do not count pods, such as the cluster's DNS, among the addresses of a block.
    return [{"to": [{"namespaceSelector": {}}, *blocks]}]


def network_policy(
    name: str,
    namespace: str,
    labels: Mapping[str, str],
    *,
    metadata: bool,
    ingress: Sequence[Json] = (),
    owners: Sequence[Json] = (),
) -> Json:
    """A NetworkPolicy for the pods of jobs, which have these labels: these rules of ingress, and `egress`.

    It must exist before a job with such pods: a pod that starts earlier has an open network for a while.
    """
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels), "ownerReferences": list(owners)},
        "spec": {
            "podSelector": {"matchLabels": dict(labels)},
            # Ingress without rules denies all. An empty list means the same, but the API server drops it and then
            # treats each apply as a change.
            "policyTypes": ["Ingress", "Egress"],
            **({"ingress": list(ingress)} if ingress else {}),
            "egress": egress(metadata=metadata),
        },
    }


def has_identity(account: str | None) -> bool:
    """Whether pods with this service account have another identity, which the administrator allowed."""
    return account not in {None, "", DEFAULT_ACCOUNT}


def reaches_metadata(account: str | None, settings: PlanSettings) -> bool:
    """Whether pods may reach the metadata service: with a service account, where the administrator wants it."""
    return settings.metadata_for_accounts and has_identity(account)


WITHOUT_IDENTITY = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_GCE_CHECK": "true",
    "AZURE_TOKEN_CREDENTIALS": "EnvironmentCredential",
}
"""Variables with which the clients of object stores do not use the metadata service: they fail at once instead of
after its time-outs."""


def identity_variables(account: str | None) -> dict[str, str]:
    """The variables for pods with this service account."""
    return {} if has_identity(account) else dict(WITHOUT_IDENTITY)
