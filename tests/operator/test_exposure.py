"""Exposed endpoints of two tenants on a real API server, with the Gateway API's own definition of HTTPRoutes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock_operator.policy_settings import PolicySettings
from penstock_operator.settings import ClusterSettings, Settings
from testbed import modules
from testbed.cluster import Cluster
from testbed.control_plane import ControlPlane
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl
from tests.operator.running import running

WITHIN_SECONDS = 240.0
DEFINITION = "crd/httproutes.gateway.networking.k8s.io"
HOST = "emotion.example.com"
ROUTED = "route.example.com"
"""Of the second test: the namespaces of the first one may still be ending."""
NGINX = {"className": "nginx"}
SETTINGS = Settings(
    cluster=ClusterSettings(gateway_api=True),
    policy=PolicySettings(
        exposure_hosts='[{"hosts": ["*.example.com"], "namespaceSelector": {"matchLabels": {"edge": "on"}}}]'
    ),
)


@pytest.fixture(scope="module")
def plane(private_control_plane: ControlPlane) -> ControlPlane:
    """At first without the Gateway API."""
    install_crds(Cluster(private_control_plane.kubeconfig, private_control_plane.kubectl))
    any_class = {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass"}
    private_control_plane.kubectl.apply({**any_class, "metadata": {"name": "any"}, "spec": {}})
    return private_control_plane


def install_http_routes(kubectl: Kubectl) -> None:
    folder = modules.files(modules.GATEWAY_API) / "config" / "crd" / "standard"
    kubectl("apply", "--server-side", "--filename", str(folder / "gateway.networking.k8s.io_httproutes.yaml"))
    kubectl.wait("jsonpath={.status.acceptedNames.kind}=HTTPRoute", DEFINITION)
    kubectl.wait("condition=Established", DEFINITION)


def endpoint(**exposure: Any) -> dict[str, Any]:
    exposed = {"exposure": {"host": HOST, **exposure}} if exposure else {}
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ModelEndpoint",
        "metadata": {"name": "emotion"},
        "spec": {"model": "hf://org/model@main", "task": "text-classification", **exposed},
    }


class Tenant:
    """A namespace with one endpoint."""

    def __init__(self, kubectl: Kubectl, *, may_expose: bool = True) -> None:
        self.kubectl = kubectl
        if may_expose:
            kubectl("label", "namespace", kubectl.namespace, "edge=on")

    async def apply(self, **exposure: Any) -> None:
        await asyncio.to_thread(self.kubectl.apply, endpoint(**exposure))

    async def items(self, kind: str) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self.kubectl.items, kind)

    async def status(self) -> dict[str, Any]:
        found = await asyncio.to_thread(self.kubectl.get, "modelendpoint", "emotion")
        return dict(found.get("status") or {})

    async def becomes(self, reason: str) -> dict[str, Any]:
        """Wait for the reason of the condition Exposed; returns the condition."""
        found: dict[str, Any] = {}

        async def there() -> bool:
            nonlocal found
            conditions = (await self.status()).get("conditions") or []
            found = next((one for one in conditions if one["type"] == "Exposed"), {})
            return found.get("reason") == reason

        await until(there, lambda: f"{reason} was expected, and Exposed is {found}")
        return found


async def until(condition: Callable[[], Awaitable[bool]], what: Callable[[], str]) -> None:
    end = time.monotonic() + WITHIN_SECONDS
    while not await condition():
        assert time.monotonic() < end, what()
        await asyncio.sleep(0.1)


@pytest.mark.slow
def test_tenants_expose_endpoints_and_cannot_take_each_other_s_host(plane: ControlPlane) -> None:
    whole = Cluster(plane.kubeconfig, plane.kubectl)

    async def play(first: Tenant, second: Tenant, third: Tenant) -> None:
        async with running(plane.kubeconfig, "", settings=SETTINGS):
            issuer = {"cert-manager.io/cluster-issuer": "letsencrypt"}
            await first.apply(ingress={**NGINX, "tlsSecretName": "emotion-tls", "annotations": issuer})
            await first.becomes("Exposed")
            (made,) = await first.items("ingresses")
            assert made["metadata"]["annotations"] == issuer
            assert made["spec"]["rules"][0]["host"] == HOST
            assert (await first.status())["publicUrl"] == f"https://{HOST}"

            # The attacks: the same host, a host without permission, code for the ingress controller.
            await second.apply(ingress=NGINX)
            taken = await second.becomes("HostTaken")
            assert first.kubectl.namespace not in taken["message"]
            await third.apply(ingress=NGINX)
            await third.becomes("HostNotAllowed")
            snippet = {"nginx.ingress.kubernetes.io/configuration-snippet": "return 200;"}
            await second.apply(host="second.example.com", ingress={**NGINX, "annotations": snippet})
            await second.becomes("AnnotationNotAllowed")
            assert await second.items("ingresses") == []
            assert await third.items("ingresses") == []

            # The host becomes free.
            await second.apply(ingress=NGINX)
            await second.becomes("HostTaken")
            await first.apply(host="other.example.com", ingress=NGINX)
            await second.becomes("Exposed")
            await until(lambda: moved(first, made), lambda: "the Ingress has not the new host alone")

            await first.apply()
            await until(lambda: gone(first), lambda: "the Ingress or its URL stays")

    async def moved(tenant: Tenant, before: dict[str, Any]) -> bool:
        (found,) = await tenant.items("ingresses")
        rule = {**before["spec"]["rules"][0], "host": "other.example.com"}
        unannotated = "annotations" not in found["metadata"]
        return unannotated and bool(found["spec"] == {"ingressClassName": "nginx", "rules": [rule]})

    async def gone(tenant: Tenant) -> bool:
        return await tenant.items("ingresses") == [] and not (await tenant.status()).get("publicUrl")

    with whole.temporary_namespace() as one, whole.temporary_namespace() as two, whole.temporary_namespace() as three:
        plain = plane.kubectl
        tenants = Tenant(plain.within(one)), Tenant(plain.within(two)), Tenant(plain.within(three), may_expose=False)
        asyncio.run(play(*tenants))


@pytest.mark.slow
def test_an_http_route_is_created_where_the_gateway_api_is_installed(plane: ControlPlane) -> None:
    route = {"parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}]}

    async def play(tenant: Tenant) -> None:
        async with running(plane.kubeconfig, "", settings=SETTINGS):
            await tenant.apply(host=ROUTED, path="/nlp", httpRoute=route)
            await tenant.becomes("NoGatewayApi")
        await asyncio.to_thread(install_http_routes, tenant.kubectl)
        async with running(plane.kubeconfig, "", settings=SETTINGS):
            await tenant.becomes("Exposed")
            (made,) = await tenant.items("httproutes")
            (rule,) = made["spec"]["rules"]
            assert made["spec"]["parentRefs"][0].items() >= route["parentRefs"][0].items()
            assert rule["filters"][0]["urlRewrite"]["path"]["replacePrefixMatch"] == "/"
            assert (await tenant.status())["publicUrl"] == f"https://{ROUTED}/nlp"

            await tenant.apply(host=ROUTED, ingress=NGINX)
            await until(lambda: only_ingress(tenant), lambda: "there are other routes than one Ingress")

    async def only_ingress(tenant: Tenant) -> bool:
        return (len(await tenant.items("ingresses")), len(await tenant.items("httproutes"))) == (1, 0)

    with Cluster(plane.kubeconfig, plane.kubectl).temporary_namespace() as name:
        asyncio.run(play(Tenant(plane.kubectl.within(name))))
