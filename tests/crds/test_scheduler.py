"""The real scheduler places pods of a class only on the nodes that `penstock_operator.endpoint.pods.placement` allows.

Nodes are objects without a kubelet behind them: the scheduler looks at nothing else. The pods are those that the
operator makes of the class.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.resources.endpoint_parts.pod import Pod
from penstock.resources.hardware_class import HardwareClassSpec, Toleration, TolerationOperator
from penstock.resources.processors import Neuron, NeuronResource
from penstock.resources.shipped_classes import HARDWARE_CLASSES
from penstock_operator.endpoint.pods.placement import NodeFacts, PodRequirements, Taint, place
from penstock_operator.endpoint.pods.template import pod_spec, resources
from penstock_operator.facts.installation import PlanSettings
from testbed.control_plane import ControlPlane
from tests.crds.conftest import ApiServer, proxied
from tests.examples import examples
from tests.operator.endpoint.pods.test_placement import BELONGS, LABELS, ROOM, TAINTS, TERMS, on

PODS = "/api/v1/namespaces/default/pods"
SETTINGS = PlanSettings(runtime_image="runtime", optimizer_image="optimizer", toolchain="0.1.0")
MEMORY = 2**28
LONGEST_SECONDS = 240.0
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def scheduler(private_control_plane: ControlPlane) -> Iterator[ApiServer]:
    """A scheduler with its own nodes, without the controllers that taint nodes which send no heartbeat."""
    private_control_plane.stop("kube-controller-manager")
    with proxied(private_control_plane.kubectl) as server:
        yield server


def create(server: ApiServer, path: str, value: dict[str, Any]) -> None:
    status, body = server.call("POST", path, value)
    assert status == 201, body["message"]


def add(server: ApiServer, node: NodeFacts) -> None:
    """Register a node that is ready."""
    create(
        server,
        "/api/v1/nodes",
        {"metadata": {"name": node.name, "labels": dict(node.labels)}, "spec": {"unschedulable": node.cordoned}},
    )
    amounts = {name: str(float(amount)) if amount.denominator > 1 else str(amount.numerator)
               for name, amount in node.allocatable.items()}  # fmt: skip
    status, body = server.call(
        "PATCH",
        f"/api/v1/nodes/{node.name}/status",
        {"status": {
            "capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}],
        }},
    )  # fmt: skip
    assert status == 200, body["message"]
    # Admission has tainted it as not ready; no controller runs here that removes the taint.
    taints = [{"key": taint.key, "value": taint.value, "effect": taint.effect} for taint in node.taints]
    status, body = server.call("PATCH", f"/api/v1/nodes/{node.name}", {"spec": {"taints": taints}})
    assert status == 200, body["message"]


def pod_of(name: str, hardware: HardwareClassSpec, pod: Pod, cores: int) -> dict[str, Any]:
    container = {"image": "runtime", "resources": resources(hardware, cores, MEMORY, 0)}
    spec = pod_spec(container, hardware=hardware, pod=pod, settings=SETTINGS, volumes=[])
    return {"metadata": {"name": name}, "spec": spec}


def decisions(server: ApiServer, expected: dict[str, bool]) -> dict[str, str]:
    """Pod -> its node, or nothing where the scheduler reported that there is none.

    A pod that is expected to find a node is given time: what the scheduler knows of a node that is just being made is
    less than the truth (not ready, nothing allocatable), and it looks again.
    """
    deadline = time.monotonic() + LONGEST_SECONDS
    decided: dict[str, str] = {}
    while time.monotonic() < deadline and decided.keys() != expected.keys():
        _, body = server.call("GET", PODS)
        pods = {one["metadata"]["name"]: one for one in body["items"] if one["metadata"]["name"] in expected}
        for name, value in pods.items():
            conditions = value["status"].get("conditions", [])
            refused = any(one.get("reason") == "Unschedulable" for one in conditions) and not expected[name]
            if value["spec"].get("nodeName") or refused:
                decided[name] = value["spec"].get("nodeName", "")
        time.sleep(0.02)  # poll the list
    return decided


def remove(server: ApiServer, *, pods: Iterator[str] | list[str], nodes: list[str]) -> None:
    for name in pods:
        server.call("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
    for name in nodes:
        server.call("DELETE", f"/api/v1/nodes/{name}")


def named(node: NodeFacts, name: str, **labels: str) -> NodeFacts:
    """The same node under another name, with further labels."""
    return NodeFacts(
        name, {**node.labels, **labels}, node.taints, node.allocatable, node.requested, node.cordoned, node.ready
    )


@pytest.mark.slow
def test_the_scheduler_places_pods_of_each_class_on_its_nodes(scheduler: ApiServer) -> None:
    dedicated = (Taint("penstock.dev/dedicated", "NoSchedule", "x"),)
    neuron = (Taint("aws.amazon.com/neuron", "NoSchedule", "present"),)
    room = {**ROOM, "cpu": Fraction(1000)}
    candidates = [
        *(node for node, _ in BELONGS),
        on("inf1.xlarge"),
        NodeFacts("", on("c6i.xlarge").labels, dedicated, ROOM),
        NodeFacts("", on("c6i.xlarge").labels, (Taint("gpu", "NoSchedule"),), ROOM),
        NodeFacts("", on("c6i.xlarge").labels, (Taint("gpu", "PreferNoSchedule"),), ROOM),
        NodeFacts("", on("c6i.xlarge").labels, (), ROOM, cordoned=True),
        NodeFacts("", on("c6i.xlarge").labels, (), {**ROOM, "cpu": Fraction(79, 10)}),
        NodeFacts("", on("c6i.xlarge").labels, (), {**ROOM, "memory": Fraction(2**27)}),
        NodeFacts("", on("inf1.24xlarge").labels, neuron, {**ROOM, "aws.amazon.com/neuron": Fraction(16)}),
        NodeFacts("", on("inf2.24xlarge").labels, neuron, {**ROOM, "aws.amazon.com/neuron": Fraction(6)}),
    ]
    # Each node has room for one pod of each class.
    nodes = {
        f"node-{index}": named(
            NodeFacts("", node.labels, node.taints,
                 room if node.allocatable == ROOM else node.allocatable, cordoned=node.cordoned),
            f"node-{index}", case=str(index),
        )
        for index, node in enumerate(candidates)
    }  # fmt: skip
    for node in nodes.values():
        add(scheduler, node)
    expected: dict[str, str] = {}
    for (node_name, node), (class_name, hardware) in itertools.product(nodes.items(), HARDWARE_CLASSES.items()):
        pod = Pod(node_selector={"case": node.labels["case"]})
        name = f"{class_name}-{node_name}"
        needs = PodRequirements.of(class_name, hardware, pod, cores=4, memory_bytes=MEMORY)
        expected[name] = "".join(place(needs, nodes.values()).nodes)
    # `any` last: its pod fits nearly everywhere, and would take the room of a small node.
    order = sorted(expected, key=lambda name: name.startswith("any-"))
    for name in order:
        class_name = next(
            one for one in sorted(HARDWARE_CLASSES, key=len, reverse=True) if name.startswith(f"{one}-node")
        )
        pod = Pod(node_selector={"case": name.rpartition("-")[2]})
        create(scheduler, PODS, pod_of(name, HARDWARE_CLASSES[class_name], pod, 4))
    assert decisions(scheduler, {name: bool(node) for name, node in expected.items()}) == expected
    assert sum(map(bool, expected.values())) > 60
    remove(scheduler, pods=order, nodes=list(nodes))


def test_the_scheduler_places_pods_of_neuron_classes_and_their_compile_jobs(scheduler: ApiServer) -> None:
    taint = (Taint("aws.amazon.com/neuron", "NoSchedule", "present"),)
    device, core = {**ROOM, "aws.amazon.com/neuron": Fraction(2)}, {**ROOM, "aws.amazon.com/neuroncore": Fraction(4)}
    # The scheduler may still know the nodes of another test, which have just been deleted.
    ours = Pod(node_selector={"case": "neuron"})
    nodes = [
        named(NodeFacts("", on("inf2.xlarge").labels, taint, device), "devices", case="neuron"),
        named(NodeFacts("", on("inf2.xlarge").labels, taint, core), "cores", case="neuron"),
        named(NodeFacts("", on("c6i.4xlarge").labels, (), ROOM), "plain", case="neuron"),
    ]
    for node in nodes:
        add(scheduler, node)
    inf2 = HARDWARE_CLASSES["inf2"]
    neuron = Neuron(cores_per_device=2, resource=NeuronResource.CORE, most_devices=1)
    by_core = HardwareClassSpec.model_validate({**inf2.to_object(), "neuron": neuron.to_object()})
    cases = {
        "by-device": (inf2, 2, "devices"),
        "by-core": (by_core, 2, "cores"),
        "too-many": (inf2, 6, ""),
        "compiles": (inf2.compile_host, 8, "plain"),
    }
    for name, (hardware, cores, expected) in cases.items():
        create(scheduler, PODS, pod_of(name, hardware, ours, cores))
        needs = PodRequirements.of("mine", hardware, ours, cores=cores, memory_bytes=MEMORY)
        assert "".join(place(needs, nodes).nodes) == expected
    # The scheduler extension of Neuron is another scheduler, which does not run here: ours leaves its pods alone.
    extension = HardwareClassSpec.model_validate({**inf2.to_object(), "schedulerName": "neuron-scheduler"})
    create(scheduler, PODS, pod_of("extension", extension, Pod(), 4))
    assert decisions(scheduler, {name: bool(node) for name, (_, _, node) in cases.items()}) == {
        name: node for name, (_, _, node) in cases.items()
    }
    _, body = scheduler.call("GET", f"{PODS}/extension")
    assert (body["spec"]["schedulerName"], body["spec"].get("nodeName")) == ("neuron-scheduler", None)
    assert "conditions" not in body["status"]
    remove(scheduler, pods=[*cases, "extension"], nodes=[node.name for node in nodes])


def test_the_scheduler_refuses_a_pod_of_a_full_class_as_the_explanation_states(scheduler: ApiServer) -> None:
    room = {"cpu": Fraction(5), "memory": Fraction(2**33), "pods": Fraction(110)}
    node = named(NodeFacts("", on("c7g.2xlarge").labels, allocatable=room), "small", case="full")
    ours = Pod(node_selector={"case": "full"})
    add(scheduler, node)
    graviton = HARDWARE_CLASSES["graviton3"]
    create(scheduler, PODS, pod_of("first", graviton, ours, 3))
    assert decisions(scheduler, {"first": True}) == {"first": "small"}
    create(scheduler, PODS, pod_of("second", graviton, ours, 3))
    assert decisions(scheduler, {"second": False}) == {"second": ""}
    taken = NodeFacts(
        "small", node.labels, allocatable=room, requested={"cpu": Fraction(3), "memory": Fraction(MEMORY)}
    )
    placement = place(PodRequirements.of("graviton3", graviton, Pod(), cores=3, memory_bytes=MEMORY), [taken])
    assert placement.explanation.startswith(
        "the nodes of hardwareClass graviton3 are full: 3 CPUs are wanted, and the most that is free is 2 CPUs (small)"
    )
    remove(scheduler, pods=["first", "second"], nodes=["small"])


SIZES = st.fixed_dictionaries({
    "cpu": st.sampled_from([Fraction(1), Fraction(19, 10), Fraction(2), Fraction(4)]),
    "memory": st.sampled_from([Fraction(2**27), Fraction(2**33)]),
    "pods": st.sampled_from([Fraction(0), Fraction(2), Fraction(110)]),
    "example.com/d": st.sampled_from([Fraction(0), Fraction(1)]),
})  # fmt: skip
CANDIDATES = st.lists(
    st.builds(
        lambda labels, taints, allocatable, cordoned: NodeFacts("", labels, taints, allocatable, cordoned=cordoned),
        LABELS,
        TAINTS,
        SIZES,
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)
TOLERATIONS = st.lists(
    st.sampled_from(
        [
            Toleration(key="k", operator=TolerationOperator.EXISTS),
            Toleration(key="l", value=""),
            Toleration(operator=TolerationOperator.EXISTS),
        ]
    ),
    max_size=1,
).map(tuple)
CLASSES = st.builds(
    lambda terms, tolerations, threads, devices: HardwareClassSpec(
        node_selector_terms=terms,
        tolerations=tolerations,
        threads_per_core=threads,
        resources={"example.com/d": 1} if devices else {},
    ),
    TERMS,
    TOLERATIONS,
    st.integers(1, 2),
    st.booleans(),
)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CANDIDATES, CLASSES, LABELS)
def test_the_scheduler_agrees_with_the_predicted_nodes_of_any_pod(
    scheduler: ApiServer, candidates: list[NodeFacts], hardware: HardwareClassSpec, selector: dict[str, str]
) -> None:
    number = next(NUMBERS)
    nodes = [named(node, f"any-{number}-{index}", example=str(number)) for index, node in enumerate(candidates)]
    for node in nodes:
        # A cordon is a taint as well, by a controller that does not run here.
        add(scheduler, node)
    pod, name = Pod(node_selector={**selector, "example": str(number)}), f"pod-{number}"
    create(scheduler, PODS, pod_of(name, hardware, pod, 1))
    placement = place(PodRequirements.of("mine", hardware, pod, cores=1, memory_bytes=MEMORY), nodes)
    found = decisions(scheduler, {name: placement.placeable}).get(name, "")
    remove(scheduler, pods=[name], nodes=[node.name for node in nodes])
    assert (found in placement.nodes) if placement.placeable else found == "", json.dumps(placement.explanation)
