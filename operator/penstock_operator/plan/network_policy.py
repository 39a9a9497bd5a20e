"""The NetworkPolicy: requests come in on one port; with a store on a volume nothing goes out."""

from __future__ import annotations

from penstock.artefact_store import StoreScheme, StoreUri
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.names import HTTP_PORT, runtime_selector
from penstock_operator.plan.settings import Json, PlanSettings


def network_policy(endpoint: Endpoint, settings: PlanSettings) -> Json:
    """The desired policy for the runtime pods.

    Anybody in the cluster may send requests (that is what a Service is for; bearer tokens and policies of the user's
    own narrow it further: policies add up only upwards, so this one stays the widest that is needed). A model server
    has no reason to call out: where the artefact comes from a mounted volume, all egress is closed.
    """
    spec: Json = {
        "podSelector": {"matchLabels": runtime_selector(endpoint.name)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}],
    }
    if StoreUri.parse(settings.store_uri).scheme is StoreScheme.FILE:
        # No `egress` at all allows none. An empty list would say so too, but the API server drops it, and then takes
        # each apply for a change.
        spec["policyTypes"] = ["Ingress", "Egress"]
    return endpoint.owned("networking.k8s.io/v1", "NetworkPolicy", spec)
