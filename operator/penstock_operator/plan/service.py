"""The Service: one stable address for whatever pods serve."""

from __future__ import annotations

from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.names import HTTP_PORT, SERVICE_PORT, runtime_selector
from penstock_operator.plan.settings import Json


def service(endpoint: Endpoint) -> Json:
    """The desired Service; there from the start, so that the address is known before the first pod is."""
    return endpoint.owned(
        "v1",
        "Service",
        {
            "type": "ClusterIP",
            "selector": runtime_selector(endpoint.name),
            # The container's port by number: a name would resolve per pod, and both say the same for ever.
            "ports": [{"name": "http", "port": SERVICE_PORT, "targetPort": HTTP_PORT, "protocol": "TCP"}],
        },
    )
