"""`penstock plan NAME --measure`: an optimisation on one node of each hardware class of a cluster, for measurements
instead of estimates.

The operator runs the jobs, within its quotas and limits: an endpoint without replicas is created for each class, and
deleted at the end. The OptimizedModels stay, so that the endpoint finds its result if it moves to the class.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
from click.core import ParameterSource
from pydantic import ValidationError

from penstock.errors import PenstockError, printable
from penstock.process import sigterm_interrupts
from penstock.resources.base import API_VERSION
from penstock.resources.endpoint import EndpointCore, ModelEndpoint, ModelEndpointSpec, OptimizationMode
from penstock.resources.hardware_class import HardwareClassSpec
from penstock.resources.optimized_model import OptimizedModelStatus, Phase
from penstock.resources.shipped_classes import belongs
from penstock_cli.cluster.kubectl import ClusterReader, Json, condition
from penstock_cli.planning.objects import ClusterPlan
from penstock_cli.terminal import fact
from penstock_planner.compare import counted

RUN_LABEL = "penstock.dev/plan-measurement"
"""Of the endpoints of one run."""
LOOK_SECONDS = 3.0
LINE_SECONDS = 10.0
"""Between two lines about a class that say how far it is."""
MOST = 16
"""Measurements of one run."""
SHOWN_NODES = 3


@dataclass(frozen=True)
class ClassMeasurement:
    """A hardware class to measure, with a number of cores."""

    hardware_class: str
    nodes: tuple[str, ...]
    """Of the class; the operator chooses one of them."""
    endpoint: Json
    """The ModelEndpoint, which the API server has not seen."""

    @property
    def name(self) -> str:
        """Of the endpoint."""
        return str(self.endpoint["metadata"]["name"])

    @property
    def title(self) -> str:
        """For people: class and cores."""
        return f"{self.hardware_class}, {counted(self.endpoint['spec']['cores'], 'core')}"

    @property
    def described(self) -> str:
        """For people."""
        more = f" and {len(self.nodes) - SHOWN_NODES} more" if len(self.nodes) > SHOWN_NODES else ""
        where = f"on one of {', '.join(self.nodes[:SHOWN_NODES])}{more}" if self.nodes else "nodes cannot be listed"
        return f"{where} (ModelEndpoint {self.name})"


def measured(name: str, cluster: ClusterPlan, options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Measure the classes for an endpoint; notes about those that were not. None after `--dry-run`.

    Progress goes to standard error: standard output has the plan alone."""
    kubectl = ClusterReader(options["namespace"], options["context"])
    chosen = options["classes"] or ()
    is_given = click.get_current_context().get_parameter_source("cores") is ParameterSource.COMMANDLINE
    cores = options["cores"] if is_given else (cluster.spec.cores,)
    wanted = classes_to_measure(name, cluster, read_nodes(kubectl, chosen), chosen, cores)
    if options["dry_run"]:
        for one in wanted:
            fact("measured", f"{one.title}: {one.described}")
        return None
    say = partial(click.echo, err=True)
    failed = measure_classes(kubectl, wanted, seconds=options["measure_seconds"], say=say)
    return tuple(f"{title} was not measured: {why}" for title, why in failed.items())


def classes_to_measure(
    name: str, cluster: ClusterPlan, nodes: Sequence[Json] | None, chosen: Sequence[str], cores: Sequence[int]
) -> tuple[ClassMeasurement, ...]:
    """The classes of the cluster with a ready node and without a measurement of this model on that number of cores; of
    `chosen`, if there are any. `nodes` None: they cannot be listed. Classes without a promise about the processor are
    measured if chosen.

    PenstockError when there is none, or more than `MOST`.
    """
    known = {(one.hardware_class, one.cores) for one in cluster.evidence}
    found, without = [], []
    for class_name, hardware in cluster.classes.items():
        promises = hardware.isa is not None or hardware.neuron is not None
        if class_name not in (chosen or ([class_name] if promises else ())):
            continue
        device = 1 if hardware.neuron is None else hardware.neuron.cores_per_device
        counts = sorted({max(count // device, 1) * device for count in cores})
        names = tuple(str(node["metadata"]["name"]) for node in nodes or () if _belongs(node, hardware))
        if not names and nodes is not None:
            without.append(class_name)
            continue
        open_ = [count for count in counts if (class_name, count) not in known]
        found += [ClassMeasurement(class_name, names, _endpoint(name, cluster, class_name, count)) for count in open_]
    if not found:
        missing = f"; {', '.join(without)}: no ready node" if without else ""
        raise PenstockError(
            f"no hardware class is to be measured: those with nodes were measured, or promise no processor{missing}",
            remedy="Name classes that have nodes in --classes, or leave --measure out",
        )
    if len(found) > MOST:
        raise PenstockError(
            f"{len(found)} measurements are too many: {MOST} are made in one run",
            remedy=f"Name some in --classes: {', '.join(dict.fromkeys(one.hardware_class for one in found))}",
        )
    return tuple(found)


def read_nodes(kubectl: ClusterReader, chosen: Sequence[str]) -> list[Json] | None:
    """The nodes of the cluster; None for a user who may not list them, and has chosen classes."""
    try:
        return kubectl.items("nodes")
    except PenstockError as error:
        if chosen:
            return None
        raise PenstockError(
            f"the nodes cannot be listed: {error.message}", remedy="Name the classes to measure in --classes"
        ) from error


def _belongs(node: Json, hardware: HardwareClassSpec) -> bool:
    """Whether a ready node has the labels of the class, and its devices. Whether it has room is the operator's to find
    out."""
    status, labels = node.get("status") or {}, node["metadata"].get("labels") or {}
    if (node.get("spec") or {}).get("unschedulable") or condition(node, "Ready").get("status") != "True":
        return False
    devices = hardware.neuron
    if devices is not None and str((status.get("allocatable") or {}).get(devices.resource.name_on_nodes, "0")) == "0":
        return False
    return belongs(labels, hardware)


def _endpoint(name: str, cluster: ClusterPlan, class_name: str, cores: int) -> Json:
    """An endpoint like the one that is planned for, on this class. It has a replica on Inferentia only, where the first
    pod measures."""
    fields = ModelEndpointSpec.model_fields
    kept = {fields[key].alias or key for key in EndpointCore.model_fields}
    given = cluster.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    spec: Json = {key: value for key, value in given.items() if key in kept}
    if "pod" in given:
        # A selector of nodes is for the endpoint's present class.
        spec["pod"] = {key: value for key, value in given["pod"].items() if key != "nodeSelector"}
    optimization = {**spec.get("optimization", {}), "serveWhileOptimizing": False}
    if optimization.get("mode") == OptimizationMode.PINNED.value:
        del optimization["mode"], optimization["artefact"]
    devices = cluster.classes[class_name].neuron is not None
    spec |= {
        "hardwareClass": class_name, "cores": cores, "optimization": optimization, "scaling": {"mode": "None"},
        "gateway": {"mode": "Never"}, "replicas": 1 if devices else 0,
    }  # fmt: skip
    body = {
        "apiVersion": API_VERSION,
        "kind": "ModelEndpoint",
        "metadata": {"name": f"{name[:40]}-{class_name[:18]}-{cores}".replace(".", "-")},
        "spec": spec,
    }
    ModelEndpoint.from_object(body)
    return body


def measure_classes(
    kubectl: ClusterReader, wanted: Sequence[ClassMeasurement], *, seconds: float, say: Callable[[str], None]
) -> dict[str, str]:
    """Have them measured within this time; those that were not, by title, and why. The endpoints are deleted at the
    end, also after Ctrl-C, SIGTERM and errors."""
    run = uuid.uuid4().hex[:16]
    begin = time.monotonic()
    try:
        with sigterm_interrupts():
            for one in wanted:
                labelled = {**one.endpoint, "metadata": {**one.endpoint["metadata"], "labels": {RUN_LABEL: run}}}
                kubectl.run("create", "--filename=-", stdin=json.dumps(labelled))
                say(f"{one.title}: {one.described}")
            return _wait(kubectl, wanted, run, end=begin + seconds, say=say)
    finally:
        say("deleting the endpoints of the measurement")
        kubectl.run("delete", "modelendpoints.penstock.dev", f"--selector={RUN_LABEL}={run}", "--wait=false")


def _wait(
    kubectl: ClusterReader, wanted: Sequence[ClassMeasurement], run: str, *, end: float, say: Callable[[str], None]
) -> dict[str, str]:
    """Until each class is measured or has failed."""
    open_, failed = {one.name: one.title for one in wanted}, {}
    printed: dict[str, tuple[float, str]] = {}
    while True:
        endpoints = kubectl.items("modelendpoints.penstock.dev", f"--selector={RUN_LABEL}={run}")
        by_name = {str(one["metadata"]["name"]): one for one in endpoints}
        models = {str(one["metadata"]["name"]): one for one in kubectl.items("optimizedmodels.penstock.dev")}
        for name, title in list(open_.items()):
            found = by_name.get(name)
            is_over, problem, text = _state(found, models)
            now, (at, before) = time.monotonic(), printed.get(name, (float("-inf"), ""))
            if is_over or (text != before and now - at >= LINE_SECONDS):
                say(f"{title}: {text}")
                printed[name] = (now, text)
            if is_over:
                del open_[name]
                if problem:
                    failed[title] = text
        if not open_:
            return failed
        if time.monotonic() >= end:
            for name, title in open_.items():
                failed[title] = f"not measured in time: {printed.get(name, (0.0, 'nothing is known'))[1]}"
                say(f"{title}: {failed[title]}")
            return failed
        time.sleep(min(LOOK_SECONDS, max(end - time.monotonic(), 0.1)))


def _state(endpoint: Json | None, models: dict[str, Json]) -> tuple[bool, bool, str]:
    """Whether a class is through, whether without a measurement, and how far it is in words."""
    if endpoint is None:
        return True, True, "its endpoint was deleted"
    accepted, optimized = condition(endpoint, "Accepted"), condition(endpoint, "Optimized")
    if accepted.get("status") == "False":
        return True, True, _words(accepted)
    status = endpoint.get("status") or {}
    model = models.get(str(status.get("optimizedModel") or "")) or {}
    try:
        own = OptimizedModelStatus.model_validate(model.get("status") or {})
    except ValidationError:
        return True, True, "its OptimizedModel has a status that this version does not read"
    result = own.result
    if result is not None and result.capacity.is_measured:
        rate = result.capacity.requests_per_second
        return True, False, "measured" if rate is None else f"measured: {rate:.3g} requests/s for each replica"
    if own.phase is Phase.FAILED:
        return True, True, _words(condition(model, "Ready"))
    if own.phase is Phase.READY and own.result is not None and not own.result.capacity.provisional:
        return True, True, "the optimisation measured no capacity"
    return False, False, _words(optimized) or "the operator has not seen it yet"


def _words(found: Json) -> str:
    text: Any = found.get("message") or found.get("reason") or ""
    return printable(str(text))
