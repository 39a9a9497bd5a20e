"""Names that the operator writes: labels, annotations and object names. The same input always gives the same name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

GROUP = "penstock.dev"
API_VERSION = f"{GROUP}/v1alpha1"
FIELD_MANAGER = "penstock-operator"

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
MANAGED_BY = "app.kubernetes.io/managed-by"
ENDPOINT = f"{GROUP}/endpoint"
OPTIMIZED_MODEL = f"{GROUP}/optimized-model"
ATTEMPT = f"{GROUP}/attempt"
"""Label of a Job and its pod: the number of the run, from 1."""
ARTEFACT = f"{GROUP}/artefact"
"""Annotation of runtime pods: the digest of the artefact that they serve. It is too long for a label."""
CORES = f"{GROUP}/cores"
FP32 = f"{GROUP}/fp32"
"""Annotation of an endpoint's Deployment: `cores` of one replica."""
TEMPLATE_HASH = f"{GROUP}/template-hash"
"""Annotation of runtime pods: the hash of the pod template as the operator wrote it."""
ROLLOUT_SINCE = f"{GROUP}/rollout-waits-since"
"""Annotation of a paused Deployment: since when its new pod template waits for a slot."""
ROLLOUT_BEGAN = f"{GROUP}/rollout-began"
"""Annotation of a Deployment: when its last rollout got a slot."""

CANARY = f"{GROUP}/canary"
"""Label of the pods of a canary."""
CANARY_PERCENT = f"{GROUP}/canary-percent"
"""Label of the Service that lists the runtime pods, which Kubernetes copies to its endpoint slices: the share of the
requests that the gateway sends to the pods of the canary."""

RUNTIME = "penstock-runtime"
OPTIMIZER = "penstock-optimizer"
GATEWAY = "penstock-gateway"
MANAGER = "penstock"
DEFAULT_ACCOUNT = "default"
"""The service account that pods have without `serviceAccountName`."""
CONTAINER = "penstock"
"""The name of the one container of every pod."""
HTTP_PORT = 8080
GRPC_PORT = 8082
"""Of pods and Services with `serving.grpc`."""
INTERNAL_PORT = 8081
"""Port of a runtime pod's probes, metrics and `/info`, which the Service does not have, and of a job's `/progress`."""
SERVICE_PORT = 80
SERVICE_TLS_PORT = 443
GATEWAY_STATUS_PORT = 8404
"""Port of the gateway's metrics and probes, and of `/demand`."""

LABEL_LIMIT = 63
POD_PREFIX_LIMIT = 57
"""The API server makes the names of pods from a prefix of 58 characters: the name of the Deployment, a dash, and
more."""


def shortened(name: str, *, suffix: str = "", limit: int = LABEL_LIMIT) -> str:
    """`name` and `suffix` within `limit` characters, by default the 63 of a DNS label; a cut name ends in a digest of
    the whole name."""
    if len(name) + len(suffix) <= limit:
        return f"{name}{suffix}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: limit - len(suffix) - 9].rstrip('-.')}-{digest}{suffix}"


def runtime_selector(endpoint: str) -> dict[str, str]:
    """Labels that select the runtime pods of an endpoint. They never change: a Deployment's selector is immutable."""
    return {NAME: RUNTIME, ENDPOINT: endpoint}


def runtime_labels(endpoint: str) -> dict[str, str]:
    """Labels of an endpoint's objects."""
    return {**runtime_selector(endpoint), INSTANCE: endpoint, MANAGED_BY: MANAGER}


def gateway_name(endpoint: str) -> str:
    """The name of the objects of an endpoint's gateway."""
    return shortened(endpoint, suffix="-gateway")


def canary_name(endpoint: str) -> str:
    """The name of the Deployment of an endpoint's canary. The names of its pods begin with it and a dash."""
    return shortened(endpoint, suffix="-canary", limit=POD_PREFIX_LIMIT)


def gateway_binding_name(endpoint: str) -> str:
    """The name of the RoleBinding of a gateway. Version 0.2.0 made one with the name of the gateway, for a Role of its
    own: the role of a binding cannot be changed."""
    return shortened(endpoint, suffix="-gateway-slices")


def pods_service_name(endpoint: str) -> str:
    """The name of the headless Service that lists the runtime pods for the gateway."""
    return shortened(endpoint, suffix="-pods")


def gateway_names(endpoint: str) -> frozenset[str]:
    """The names of all objects of an endpoint's gateway."""
    return frozenset({gateway_name(endpoint), gateway_binding_name(endpoint), pods_service_name(endpoint)})


def gateway_selector(endpoint: str) -> dict[str, str]:
    """Labels that select the gateway pods of an endpoint."""
    return {NAME: GATEWAY, ENDPOINT: endpoint}


def gateway_labels(endpoint: str) -> dict[str, str]:
    """Labels of all objects of an endpoint's gateway."""
    return {**gateway_selector(endpoint), INSTANCE: endpoint, MANAGED_BY: MANAGER}


def model_labels(optimized_model: str) -> dict[str, str]:
    """Labels of the objects of an OptimizedModel."""
    return {NAME: OPTIMIZER, INSTANCE: optimized_model, MANAGED_BY: MANAGER, OPTIMIZED_MODEL: optimized_model}


def job_name(optimized_model: str, attempt: int) -> str:
    """The name of the job of this run."""
    return shortened(optimized_model, suffix=f"-{attempt}")


Object = Mapping[str, Any]
"""An object of the API as JSON."""


@dataclass(frozen=True)
class Owner:
    """The controller of an object (the owner reference with `controller: true`): the object that created it."""

    name: str = ""
    """Empty: it has no controller."""
    uid: str = ""

    @classmethod
    def of(cls, metadata: Object) -> Owner:
        """The controller in an object's metadata."""
        for entry in metadata.get("ownerReferences") or []:
            if entry.get("controller"):
                return cls(entry.get("name") or "", entry.get("uid") or "")
        return cls()


def moment(text: str | None) -> datetime | None:
    """A time of the API, such as `2026-11-21T19:30:00Z`; None for an empty value."""
    return datetime.fromisoformat(text) if text else None


Json = dict[str, Any]
"""An object of the API as JSON."""


@dataclass(frozen=True, order=True)
class Ref:
    """An object by kind and name, in the endpoint's namespace."""

    kind: str
    """`Deployment`, `Service`, `PodDisruptionBudget`, `NetworkPolicy`, `ConfigMap`, `Job`, `OptimizedModel`."""
    name: str
