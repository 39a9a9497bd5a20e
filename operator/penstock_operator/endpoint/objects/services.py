"""The Service, the NetworkPolicy and the PodDisruptionBudget of the runtime pods."""

from __future__ import annotations

from penstock.artefact_store import StoreScheme
from penstock_operator.endpoint.pods.network import egress, reaches_metadata
from penstock_operator.endpoint.snapshot import EndpointSnapshot, Part
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import (
    GRPC_PORT,
    HTTP_PORT,
    INTERNAL_PORT,
    Json,
    Ref,
    gateway_selector,
    runtime_selector,
)


def service_part(endpoint: ParsedEndpoint, observed: EndpointSnapshot, replicas: int, *, through_gateway: bool) -> Part:
    """Service, NetworkPolicy, and the PodDisruptionBudget where there are several replicas."""
    always = (service(endpoint, through_gateway=through_gateway), network_policy(endpoint, observed.settings))
    budget = disruption_budget(endpoint, replicas)
    if budget is not None:
        return Part(apply=(*always, budget))
    ref = Ref("PodDisruptionBudget", endpoint.name)
    return Part(apply=always, delete=(ref,) if ref in observed.present else ())


def service(endpoint: ParsedEndpoint, *, through_gateway: bool) -> Json:
    """The desired Service. It exists from the start, so that the address is known before the first pod is ready.

    `through_gateway`: it selects the gateway's pods, which listen on the same port as the runtime's.
    """
    # By number: a port name would be resolved for each pod.
    port: Json = {"name": "http", "port": endpoint.service_port, "targetPort": HTTP_PORT, "protocol": "TCP"}
    if endpoint.spec.tls is not None:
        # Ingress controllers recognise either.
        port |= {"name": "https", "appProtocol": "https"}
    ports = [port]
    if endpoint.spec.serving.grpc:
        protocol = "kubernetes.io/h2c" if endpoint.spec.tls is None else "grpcs"
        ports.append(
            {"name": "grpc", "port": GRPC_PORT, "targetPort": GRPC_PORT, "protocol": "TCP", "appProtocol": protocol}
        )
    return endpoint.owned(
        "v1",
        "Service",
        {
            "type": "ClusterIP",
            "selector": gateway_selector(endpoint.name) if through_gateway else runtime_selector(endpoint.name),
            "ports": ports,
        },
    )


def network_policy(endpoint: ParsedEndpoint, settings: PlanSettings) -> Json:
    """The desired NetworkPolicy of the runtime pods.

    All pods of the cluster may send requests; users may add narrower policies. Only the operator and the namespaces of
    monitoring may reach the internal port. (The kubelet's probes always may.) A runtime makes no outgoing connections
    when its artefact comes from a mounted volume, so egress is closed then; else it is closed to metadata services.
    """
    open_ports = [HTTP_PORT, GRPC_PORT] if endpoint.spec.serving.grpc else [HTTP_PORT]
    spec: Json = {
        "podSelector": {"matchLabels": runtime_selector(endpoint.name)},
        # Egress without rules denies all. An empty list means the same, but the API server drops it and then treats
        # each apply as a change.
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"ports": [{"port": port, "protocol": "TCP"} for port in open_ports]},
            {"ports": [{"port": INTERNAL_PORT, "protocol": "TCP"}], "from": monitors(settings)},
        ],
    }
    if settings.whole_store.scheme is not StoreScheme.FILE:
        spec["egress"] = egress(metadata=reaches_metadata(endpoint.spec.pod.service_account_name, settings))
    return endpoint.owned("networking.k8s.io/v1", "NetworkPolicy", spec)


def monitors(settings: PlanSettings) -> list[Json]:
    """The peers of a NetworkPolicy that may read metrics: the namespaces of the operator and of monitoring."""
    chosen = [{"kubernetes.io/metadata.name": settings.operator_namespace}]
    if settings.monitoring_labels:
        chosen.append(dict(settings.monitoring_labels))
    return [{"namespaceSelector": {"matchLabels": labels}} for labels in chosen]


def disruption_budget(endpoint: ParsedEndpoint, replicas: int) -> Json | None:
    """The desired PodDisruptionBudget: node drains evict one replica at a time. None for fewer than two replicas,
    where it would block every drain."""
    if replicas < 2:
        return None
    return endpoint.owned(
        "policy/v1",
        "PodDisruptionBudget",
        {
            "maxUnavailable": 1,
            "selector": {"matchLabels": runtime_selector(endpoint.name)},
            # Pods that are not ready must not block a drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    )
