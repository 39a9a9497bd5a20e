"""The Service: one stable address for whatever pods serve."""

from __future__ import annotations

from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.names import HTTP_PORT, SERVICE_PORT, gateway_selector, runtime_selector
from penstock_operator.plan.settings import Json


def service(endpoint: Endpoint, *, through_gateway: bool) -> Json:
    """The desired Service; there from the start, so that the address is known before the first pod is.

    `through_gateway`: it leads to the gateway's pods, which listen on the port of the runtime's.
    """
    return endpoint.owned(
        "v1",
        "Service",
        {
            "type": "ClusterIP",
            "selector": gateway_selector(endpoint.name) if through_gateway else runtime_selector(endpoint.name),
            # The container's port by number: a name would resolve per pod, and both say the same for ever.
            "ports": [{"name": "http", "port": SERVICE_PORT, "targetPort": HTTP_PORT, "protocol": "TCP"}],
        },
    )
