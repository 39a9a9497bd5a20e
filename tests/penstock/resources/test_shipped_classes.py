"""The hardware classes that the chart installs: resources of their pods, and the nodes that they accept."""

from __future__ import annotations

import pytest

from penstock.errors import SpecError
from penstock.hardware import CpuIdentity, Isa
from penstock.resources.hardware_class import Architecture, HardwareClass, HardwareClassSpec
from penstock.resources.processors import Neuron, NeuronResource
from penstock.resources.shipped_classes import DEDICATED, HARDWARE_CLASSES

ICE_LAKE = CpuIdentity(vendor="GenuineIntel", family=6, model=106, model_name="Xeon 8375C", isa=Isa.AVX512_VNNI)
CASCADE_LAKE = CpuIdentity(
    vendor="GenuineIntel", family=6, model=85, stepping=7, model_name="Xeon 8275CL", isa=Isa.AVX512_VNNI
)
SKYLAKE = CpuIdentity(vendor="GenuineIntel", family=6, model=85, stepping=4, model_name="Xeon", isa=Isa.AVX512)
GRAVITON3 = CpuIdentity(vendor="0x41", family=8, model=0xD40, model_name="Neoverse V1", isa=Isa.NEON_I8MM)
GENOA = CpuIdentity(vendor="AuthenticAMD", family=25, model=17, model_name="EPYC 9R14", isa=Isa.AVX512_BF16)
SPR = CpuIdentity(vendor="GenuineIntel", family=6, model=143, model_name="Xeon 8488C", isa=Isa.AMX)


def test_the_documented_classes_exist() -> None:
    promised = {"icelake", "cascadelake", "sapphirerapids", "zen4", "graviton3", "inf1", "inf2", "any"}
    assert promised <= HARDWARE_CLASSES.keys()


@pytest.mark.parametrize("name", HARDWARE_CLASSES)
def test_every_class_is_a_valid_resource_with_a_description(name: str) -> None:
    spec = HARDWARE_CLASSES[name]
    resource = {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": name}}
    assert HardwareClass.from_object({**resource, "spec": spec.to_object()}).spec == spec
    assert spec.description
    assert any(toleration.key == DEDICATED for toleration in spec.tolerations)
    assert bool(spec.node_selector_terms) == (name != "any")


@pytest.mark.parametrize(
    ("name", "cores", "requests"),
    [
        ("any", 3, {"cpu": 3}),
        ("icelake", 3, {"cpu": 6}),
        ("graviton3", 3, {"cpu": 3}),
        ("zen4", 2, {"cpu": 4}),
        ("zen4-full-cores", 2, {"cpu": 2}),
        ("inf1", 4, {"cpu": 2, "aws.amazon.com/neuron": 1}),
        ("inf1", 16, {"cpu": 8, "aws.amazon.com/neuron": 4}),
        ("inf2", 2, {"cpu": 2, "aws.amazon.com/neuron": 1}),
    ],
)
def test_a_pod_asks_for_whole_cores_with_all_their_threads(name: str, cores: int, requests: dict[str, int]) -> None:
    assert HARDWARE_CLASSES[name].requests(cores) == requests


def test_a_class_without_a_target_has_the_generation_with_its_cores() -> None:
    found = [HardwareClassSpec(neuron=Neuron(cores_per_device=cores)).target for cores in (2, 4)]

    assert found == ["inf2", "inf1"]


@pytest.mark.parametrize(("cores", "remedy"), [(1, "Write 4"), (5, "Write 4 or 8"), (18, "Write 16 or 20")])
def test_a_part_of_a_neuron_device_is_refused(cores: int, remedy: str) -> None:
    with pytest.raises(SpecError, match="are not whole devices, which have 4 each") as caught:
        HARDWARE_CLASSES["inf1"].requests(cores)
    assert (caught.value.field, caught.value.remedy) == ("spec.cores", remedy)


def test_additional_resources_of_a_class_are_requested() -> None:
    spec = HardwareClassSpec(neuron=Neuron(cores_per_device=2), resources={"vpc.amazonaws.com/efa": 1})
    assert spec.requests(4) == {"cpu": 4, "vpc.amazonaws.com/efa": 1, "aws.amazon.com/neuron": 2}


@pytest.mark.parametrize(
    ("name", "cpu", "words"),
    [
        ("icelake", ICE_LAKE, ""),
        ("cascadelake", CASCADE_LAKE, ""),
        ("sapphirerapids", SPR, ""),
        ("zen4", GENOA, ""),
        ("zen4-full-cores", GENOA, ""),
        ("graviton3", GRAVITON3, ""),
        ("any", SKYLAKE, ""),
        ("inf1", SKYLAKE, ""),
        (
            "cascadelake",
            SKYLAKE,
            "hardwareClass cascadelake promises avx512-vnni, and the node has avx512: Xeon (Skylake",
        ),
        (
            "icelake",
            CASCADE_LAKE,
            "hardwareClass icelake does not list the node's processor: Xeon 8275CL (Cascade Lake,",
        ),
        ("icelake", CASCADE_LAKE, "GenuineIntel family 6 model 85"),
        ("graviton3", GENOA, "promises neon-i8mm, and the node has avx512-bf16"),
    ],
)
def test_a_class_accepts_a_node_by_its_processor(name: str, cpu: CpuIdentity, words: str) -> None:
    objection = HARDWARE_CLASSES[name].objection(cpu, name=name)
    assert words in objection
    assert bool(words) == bool(objection)


@pytest.mark.parametrize(
    ("update", "cores", "words"),
    [
        ({}, 2, ""),
        ({}, 24, ""),  # all devices of the largest node
        ({}, 4, "4 NeuronCores have to be those of 2 neighbouring devices"),
        ({}, 22, "22 NeuronCores have to be those of 11 neighbouring devices"),
        ({}, 26, "26 NeuronCores are more than the 24 of the class's largest node"),
        ({"schedulerName": "neuron-scheduler"}, 4, ""),
        ({"neuron": {"coresPerDevice": 2, "mostDevices": 6}}, 12, ""),
        ({"neuron": {"coresPerDevice": 2, "mostDevices": 1}}, 2, ""),
        ({"neuron": {"coresPerDevice": 2, "mostDevices": 1, "resource": "core"}}, 2, ""),
        ({}, 3, "3 NeuronCores are not whole devices"),
    ],
)
def test_neighbouring_neuron_devices_need_a_scheduler_that_knows_them(
    update: dict[str, object], cores: int, words: str
) -> None:
    spec = HardwareClassSpec.model_validate({**HARDWARE_CLASSES["inf2"].to_object(), **update})
    wrong = spec.objection_to_cores(cores)
    assert (wrong is None) == (not words)
    if wrong is not None:
        assert words in str(wrong)
        assert (wrong.field, bool(wrong.remedy)) == ("spec.cores", True)


def test_a_class_of_cpus_has_no_objection_to_cores() -> None:
    assert HARDWARE_CLASSES["icelake"].objection_to_cores(7) is None


def test_neuron_cores_are_requested_instead_of_devices_where_the_class_names_them() -> None:
    neuron = Neuron(cores_per_device=2, resource=NeuronResource.CORE)
    spec = HardwareClassSpec(neuron=neuron, scheduler_name="neuron-scheduler")
    assert spec.requests(4) == {"cpu": 4, "aws.amazon.com/neuroncore": 4}
    assert spec.devices_text(4) == "4 aws.amazon.com/neuroncore"


def test_models_for_neuron_devices_are_compiled_on_x86_nodes_without_devices() -> None:
    for name in ("inf1", "inf2"):
        host = HARDWARE_CLASSES[name].compile_host
        assert host.requests(8) == {"cpu": 8}
        assert (host.architecture, host.node_selector_terms) == (Architecture.AMD64, ())
        assert [toleration.key for toleration in host.tolerations] == [DEDICATED]
