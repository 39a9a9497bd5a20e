"""What `penstock plan` reads: of a cluster the endpoint, hardware classes, OptimizedModels and the past load; for a
file, the artefacts in the store."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from penstock.errors import ArtefactError, PenstockError, SpecError
from penstock.hardware import CpuIdentity
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock.resources.base import API_VERSION
from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec
from penstock.resources.hardware_class import HardwareClass, HardwareClassSpec
from penstock.resources.optimized_model import OptimizedModelStatus
from penstock.resources.result import Result
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock_cli.cluster.kubectl import ClusterReader, Json
from penstock_planner.evidence import Evidence, of_manifest, of_result
from penstock_planner.offers import class_of_cpu

SECONDS = 30.0
"""No query of Prometheus takes longer."""
MOST_ANSWER_BYTES = 2**20


@dataclass(frozen=True)
class ClusterPlan:
    """An endpoint of a cluster and the objects that its plan is made from."""

    namespace: str
    spec: ModelEndpointSpec
    classes: dict[str, HardwareClassSpec]
    evidence: tuple[Evidence, ...]
    requests_per_second: float | None
    """The load that the autoscaler read last."""


def read_cluster(name: str, namespace: str, context: str) -> ClusterPlan:
    """Read all of it through kubectl. PenstockError when there is no such endpoint, or kubectl fails."""
    kubectl = ClusterReader(namespace, context)
    endpoint = kubectl.get("modelendpoints.penstock.dev", name)
    if endpoint is None:
        raise PenstockError(
            f"there is no file {name}, and no ModelEndpoint {name} in this namespace",
            remedy="Give a YAML file, or a name that penstock status --all-namespaces lists",
        )
    return cluster_plan(
        endpoint,
        classes=kubectl.items("hardwareclasses.penstock.dev"),
        models=kubectl.items("optimizedmodels.penstock.dev"),
    )


def cluster_plan(endpoint: Json, *, classes: Sequence[Json], models: Sequence[Json]) -> ClusterPlan:
    """The plan's inputs from these objects. Fields of later releases are ignored; objects that this release cannot read
    are left out.

    SpecError when the endpoint itself cannot be read.
    """
    metadata = endpoint["metadata"]
    spec = ModelEndpoint.from_object(_readable(endpoint, "ModelEndpoint"), stored=True).spec
    known = {}
    for one in classes:
        try:
            found_class = HardwareClass.from_object(_readable(one, "HardwareClass"), stored=True)
        except SpecError:
            continue
        known[found_class.metadata.name] = found_class.spec
    # In the order of the shipped ones: of those that a processor may belong to, the first one counts.
    known = {name: known[name] for name in (*HARDWARE_CLASSES, *known) if name in known}
    evidence = []
    for model in models:
        wanted = model.get("spec") or {}
        if (wanted.get("model"), wanted.get("task")) != (spec.model, spec.task.value):
            continue
        try:
            result = OptimizedModelStatus.model_validate(model.get("status") or {}).result
        except ValidationError:
            continue
        if result is not None:
            evidence += _evidence(
                result, str(wanted.get("hardwareClass", "any")), str(model["metadata"]["name"]), known
            )
    scaling = (endpoint.get("status") or {}).get("scaling") or {}
    rate = scaling.get("requestsPerSecond")
    return ClusterPlan(
        namespace=str(metadata.get("namespace", "default")),
        spec=spec,
        classes=known,
        evidence=tuple(evidence),
        requests_per_second=float(rate) if isinstance(rate, int | float) else None,
    )


def _evidence(result: Result, class_name: str, model: str, classes: Mapping[str, HardwareClassSpec]) -> list[Evidence]:
    """Of its class; if that has no promise about the processor, such as `any`, also of the class of its processor."""
    found = of_result(result, class_name, name=model)
    if found is None:
        return []
    own = classes.get(class_name)
    if own is None or own.isa is not None or own.neuron is not None:
        return [found]
    by_processor = class_of_cpu(classes, result.cpu.identity)
    if by_processor is None:
        return [found]
    caveat = f"measured with the cores of the class {class_name}"
    return [found, replace(found, hardware_class=by_processor, caveats=(*found.caveats, caveat))]


def _readable(value: Json, kind: str) -> Json:
    """The parts of a stored object that its type reads: the API server adds metadata."""
    metadata = {"name": value["metadata"]["name"]}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": value.get("spec") or {}}


def week_queries(namespace: str, name: str) -> tuple[str, str]:
    """PromQL for the mean and the highest rate of requests to the model of an endpoint's pods in the last seven days,
    without probes and scrapes. The mean is of the time in which pods ran. A step of one minute, so that an endpoint has
    a load soon after its first requests."""
    pods = f"{re.escape(name)}-[a-z0-9]{{1,10}}-[a-z0-9]{{5}}".replace("\\", "\\\\")
    rate = f'sum(rate(penstock_request_seconds_count{{namespace="{namespace}",pod=~"{pods}"}}[5m]))'
    return f"avg_over_time({rate}[7d:1m])", f"max_over_time({rate}[7d:1m])"


def load_of_week(url: str, namespace: str, name: str) -> tuple[float, float]:
    """Mean and highest request rate of the last week from a Prometheus; PenstockError when it has none."""
    mean, highest = (_query(url, query) for query in week_queries(namespace, name))
    return mean, max(mean, highest)


def _query(url: str, query: str) -> float:
    if not url.startswith(("http://", "https://")):
        raise PenstockError(f"{url} is no URL of a Prometheus", remedy="Give --prometheus http://host:9090")
    asked = f"{url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            result = json.loads(answer.read(MOST_ANSWER_BYTES))["data"]["result"]
            return float(result[0]["value"][1])
    except IndexError:
        raise PenstockError(
            f"{url} has no requests of this endpoint in the last week",
            remedy="Give --rate, or the Prometheus that scrapes the pods",
        ) from None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise PenstockError(
            f"{url} did not answer the query ({error})", remedy="Check the URL of Prometheus, or give --rate"
        ) from error


def of_store(spec: ModelEndpointSpec, store: Path) -> list[Evidence]:
    """The newest artefact of this model and task for each class and number of cores."""
    here = _this_processor()
    newest: dict[tuple[str, int], tuple[str, Evidence]] = {}
    for path in sorted(store.glob(f"*/{MANIFEST_NAME}")):
        try:
            manifest = Manifest.load(path.parent)
        except ArtefactError:
            continue  # an interrupted or foreign folder; penstock optimize reports it
        if (manifest.model.source, manifest.task) != (spec.model, spec.task):
            continue
        name = class_of_cpu(HARDWARE_CLASSES, manifest.cpu) or "any"
        evidence = of_manifest(manifest, name, here=here, folder=str(path.parent))
        key = (name, manifest.cores)
        if evidence is not None and (key not in newest or newest[key][0] < manifest.created):
            newest[key] = (manifest.created, evidence)
    return [evidence for _, evidence in newest.values()]


def _this_processor() -> CpuIdentity | None:
    try:
        from penstock_runtime.host import read_host

        return read_host().cpu
    except (ModuleNotFoundError, OSError):
        return None  # without the runtime, nothing was measured here
