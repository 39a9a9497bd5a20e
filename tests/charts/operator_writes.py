"""Writes of the operator's account: what plans make, and writes that a process with its token could try."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse

from penstock_operator.cluster.errors import ClusterError
from penstock_operator.cluster.kubernetes import KubernetesPort, load_configuration
from penstock_operator.endpoint.optimization import collection
from penstock_operator.endpoint.optimization.collection import CollectionHome, CollectionTarget
from penstock_operator.facts.names import MANAGED_BY
from tests.charts.helm import NAMESPACE
from tests.operator.endpoint.kube import SETTINGS, Json, Kube
from tests.operator.endpoint.test_api_server import MADE

FILES = "/srv/models"
ACCOUNTS = ["cloud-*"]
VALUES: Json = {"policy": {"fileSources": [FILES], "pod": {"serviceAccounts": ACCOUNTS}}}
"""Values of the chart under which all of `made` is allowed."""
ALLOWED = replace(SETTINGS.allowed, file_prefixes=(FILES,), service_accounts=tuple(ACCOUNTS))
COLLECTOR = replace(SETTINGS, store_collect_account="penstock-operator-store", operator_namespace=NAMESPACE)

ENDPOINTS: dict[str, Callable[[], Kube]] = {
    **MADE,
    "a folder of the nodes": lambda: Kube(model=f"file://{FILES}/bert", settings=replace(SETTINGS, allowed=ALLOWED)),
    "a cloud role": lambda: Kube(
        settings=replace(SETTINGS, allowed=ALLOWED), pod={"serviceAccountName": "cloud-reader"}
    ),
    "an Ingress": lambda: Kube(
        exposure={
            "host": "emotion.example.com",
            "ingress": {"className": "nginx", "annotations": {"cert-manager.io/cluster-issuer": "x"}},
        }
    ),
    "keys": lambda: Kube(auth={"secretName": "keys"}, gateway={"mode": "Always"}),
}


def desired(value: Json, namespace: str = "default") -> Json:
    """The object as the operator applies it, in this namespace."""
    found = copy.deepcopy({part: field for part, field in value.items() if part != "status"})
    kept = ("name", "labels", "annotations", "ownerReferences")
    metadata = {part: found["metadata"][part] for part in kept if part in found["metadata"]}
    for subject in found.get("subjects", []):
        subject["namespace"] = namespace
    return {**found, "metadata": {**metadata, "namespace": namespace}}


def made(name: str) -> Iterator[Json]:
    """The objects of one of `ENDPOINTS`, once its model is optimised."""
    yield from (desired(value) for value in _planned(name))


@cache
def _planned(name: str) -> tuple[Json, ...]:
    objects = ENDPOINTS[name]().optimised().objects
    return tuple(value for (kind, _), value in objects.items() if kind != "OptimizedModel")


def made_for_the_store() -> tuple[Json, Json]:
    """A job that collects garbage in the store, and its NetworkPolicy."""
    job = collection.job(CollectionTarget(CollectionHome(NAMESPACE), "n1"), 1, COLLECTOR, ("0" * 16,))
    return job, collection.policy(NAMESPACE, COLLECTOR)


def one(kind: str, name: str, endpoint: str = "the richest") -> Json:
    """The object of this kind whose name ends so."""
    (found,) = [value for value in made(endpoint) if value["kind"] == kind and value["metadata"]["name"].endswith(name)]
    return found


def changed(value: Json, path: str, to: object) -> Json:
    """The object with another value at this path (`spec.containers.0.image`)."""
    found = copy.deepcopy(value)
    *parents, last = path.split(".")
    at: Any = found
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
    if to is None:
        del at[last]
    elif isinstance(at, list):
        at.append(to)
    else:
        at[last] = to
    return found


POD, CONTAINER = "spec.template.spec", "spec.template.spec.containers.0"
NO_OWNER = "belong to a ModelEndpoint or an OptimizedModel"
ROOT = "run as a user that is not root, without privileges"
FOLDERS = "mount no folder of the node"
MOUNTS: list[Json] = [{"name": "x", "mountPath": "/x"}]


def with_folder(value: Json, path: str, *, read_only: bool = False) -> Json:
    """The object with a folder of the node in its pods."""
    volume = {"name": "x", "hostPath": {"path": path}}
    mount = {"name": "x", "mountPath": "/x", "readOnly": read_only}
    return changed(changed(value, f"{POD}.volumes.+", volume), f"{CONTAINER}.volumeMounts.+", mount)


def on_pods(what: str, value: Json) -> Iterator[tuple[str, Json, str]]:
    """Attacks by the pods of a Deployment or a Job: name, object, and a part of the message of the refusal."""
    escalating = changed(value, f"{CONTAINER}.securityContext.allowPrivilegeEscalation", None)
    yield f"{what}: privilege escalation", escalating, ROOT
    yield f"{what}: privileged", changed(escalating, f"{CONTAINER}.securityContext.privileged", True), ROOT
    yield f"{what}: root", changed(value, f"{CONTAINER}.securityContext.runAsUser", 0), ROOT
    yield f"{what}: root in the pod", changed(value, f"{POD}.securityContext.runAsUser", 0), ROOT
    yield f"{what}: no security context", changed(value, f"{CONTAINER}.securityContext", None), ROOT
    yield (
        f"{what}: capabilities",
        changed(value, f"{CONTAINER}.securityContext.capabilities.add", ["SYS_PTRACE"]),
        ROOT,
    )
    yield f"{what}: no seccomp", changed(value, f"{POD}.securityContext.seccompProfile.type", "Unconfined"), ROOT
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        yield f"{what}: {field}", changed(value, f"{POD}.{field}", True), "do not share the network, processes"
    yield f"{what}: a node", changed(value, f"{POD}.nodeName", "control-plane"), "are placed by a scheduler"
    yield f"{what}: /etc", with_folder(value, "/etc/kubernetes", read_only=True), FOLDERS
    token = {"name": "x", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
    yield f"{what}: a token volume", changed(value, f"{POD}.volumes.+", token), FOLDERS
    yield f"{what}: an account", changed(value, f"{POD}.serviceAccountName", "deployer"), "service account default"
    yield (
        f"{what}: a token",
        changed(value, f"{POD}.automountServiceAccountToken", True),
        "only gateways have a token",
    )
    other = {"name": "x", "image": "x"}
    yield f"{what}: a container", changed(value, f"{POD}.containers.+", other), "have one container"
    yield f"{what}: an init container", changed(value, f"{POD}.initContainers", [other]), "have one container"
    priority = "system-node-critical"
    yield f"{what}: a priority", changed(value, f"{POD}.priorityClassName", priority), "no priority class"
    from_secret = [{"secretRef": {"name": "x"}}]
    yield f"{what}: a whole Secret", changed(value, f"{CONTAINER}.envFrom", from_secret), "single keys of Secrets"


def attacks() -> Iterator[tuple[str, Json, str]]:
    """All attacks, in the same form. Each is refused by one policy: the API server answers with the message of one."""
    serving, job = one("Deployment", "emotion"), one("Job", "-1")
    gateway = one("Deployment", "-gateway")
    account, binding = one("ServiceAccount", "-gateway"), one("RoleBinding", "-gateway-slices")
    service, policy = one("Service", "emotion"), one("NetworkPolicy", "emotion")
    labels = {key: value for key, value in serving["metadata"]["labels"].items() if key != MANAGED_BY}
    yield "no label", changed(serving, "metadata.labels", labels), f"have the label {MANAGED_BY}=penstock"
    yield "no owner", changed(serving, "metadata.ownerReferences", None), NO_OWNER
    owner = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "emotion", "uid": "0"}]
    yield "an owner of another kind", changed(serving, "metadata.ownerReferences", owner), NO_OWNER
    yield "a name of its own", changed(serving, "metadata.name", "x"), NO_OWNER
    yield "a job of its own", changed(job, "metadata.ownerReferences", None), NO_OWNER
    yield from on_pods("Deployment", serving)
    yield from on_pods("job", job)
    yield (
        "Deployment: a writable store",
        with_folder(serving, "/var/lib/penstock/artefacts"),
        "only jobs of the operator",
    )
    yield "Deployment: a source of files", with_folder(serving, FILES, read_only=True), FOLDERS
    yield "job: a writable source of files", with_folder(job, FILES), "only to that of the artefact store"
    secret = {"name": "x", "secret": {"secretName": "x"}}
    yield "job: a Secret as a volume", changed(job, f"{POD}.volumes.+", secret), FOLDERS
    yield (
        "gateway: another account",
        changed(gateway, f"{POD}.serviceAccountName", "x-gateway"),
        "service account default",
    )
    cloud = changed(account, "metadata.annotations", {"eks.amazonaws.com/role-arn": "admin"})
    yield "account: a cloud role", cloud, "no annotation"
    yield "account: another name", changed(account, "metadata.name", "emotion"), "service accounts of gateways only"
    cluster_role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "penstock-operator-gateway"}
    users = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "x"}]
    yield (
        "binding: a user",
        changed({**binding, "roleRef": cluster_role}, "subjects", users),
        "only to the service account",
    )
    elsewhere = [{"kind": "ServiceAccount", "name": "x-gateway", "namespace": "kube-system"}]
    yield "binding: another namespace", changed(binding, "subjects", elsewhere), "of the same namespace"
    select = "select only pods of their own endpoint"
    yield "Service: other pods", changed(service, "spec.selector", {"app": "payments"}), select
    neighbour = {**service["spec"]["selector"], "penstock.dev/endpoint": "neighbour"}
    yield "Service: another endpoint", changed(service, "spec.selector", neighbour), select
    yield "Service: a load balancer", changed(service, "spec.type", "LoadBalancer"), "type ClusterIP"
    yield "Service: an external address", changed(service, "spec.externalIPs", ["192.0.2.1"]), "no external addresses"
    yield "NetworkPolicy: all pods", changed(policy, "spec.podSelector", {}), select
    scaler = one("HorizontalPodAutoscaler", "emotion", "an HPA")
    target = changed(scaler, "spec.scaleTargetRef.name", "payments")
    yield "HPA: another Deployment", target, "scale only the Deployment of their own endpoint"
    route, backend = one("Ingress", "emotion", "an Ingress"), "spec.rules.0.http.paths.0.backend.service.name"
    yield "Ingress: another Service", changed(route, backend, "payments"), "lead only to the Service of their own"
    other = {"service": {"name": "payments", "port": {"number": 80}}}
    yield "Ingress: a default", changed(route, "spec.defaultBackend", other), "lead only to the Service of their own"
    snippet = {"nginx.ingress.kubernetes.io/configuration-snippet": "return 200;"}
    yield "Ingress: an annotation", changed(route, "metadata.annotations", snippet), "no annotations but those of"
    collecting = changed(made_for_the_store()[0], "metadata.namespace", "default")
    yield "collection: another namespace", collecting, "service account default"


class DryRun(KubernetesPort):
    """The operator's client, whose writes the API server checks and does not store."""

    async def _send(self, *request: Any, query: Mapping[str, str] | None = None, **more: Any) -> ClientResponse:
        return await super()._send(*request, query={**(query or {}), "dryRun": "All"}, **more)


def refusal(kubeconfig: Path, value: Json) -> str:
    """Why the API server would refuse that this user applies the object as the operator does; empty: it accepts it."""

    async def applied() -> str:
        async with DryRun(await load_configuration(str(kubeconfig))) as port:
            try:
                await port.apply(value)
            except ClusterError as error:
                return str(error)
            return ""

    return asyncio.run(applied())


ATTACKS = {name: (value, message) for name, value, message in attacks()}
