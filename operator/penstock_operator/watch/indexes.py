"""By what objects are found in memory, each a function of one object. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_operator.cluster.kinds import Json
from penstock_operator.cluster.store import Index
from penstock_operator.plan.names import ENDPOINT, GATEWAY, NAME, OPTIMIZER, RUNTIME
from penstock_operator.plan.names import OPTIMIZED_MODEL as MODEL_LABEL


def texts_source(endpoint: Json) -> tuple[str, str] | None:
    """Name and key of the ConfigMap that an endpoint takes its texts from; None: from none."""
    source = ((endpoint.get("spec") or {}).get("workload") or {}).get("textsFrom") or {}
    name, key = source.get("configMapName"), source.get("key")
    return (str(name), str(key)) if name and key else None


def readiness(endpoint: Json) -> tuple[str, str]:
    """Status and reason of its Ready condition."""
    conditions = (endpoint.get("status") or {}).get("conditions") or []
    ready: Json = next((entry for entry in conditions if entry.get("type") == "Ready"), {})
    return str(ready.get("status") or "Unknown"), str(ready.get("reason") or "New")


def models_named(endpoint: Json) -> set[str]:
    """The OptimizedModels that its status speaks of: the wanted one and the one that serves."""
    status = endpoint.get("status") or {}
    return {status.get("optimizedModel") or "", (status.get("plan") or {}).get("optimizedModel") or ""} - {""}


def endpoint_index(value: Json) -> Iterator[Index]:
    """An endpoint by its models, class, source of texts, scaler and readiness."""
    namespace = value["metadata"].get("namespace") or ""
    for model in sorted(models_named(value)):
        yield ("model", namespace, model)
    yield ("class", str((value.get("spec") or {}).get("hardwareClass") or "any"))
    source = texts_source(value)
    if source is not None:
        yield ("texts", namespace, source[0])
    if ((value.get("spec") or {}).get("scaling") or {}).get("mode") == "KEDA":
        yield ("keda",)
    status, reason = readiness(value)
    yield ("ready", status, reason)
    if status != "True":
        yield ("unready",)


def model_index(value: Json) -> Iterator[Index]:
    """An OptimizedModel by what its users wait for: the rest of its status is how far it is."""
    status = value.get("status") or {}
    artefacts = ((status.get(name) or {}).get("digest") or "" for name in ("baseline", "artefact"))
    yield ("stage", str(status.get("phase") or "Pending"), *artefacts)


def owner_index(value: Json) -> Iterator[Index]:
    """Whatever we made by the endpoint or the OptimizedModel that it was made for."""
    metadata = value["metadata"]
    labels, namespace = metadata.get("labels") or {}, metadata.get("namespace") or ""
    if labels.get(ENDPOINT):
        yield ("endpoint", namespace, labels[ENDPOINT])
    elif labels.get(MODEL_LABEL):
        yield ("model", namespace, labels[MODEL_LABEL])


def pod_index(value: Json) -> Iterator[Index]:
    """A pod by its owner, and a runtime by its node as well."""
    labels = value["metadata"].get("labels") or {}
    if labels.get(NAME) == GATEWAY and labels.get(ENDPOINT):
        yield ("gateway", value["metadata"].get("namespace") or "", labels[ENDPOINT])
    if labels.get(NAME) not in {RUNTIME, OPTIMIZER}:
        return
    yield from owner_index(value)
    node = (value.get("spec") or {}).get("nodeName")
    if node and labels.get(NAME) == RUNTIME:
        yield ("node", str(node))
