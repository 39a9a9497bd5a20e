"""Index keys of the cached objects: owners, and objects that they depend on."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_operator.cluster.api import Json
from penstock_operator.cluster.store import Index
from penstock_operator.endpoint.optimization.model import digests
from penstock_operator.facts.names import CANARY, ENDPOINT, GATEWAY, NAME, OPTIMIZER, RUNTIME
from penstock_operator.facts.names import OPTIMIZED_MODEL as MODEL_LABEL
from penstock_operator.facts.routes import RouteFacts


def texts_source(endpoint: Json) -> tuple[str, str] | None:
    """Name and key of the ConfigMap that an endpoint takes its texts from; None: it names none."""
    source = ((endpoint.get("spec") or {}).get("workload") or {}).get("textsFrom") or {}
    name, key = source.get("configMapName"), source.get("key")
    return (str(name), str(key)) if name and key else None


def readiness(endpoint: Json) -> tuple[str, str]:
    """Status and reason of its Ready condition."""
    conditions = (endpoint.get("status") or {}).get("conditions") or []
    ready: Json = next((entry for entry in conditions if entry.get("type") == "Ready"), {})
    return str(ready.get("status") or "Unknown"), str(ready.get("reason") or "New")


def models_named(endpoint: Json) -> set[str]:
    """The OptimizedModels that its status names: the wanted one and the served one."""
    status = endpoint.get("status") or {}
    return {status.get("optimizedModel") or "", (status.get("plan") or {}).get("optimizedModel") or ""} - {""}


def endpoint_index(value: Json) -> Iterator[Index]:
    """Index keys of an endpoint: its models, class, text ConfigMap, KEDA, pinned artefact, host and readiness."""
    namespace = value["metadata"].get("namespace") or ""
    for model in sorted(models_named(value)):
        yield ("model", namespace, model)
    yield ("namespace", namespace)
    yield ("class", str((value.get("spec") or {}).get("hardwareClass") or "any"))
    source = texts_source(value)
    if source is not None:
        yield ("texts", namespace, source[0])
    if ((value.get("spec") or {}).get("scaling") or {}).get("mode") == "KEDA":
        yield ("keda",)
    pinned = ((value.get("spec") or {}).get("optimization") or {}).get("artefact")
    if pinned:
        yield ("pinned", namespace, str(pinned))
    exposure = (value.get("spec") or {}).get("exposure") or {}
    if exposure:
        yield ("host", str(exposure.get("host") or ""))
    if "httpRoute" in exposure:
        yield ("http route",)
    status, reason = readiness(value)
    yield ("ready", status, reason)
    if status != "True":
        yield ("unready",)


def model_index(value: Json) -> Iterator[Index]:
    """Index keys of an OptimizedModel: the phase and artefacts, without its progress; and each artefact."""
    status = value.get("status") or {}
    artefacts = digests(status)
    yield ("stage", str(status.get("phase") or "Pending"), *artefacts)
    for digest in sorted({*artefacts} - {""}):
        yield ("artefact", value["metadata"].get("namespace") or "", digest)


def owner_index(value: Json) -> Iterator[Index]:
    """Index key of an object of the operator: the endpoint or the OptimizedModel that it belongs to."""
    metadata = value["metadata"]
    labels, namespace = metadata.get("labels") or {}, metadata.get("namespace") or ""
    if labels.get(ENDPOINT):
        yield ("endpoint", namespace, labels[ENDPOINT])
    elif labels.get(MODEL_LABEL):
        yield ("model", namespace, labels[MODEL_LABEL])


def deployment_index(value: Json) -> Iterator[Index]:
    """Index keys of a Deployment: its owner, and whether it is a canary's."""
    yield from owner_index(value)
    if CANARY in (value["metadata"].get("labels") or {}):
        yield (CANARY,)


def route_index(value: Json) -> Iterator[Index]:
    """Index keys of an Ingress or HTTPRoute: its owner and its host, which another endpoint may wait for."""
    yield from owner_index(value)
    yield ("host", RouteFacts.from_object(value).host)


def pod_index(value: Json) -> Iterator[Index]:
    """Index keys of a pod: its owner, and the node of a runtime pod."""
    labels = value["metadata"].get("labels") or {}
    if labels.get(NAME) == GATEWAY and labels.get(ENDPOINT):
        yield ("gateway", value["metadata"].get("namespace") or "", labels[ENDPOINT])
    if labels.get(NAME) not in {RUNTIME, OPTIMIZER}:
        return
    yield from owner_index(value)
    node = (value.get("spec") or {}).get("nodeName")
    if node and labels.get(NAME) == RUNTIME:
        yield ("node", str(node))
