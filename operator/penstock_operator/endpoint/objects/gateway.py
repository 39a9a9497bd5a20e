"""The objects of an endpoint's gateway: Deployment, ServiceAccount, RoleBinding, Service, NetworkPolicy and budget.

All requests pass the gateway, so it is added and removed without losing one: the endpoint's Service selects the
gateway's pods only while they are available, and the runtime pods otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.resources.endpoint_parts.rollout import Gateway
from penstock_operator.endpoint.objects.deployment import (
    CERTIFICATE,
    KEYS,
    Drain,
    key_volume,
    template_hash,
    tls_volume,
)
from penstock_operator.endpoint.objects.services import monitors
from penstock_operator.endpoint.pods.template import (
    CONTAINER_SECURITY,
    SMALL_DISK,
    TMP,
    environment,
    pod_security,
    quantity,
    scratch,
    with_disk,
)
from penstock_operator.endpoint.snapshot import EndpointSnapshot, Part
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.facts.names import (
    CANARY_PERCENT,
    CONTAINER,
    GATEWAY_STATUS_PORT,
    HTTP_PORT,
    TEMPLATE_HASH,
    Json,
    Ref,
    canary_name,
    gateway_binding_name,
    gateway_labels,
    gateway_name,
    gateway_selector,
    pods_service_name,
    runtime_selector,
)
from penstock_operator.facts.workloads import DeploymentFacts

CONCURRENCY_PER_CORE, LEAST_CONCURRENCY = 16, 32
"""Requests sent to a replica at a time: several times its capacity within the objective, so that an overload shows
in its latency, and few enough that held requests remain for the next replica."""
ANSWER_SECONDS = 300
FINISH_SECONDS = 60
"""After the longest hold time: for requests that were just released."""
MARGIN_SECONDS = 10
"""Between the process's own limit and the kubelet's SIGKILL."""
BASE_BYTES = 96 * 2**20
"""Python, HAProxy, Lua."""
CONNECTION_BYTES = 44 * 2**10
"""Memory of a connection while its request is received: a buffer (penstock_gateway.config.BUFFER_BYTES) and the
stream."""
HELD_BYTES = 56 * 2**10
"""Further memory of a held or queued request: a second buffer for the rest of a long body, and the Lua state."""
TLS_BYTES = 64 * 2**10
"""Further memory of an encrypted connection and of the encrypted connection to a replica that it may need: 400 clients
with half a body took 75 KiB each in all, idle ones 16 KiB."""
KINDS = ("ServiceAccount", "RoleBinding", "Deployment", "PodDisruptionBudget", "NetworkPolicy")


def answers(endpoint: ParsedEndpoint, gateway: DeploymentFacts | None) -> bool:
    """Whether the gateway is available to take requests."""
    return endpoint.wants_gateway and gateway is not None and not gateway.deleting and gateway.available > 0


def divides(endpoint: ParsedEndpoint, gateway: DeploymentFacts | None) -> bool:
    """Whether all its pods are of the present version, and so can send a share of the requests to a canary."""
    return (
        answers(endpoint, gateway)
        and gateway is not None
        and gateway.observed_generation == gateway.generation
        and gateway.updated == gateway.replicas == gateway.available
    )


def memory_bytes(gateway: Gateway, *, tls: bool = False) -> int:
    """Memory of a gateway pod with all connections in use, with as many requests held and queued as may be.
    `tls`: connections are encrypted."""
    waiting = min(2 * gateway.max_held_requests, gateway.connections)
    connection = CONNECTION_BYTES + (TLS_BYTES if tls else 0)
    return BASE_BYTES + gateway.connections * connection + waiting * HELD_BYTES


def part(endpoint: ParsedEndpoint, observed: EndpointSnapshot, *, canary_percent: int = 0) -> Part:
    """The gateway's objects, and its objects that should not exist."""
    wanted = objects(endpoint, observed, canary_percent=canary_percent)
    return Part(apply=tuple(wanted), delete=tuple(superfluous(endpoint, observed)))


def objects(endpoint: ParsedEndpoint, observed: EndpointSnapshot, *, canary_percent: int = 0) -> list[Json]:
    """The gateway's objects in the order to apply them; empty when none is wanted. `canary_percent`: the share of a
    canary; 0: none runs."""
    if not endpoint.wants_gateway:
        return []
    access, policy = _access(endpoint, observed.settings), _policy(endpoint, observed.settings)
    found = [*access, _pods_service(endpoint, canary_percent), policy]
    found.append(_deployment(endpoint, observed.settings))
    if endpoint.spec.gateway.replicas > 1:
        found.append(_budget(endpoint))
    return found


def superfluous(endpoint: ParsedEndpoint, observed: EndpointSnapshot) -> Iterable[Ref]:
    """Existing objects of a gateway that should not exist."""
    name = gateway_name(endpoint.name)
    present = [Ref(kind, name) for kind in KINDS]
    present += [
        Ref("RoleBinding", gateway_binding_name(endpoint.name)),
        Ref("Service", pods_service_name(endpoint.name)),
    ]
    kept = {Ref(value["kind"], value["metadata"]["name"]) for value in objects(endpoint, observed)}
    return [ref for ref in present if ref in observed.present and ref not in kept]


def _owned(
    endpoint: ParsedEndpoint, api_version: str, kind: str, spec: Json | None, **fields: Json | list[Json]
) -> Json:
    value = endpoint.owned(api_version, kind, spec or {}, name=gateway_name(endpoint.name))
    value["metadata"]["labels"] = gateway_labels(endpoint.name)
    if spec is None:
        del value["spec"]
    return {**value, **fields}


def _access(endpoint: ParsedEndpoint, settings: PlanSettings) -> list[Json]:
    """Rights of the gateway: it reads the endpoint slices of its namespace, nothing else."""
    name = gateway_name(endpoint.name)
    subject: Json = {"kind": "ServiceAccount", "name": name, "namespace": endpoint.namespace}
    # The chart makes this role. A Role for each gateway would need the right to write Roles.
    role: Json = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": settings.gateway_role}
    binding = _owned(endpoint, "rbac.authorization.k8s.io/v1", "RoleBinding", None, roleRef=role, subjects=[subject])
    binding["metadata"]["name"] = gateway_binding_name(endpoint.name)
    return [_owned(endpoint, "v1", "ServiceAccount", None), binding]


def _pods_service(endpoint: ParsedEndpoint, canary_percent: int) -> Json:
    """Headless Service: its endpoint slices list the replicas for the gateway, and have its labels."""
    value = endpoint.owned(
        "v1",
        "Service",
        {
            "type": "ClusterIP",
            "clusterIP": "None",
            "selector": runtime_selector(endpoint.name),
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": HTTP_PORT, "protocol": "TCP"}],
        },
        name=pods_service_name(endpoint.name),
    )
    value["metadata"]["labels"] = gateway_labels(endpoint.name)
    if canary_percent:
        value["metadata"]["labels"][CANARY_PERCENT] = str(canary_percent)
    return value


def _policy(endpoint: ParsedEndpoint, settings: PlanSettings) -> Json:
    """Ingress for requests from all pods, and for the status port from the operator and monitoring. Egress is open: the
    API server has no address that a policy could name."""
    spec: Json = {
        "podSelector": {"matchLabels": gateway_selector(endpoint.name)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]},
            {"ports": [{"port": GATEWAY_STATUS_PORT, "protocol": "TCP"}], "from": monitors(settings)},
        ],
    }
    return _owned(endpoint, "networking.k8s.io/v1", "NetworkPolicy", spec)


def _budget(endpoint: ParsedEndpoint) -> Json:
    spec: Json = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": gateway_selector(endpoint.name)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return _owned(endpoint, "policy/v1", "PodDisruptionBudget", spec)


def _deployment(endpoint: ParsedEndpoint, settings: PlanSettings) -> Json:
    spec: Json = {
        "replicas": endpoint.spec.gateway.replicas,
        "selector": {"matchLabels": gateway_selector(endpoint.name)},
        "revisionHistoryLimit": 3,
        "minReadySeconds": 1,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": _template(endpoint, settings),
    }
    return _owned(endpoint, "apps/v1", "Deployment", spec)


def _template(endpoint: ParsedEndpoint, settings: PlanSettings) -> Json:
    gateway, pod = endpoint.spec.gateway, endpoint.spec.pod
    name, drain = gateway_name(endpoint.name), Drain.of(endpoint.spec)
    # Requests that are held, and requests with answers that go through this pod.
    finish = max(gateway.hold_seconds + FINISH_SECONDS, drain.limit - drain.delay)
    tmp_volume, tmp_mount = scratch("tmp", TMP)
    memory = quantity(memory_bytes(gateway, tls=endpoint.spec.tls is not None))
    values = {
        "ENDPOINT": endpoint.name,
        "NAMESPACE": endpoint.namespace,
        "SERVICE": pods_service_name(endpoint.name),
        "PORT": str(HTTP_PORT),
        "STATUS_PORT": str(GATEWAY_STATUS_PORT),
        "MAX_HELD": str(gateway.max_held_requests),
        "MAX_CONNECTIONS": str(gateway.connections),
        "MAX_CONNECTIONS_PER_CLIENT": str(gateway.connections_per_client),
        "HOLD_SECONDS": str(gateway.hold_seconds),
        "CONCURRENCY": str(max(LEAST_CONCURRENCY, CONCURRENCY_PER_CORE * endpoint.spec.cores)),
        "ANSWER_SECONDS": str(ANSWER_SECONDS),
        "DRAIN_SECONDS": str(drain.delay),
        "FINISH_SECONDS": str(finish),
    }
    if endpoint.spec.rollout.canary is not None:
        values["CANARY"] = canary_name(endpoint.name)
    key_volumes, key_mounts = key_volume(endpoint)
    if key_volumes:
        values["KEYS_FOLDER"] = KEYS
    tls_volumes, tls_mounts = tls_volume(endpoint)
    if tls_volumes:
        values["TLS_FOLDER"] = CERTIFICATE
    container: Json = {
        "name": CONTAINER,
        "image": settings.gateway_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python3", "-P", "-m", "penstock_gateway"],
        "env": environment(settings, [], {f"PENSTOCK_GATEWAY_{key}": text for key, text in values.items()}),
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "status", "containerPort": GATEWAY_STATUS_PORT, "protocol": "TCP"},
        ],
        # No CPU limit: throttling the gateway would delay all requests.
        "resources": with_disk(
            {"requests": {"cpu": settings.gateway_cpu, "memory": memory}, "limits": {"memory": memory}}, SMALL_DISK
        ),
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [tmp_mount, *key_mounts, *tls_mounts],
        "livenessProbe": _probe("/healthz", every=10, failures=6),
        "readinessProbe": _probe("/readyz", every=1, failures=3),
    }
    spec: Json = {
        "serviceAccountName": name,
        # The only pods of the operator with a token: see _access.
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": pod_security(settings),
        "terminationGracePeriodSeconds": drain.delay + finish + MARGIN_SECONDS,
        "containers": [container],
        "volumes": [tmp_volume, *key_volumes, *tls_volumes],
        "tolerations": [toleration.to_object() for toleration in pod.tolerations],
        "topologySpreadConstraints": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "maxSkew": 1,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": gateway_selector(endpoint.name)},
                "matchLabelKeys": ["pod-template-hash"],
            }
        ],
    }
    secrets = dict.fromkeys([*(secret.name for secret in pod.image_pull_secrets), *settings.image_pull_secrets])
    if secrets:
        spec["imagePullSecrets"] = [{"name": one} for one in secrets]
    if pod.priority_class_name is not None:
        spec["priorityClassName"] = pod.priority_class_name
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(GATEWAY_STATUS_PORT),
        "prometheus.io/path": "/metrics",
    }
    made: Json = {
        "metadata": {"labels": {**pod.labels, **gateway_labels(endpoint.name)}, "annotations": annotations},
        "spec": {key: value for key, value in spec.items() if value != []},
    }
    annotations[TEMPLATE_HASH] = template_hash(made)
    return made


def _probe(path: str, *, every: int, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": "status"},
        "periodSeconds": every,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }
