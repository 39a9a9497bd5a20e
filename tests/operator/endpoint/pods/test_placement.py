"""Placement: the nodes that fit a pod, and the explanation if none fits. tests/crds/test_scheduler.py compares it with
the real scheduler."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.resources.endpoint_parts.pod import Pod
from penstock.resources.hardware_class import (
    HardwareClassSpec,
    LabelRequirement,
    NodeTerm,
    SelectorOperator,
    TaintEffect,
    Toleration,
    TolerationOperator,
)
from penstock.resources.shipped_classes import HARDWARE_CLASSES, fulfilled
from penstock_operator.endpoint.pods.placement import (
    NodeFacts,
    PlacementResult,
    PodRequirements,
    Taint,
    mismatch,
    place,
    tolerated,
)

GIB = Fraction(2**30)
ROOM = {"cpu": Fraction(64), "memory": 256 * GIB, "ephemeral-storage": 100 * GIB, "pods": Fraction(110)}
DISK = 8 * 2**30
EC2 = "node.kubernetes.io/instance-type"
NFD = "feature.node.kubernetes.io"


def needs(name: str, cores: int = 4, memory: Fraction = GIB, pod: Pod | None = None) -> PodRequirements:
    return PodRequirements.of(
        name, HARDWARE_CLASSES[name], pod or Pod(), cores=cores, memory_bytes=int(memory), disk_bytes=DISK
    )


def node(name: str = "n", **labels: str) -> NodeFacts:
    """A large node with these labels."""
    return NodeFacts(name, {"kubernetes.io/arch": "amd64", **labels}, allocatable=ROOM)


def on(instance: str, name: str = "n", **more: Fraction) -> NodeFacts:
    arch = "arm64" if instance.startswith(("c7g", "c8g")) else "amd64"
    devices = {"aws.amazon.com/neuron": more["neuron"]} if "neuron" in more else {}
    return NodeFacts(name, {"kubernetes.io/arch": arch, EC2: instance}, allocatable={**ROOM, **devices})


def accelerated(accelerator: str, *, present: bool) -> NodeFacts:
    labels = {"karpenter.k8s.aws/instance-accelerator-name": accelerator}
    labels |= {"neuron.amazonaws.com/present": "true"} if present else {}
    return NodeFacts(
        "new", {"kubernetes.io/arch": "amd64", **labels}, allocatable={**ROOM, "aws.amazon.com/neuron": Fraction(2)}
    )


def nfd(vendor: str, family: int, model: int, *flags: str, threads: str = "true") -> NodeFacts:
    labels = {
        "kubernetes.io/arch": "amd64",
        f"{NFD}/cpu-model.vendor_id": vendor,
        f"{NFD}/cpu-model.family": str(family),
        f"{NFD}/cpu-model.id": str(model),
        f"{NFD}/cpu-hardware_multithreading": threads,
        **{f"{NFD}/cpu-cpuid.{flag}": "true" for flag in flags},
    }
    return NodeFacts("bare", labels, allocatable=ROOM)


def gke(family: str, *platforms: str) -> NodeFacts:
    labels = {"kubernetes.io/arch": "amd64", "cloud.google.com/machine-family": family}
    labels |= {f"supported-cpu-platform.cloud.google.com/{platform}": "true" for platform in platforms}
    return NodeFacts("gke", labels, allocatable=ROOM)


VNNI = "AVX512VNNI"
BELONGS: list[tuple[NodeFacts, set[str]]] = [
    (node(), set()),
    (on("c6i.xlarge"), {"icelake"}),
    (on("m6id.metal"), {"icelake"}),
    (on("c5.24xlarge"), {"cascadelake"}),
    (on("c5.4xlarge"), set()),  # may be Skylake
    (on("c7i.2xlarge"), {"sapphirerapids"}),
    (on("c7i-flex.2xlarge"), set()),
    (on("m7a.large"), {"zen4-full-cores"}),
    (on("c7g.xlarge"), {"graviton3"}),
    (on("c8i.2xlarge"), {"graniterapids"}),
    (on("c8i-flex.2xlarge"), set()),
    (on("m8a.large"), {"zen5-full-cores"}),
    (on("c8g.xlarge"), {"graviton4"}),
    (on("c6g.xlarge"), set()),
    (on("inf1.xlarge", neuron=Fraction(1)), {"inf1"}),
    (on("inf2.24xlarge", neuron=Fraction(2)), {"inf2"}),
    (accelerated("inferentia", present=True), {"inf1"}),
    (accelerated("inferentia2", present=True), {"inf2"}),
    (accelerated("trainium", present=True), set()),
    (accelerated("inferentia2", present=False), set()),  # the device plugin has not labelled it
    (on("Standard_D8s_v6"), {"sapphirerapids"}),
    (on("Standard_D8s_v5"), set()),  # one of three generations
    (on("Standard_D8ads_v6"), {"zen4"}),
    (on("Standard_F8as_v6"), {"zen4-full-cores"}),
    (node("k", **{"karpenter.k8s.aws/instance-family": "c6i"}), {"icelake"}),
    (gke("n2", "Intel_Cascade_Lake", "Intel_Ice_Lake"), {"icelake"}),
    (gke("n2", "Intel_Cascade_Lake"), {"cascadelake"}),
    (gke("n2"), set()),
    (gke("c2"), {"cascadelake"}),
    (gke("c3"), {"sapphirerapids"}),
    (gke("c3d"), {"zen4"}),
    (gke("c4d"), {"zen5"}),
    (gke("c4"), set()),  # Emerald Rapids or Granite Rapids
    (nfd("Intel", 6, 106, VNNI), {"icelake"}),
    (nfd("Intel", 6, 85, VNNI), {"cascadelake"}),
    (nfd("Intel", 6, 85), set()),  # Skylake
    (nfd("Intel", 6, 85, VNNI, "AVX512BF16"), set()),  # Cooper Lake
    (nfd("Intel", 6, 143, VNNI, "AMXINT8", "AMXTILE"), {"sapphirerapids"}),
    (nfd("Intel", 6, 207, VNNI, "AMXINT8", "AMXTILE"), {"sapphirerapids"}),
    (nfd("Intel", 6, 143, VNNI), set()),  # the hypervisor hides AMX
    (nfd("AMD", 25, 17, "AVX512BF16"), {"zen4"}),
    (nfd("AMD", 25, 17, "AVX512BF16", threads="false"), {"zen4-full-cores"}),
    (nfd("Intel", 6, 173, VNNI, "AMXINT8", "AMXTILE"), {"graniterapids"}),
    (nfd("AMD", 26, 2, "AVX512BF16"), {"zen5"}),
    (nfd("AMD", 26, 17, "AVX512BF16", threads="false"), {"zen5-full-cores"}),
    (nfd("AMD", 26, 68, "AVX512BF16"), set()),  # a desktop
    (nfd("AMD", 25, 1), set()),  # Zen 3
]  # fmt: skip


@pytest.mark.parametrize(("candidate", "classes"), BELONGS)
def test_the_labels_of_a_node_decide_its_classes(candidate: NodeFacts, classes: set[str]) -> None:
    assert {name for name in HARDWARE_CLASSES if place(needs(name), [candidate]).placeable} == classes | {"any"}


def words(placement: PlacementResult) -> str:
    assert not placement.placeable
    return placement.explanation


def test_a_missing_device_plugin_is_named() -> None:
    nodes = [node("a"), node("b"), on("inf1.xlarge", "ip-10-0-3-7")]
    assert words(place(needs("inf1"), nodes)) == (
        "no node offers aws.amazon.com/neuron: hardwareClass inf1 wants nodes labelled "
        "node.kubernetes.io/instance-type in (inf1.xlarge, inf1.2xlarge, inf1.6xlarge, …), or "
        "karpenter.k8s.aws/instance-family=inf1 or in 1 other way that docs/reference/hardware-classes.md lists with "
        "the Neuron device plugin; 3 nodes were looked at: 2 lack the labels, 1 (ip-10-0-3-7) has the labels but "
        "advertises no aws.amazon.com/neuron: is the device plugin running there?"
    )


def test_the_explanation_for_a_class_with_devices_names_its_labels() -> None:
    explanation = words(place(needs("inf2"), [node("a")]))
    assert explanation.startswith("no node offers aws.amazon.com/neuron: hardwareClass inf2 wants nodes labelled")
    assert explanation.endswith("with the Neuron device plugin; 1 node was looked at: 1 lacks the labels")


def test_the_explanation_of_a_nearly_matching_node_names_the_label_that_excludes_it() -> None:
    explanation = words(place(needs("icelake"), [nfd("Intel", 6, 85, VNNI), node("other")]))
    assert "no node belongs to hardwareClass icelake: it wants nodes labelled" in explanation
    assert "1 (bare) has feature.node.kubernetes.io/cpu-model.id=85 where in (106, 108) is wanted" in explanation
    assert "1 lacks the labels" in explanation


def test_the_label_of_the_endpoint_itself_is_named() -> None:
    pod = Pod(node_selector={"zone": "a"})
    explanation = words(place(needs("any", pod=pod), [node("x", zone="b"), node("y")]))
    assert explanation == (
        "no node has zone=a: hardwareClass any or spec.pod.nodeSelector asks for it. Label the nodes, or change "
        "nodeSelector; 2 nodes were looked at: 2 (x, y) have not zone=a"
    )


def test_another_architecture_is_named() -> None:
    arm = NodeFacts("arm", {EC2: "c6i.xlarge", "kubernetes.io/arch": "arm64"}, allocatable=ROOM)
    assert "1 (arm) has not kubernetes.io/arch=amd64" in words(place(needs("icelake"), [arm]))


def test_a_taint_is_named_with_the_toleration_to_write() -> None:
    tainted = NodeFacts(
        "t", {EC2: "c6i.xlarge", "kubernetes.io/arch": "amd64"}, (Taint("team", "NoSchedule", "x"),), ROOM
    )
    explanation = words(place(needs("icelake"), [tainted, node("a")]))
    assert explanation.startswith(
        "the nodes of hardwareClass icelake have taints that the pod does not tolerate: add a "
    )
    assert "toleration of team=x:NoSchedule to spec.pod.tolerations or to the class, or remove the taint" in explanation
    assert explanation.endswith("2 nodes were looked at: 1 lacks the labels, 1 (t) is tainted team=x:NoSchedule")


def test_a_tolerated_taint_is_no_obstacle() -> None:
    tainted = NodeFacts("t", {}, (Taint("team", "NoSchedule", "x"), Taint("soft", "PreferNoSchedule")), ROOM)
    pod = Pod(tolerations=(Toleration(key="team", value="x"),))
    assert place(needs("any", pod=pod), [tainted]).nodes == ("t",)


MINE = "hardwareClass any"
OTHERWISE = [
    (
        {"cordoned": True},
        f"every node of {MINE} that could take the pod is cordoned: kubectl uncordon one of them",
        "1 (n) is cordoned",
    ),
    (
        {"ready": False},
        f"no node of {MINE} is ready: look at it with kubectl describe node",
        "1 (n) is not ready",
    ),
    (
        {"allocatable": {**ROOM, "cpu": Fraction(7, 2)}},
        f"no node of {MINE} is large enough: 4 CPUs are wanted, and the largest has 3.5 CPUs (n) for pods. Lower ",
        "1 (n) has at most 3.5 CPUs",
    ),
    (
        {"allocatable": {**ROOM, "memory": GIB / 2}},
        f"no node of {MINE} is large enough: 1 GiB of memory are wanted, and the largest has 512 MiB of memory (n) ",
        "1 (n) has at most 512 MiB of memory",
    ),
    (
        {"allocatable": {**ROOM, "ephemeral-storage": GIB / 2}},
        f"no node of {MINE} is large enough: 1 GiB of disk are wanted, and the largest has 512 MiB of disk (n) ",
        "1 (n) has at most 512 MiB of disk",
    ),
    (
        {"requested": {"ephemeral-storage": 100 * GIB}},
        f"the nodes of {MINE} are full: 1 GiB of disk are wanted, and the most that is free is 0 bytes of disk (n)",
        "1 (n) has at most 0 bytes of disk free",
    ),
    (
        {"requested": {"cpu": Fraction(61)}},
        f"the nodes of {MINE} are full: 4 CPUs are wanted, and the most that is free is 3 CPUs (n). Add nodes",
        "1 (n) has at most 3 CPUs free",
    ),
    (
        {"requested": {"pods": Fraction(110)}},
        f"the nodes of {MINE} are full: 1 pods are wanted, and the most that is free is 0 pods (n)",
        "1 (n) has at most 0 pods free",
    ),
]


@pytest.mark.parametrize(("changed", "beginning", "ending"), OTHERWISE)
def test_the_explanation_has_the_cause_and_the_node(changed: dict[str, Any], beginning: str, ending: str) -> None:
    explanation = words(place(needs("any"), [NodeFacts(**{"name": "n", "allocatable": ROOM, **changed})]))
    assert explanation.startswith(beginning)
    assert explanation.endswith(ending)


def test_a_cluster_without_nodes_is_explained() -> None:
    assert "the cluster has none that the operator sees" in words(place(needs("any"), []))


def test_many_nodes_are_counted_and_few_are_named() -> None:
    nodes = [NodeFacts(f"n{index}", {}, (Taint("x", "NoSchedule"),), ROOM) for index in range(500)]
    explanation = words(place(needs("any"), nodes))
    assert "500 nodes were looked at: 500 (n0, n1, n10 and 497 more) are tainted x:NoSchedule" in explanation
    many = [NodeFacts(f"n{index}", {}, (Taint(f"x{index}", "NoSchedule"),), ROOM) for index in range(50)]
    assert "44 for other reasons" in words(place(needs("any"), many))
    assert len(words(place(needs("any"), many))) < 2000


@pytest.mark.parametrize(
    ("operator", "values", "label", "expected"),
    [
        ("In", ("a", "b"), "b", True), ("In", ("a",), "c", False), ("In", ("a",), None, False),
        ("NotIn", ("a",), "c", True), ("NotIn", ("a",), "a", False), ("NotIn", ("a",), None, True),
        ("Exists", (), "", True), ("Exists", (), None, False),
        ("DoesNotExist", (), None, True), ("DoesNotExist", (), "x", False),
        ("Gt", ("3",), "4", True), ("Gt", ("3",), "3", False), ("Gt", ("3",), "x", False), ("Gt", ("3",), None, False),
        ("Lt", ("3",), "-4", True), ("Lt", ("3",), "3.0", False), ("Lt", ("3",), "1_0", False),
        ("Lt", ("3",), "２", False), ("Lt", ("3",), " 2", False),
    ],
)  # fmt: skip
def test_labels_are_compared_as_node_affinity_does(
    operator: str, values: tuple[str, ...], label: str | None, *, expected: bool
) -> None:
    requirement = LabelRequirement(key="k", operator=SelectorOperator(operator), values=values)
    assert fulfilled(requirement, {} if label is None else {"k": label}) is expected


EXISTS, EQUAL = TolerationOperator.EXISTS, TolerationOperator.EQUAL


@pytest.mark.parametrize(
    ("toleration", "expected"),
    [
        (Toleration(operator=EXISTS), True),
        (Toleration(operator=EXISTS, effect=TaintEffect.NO_SCHEDULE), True),
        (Toleration(operator=EXISTS, effect=TaintEffect.NO_EXECUTE), False),
        (Toleration(key="k", operator=EXISTS), True),
        (Toleration(key="other", operator=EXISTS), False),
        (Toleration(key="k", operator=EQUAL, value="v"), True),
        (Toleration(key="k", operator=EQUAL, value="w"), False),
        (Toleration(key="k", operator=EQUAL), False),
    ],
)
def test_taints_are_tolerated_as_the_scheduler_does(toleration: Toleration, *, expected: bool) -> None:
    assert tolerated(Taint("k", "NoSchedule", "v"), [toleration]) is expected


def test_a_node_of_the_api_server_is_read() -> None:
    value = {
        "metadata": {"name": "n", "labels": {"a": "b"}},
        "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}], "unschedulable": True},
        "status": {
            "allocatable": {"cpu": "3920m", "memory": "1Gi", "odd": "?"},
            "conditions": [{"type": "Ready", "status": "Unknown"}],
        },
    }
    assert NodeFacts.from_object(value, requested={"cpu": Fraction(1)}) == NodeFacts(
        name="n",
        labels={"a": "b"},
        taints=(Taint("k", "NoSchedule"),),
        allocatable={"cpu": Fraction(98, 25), "memory": GIB, "odd": Fraction(0)},
        requested={"cpu": Fraction(1)},
        cordoned=True,
        ready=False,
    )
    assert NodeFacts.from_object({"metadata": {"name": "bare"}}) == NodeFacts("bare")


LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", "x"]), max_size=3)
REQUIREMENTS = st.tuples(
    st.sampled_from("abc"),
    st.one_of(
        st.tuples(st.sampled_from(["In", "NotIn"]), st.sampled_from([("1",), ("2", "x"), ("x",)])),
        st.tuples(st.sampled_from(["Exists", "DoesNotExist"]), st.just(())),
        st.tuples(st.sampled_from(["Gt", "Lt"]), st.sampled_from([("1",), ("2",)])),
    ),
).map(lambda it: LabelRequirement(key=it[0], operator=SelectorOperator(it[1][0]), values=it[1][1]))
TERMS = st.lists(
    st.lists(REQUIREMENTS, min_size=1, max_size=3).map(lambda it: NodeTerm(match_expressions=tuple(it))), max_size=3
).map(tuple)
TAINTS = st.lists(
    st.builds(Taint, st.sampled_from("kl"), st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"])),
    max_size=2,
    unique_by=lambda taint: (taint.key, taint.effect),
).map(tuple)
AMOUNTS = st.fixed_dictionaries(
    {"cpu": st.integers(0, 4).map(Fraction), "example.com/d": st.integers(0, 2).map(Fraction)}
)
NODES = st.builds(
    NodeFacts,
    name=st.sampled_from(["m", "n", "o"]),
    labels=LABELS,
    taints=TAINTS,
    allocatable=AMOUNTS,
    requested=AMOUNTS,
    cordoned=st.booleans(),
    ready=st.booleans(),
)
NEEDS = st.builds(
    PodRequirements,
    hardware_class=st.just("mine"),
    terms=TERMS,
    labels=LABELS,
    tolerations=st.lists(st.just(Toleration(key="k", operator=EXISTS)), max_size=1).map(tuple),
    requests=AMOUNTS,
)


@given(NEEDS, st.lists(NODES, max_size=6))
def test_a_placement_has_either_nodes_or_an_explanation(asked: PodRequirements, nodes: list[NodeFacts]) -> None:
    placement = place(asked, nodes)
    assert bool(placement.nodes) != bool(placement.explanation)
    assert len(placement.nodes) + len(placement.misses) == len(nodes)
    if not placement.placeable and nodes:
        assert f"{len(nodes)} node" in placement.explanation
        assert not any(text in placement.explanation for text in ("None", "Fraction(", "SelectorOperator"))


@given(NEEDS, NODES)
def test_a_smaller_pod_fits_wherever_a_larger_one_fits(asked: PodRequirements, candidate: NodeFacts) -> None:
    if mismatch(asked, candidate) is None:
        less = PodRequirements("mine", asked.terms, {}, asked.tolerations, {"cpu": asked.requests["cpu"] / 2})
        assert mismatch(less, candidate) is None


@given(NEEDS, st.lists(NODES, max_size=4), NODES)
def test_an_additional_node_removes_no_candidate(
    asked: PodRequirements, nodes: list[NodeFacts], another: NodeFacts
) -> None:
    assert set(place(asked, nodes).nodes) <= set(place(asked, [*nodes, another]).nodes)


def test_an_empty_class_takes_every_node() -> None:
    asked = PodRequirements.of("mine", HardwareClassSpec(), Pod(), cores=1)
    assert place(asked, [node("a"), node("b")]).nodes == ("a", "b")
