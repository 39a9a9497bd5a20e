"""The hardware classes that the chart installs, and whether a node belongs to a class by its labels.
docs/reference/hardware-classes.md lists the source of each label.

Nodes are selected by labels of the cloud or of Node Feature Discovery. The pods also check instruction set and
processor, because clouds mix processor generations under one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.hardware import Isa, NeuronGeneration
from penstock.resources.hardware_class import (
    Architecture,
    HardwareClassSpec,
    LabelRequirement,
    NodeTerm,
    SelectorOperator,
    TaintEffect,
    Toleration,
    TolerationOperator,
)
from penstock.resources.processors import NEURON_DEVICE, Neuron, Processors

ARCHITECTURE = "kubernetes.io/arch"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
"""Set by every cloud."""
KARPENTER_FAMILY = "karpenter.k8s.aws/instance-family"
"""EKS with Karpenter or Auto Mode."""
KARPENTER_ACCELERATOR = "karpenter.k8s.aws/instance-accelerator-name"
NEURON_PRESENT = "neuron.amazonaws.com/present"
"""Set by the Neuron device plugin, on nodes of every generation."""
GKE_FAMILY = "cloud.google.com/machine-family"
GKE_PLATFORM = "supported-cpu-platform.cloud.google.com"
"""On node pools made with a minimum platform: a label for that platform and for each one below it."""
NFD = "feature.node.kubernetes.io"
"""Node Feature Discovery, on any cluster."""
DEDICATED = "penstock.dev/dedicated"
"""The taint for pools that are kept for endpoints: every class tolerates it."""

_INTEL, _AMD = "GenuineIntel", "AuthenticAMD"
_NFD_VENDOR = {_INTEL: "Intel", _AMD: "AMD"}
_SIZES = {
    "c5": "12xlarge 24xlarge metal",
    **dict.fromkeys(("c6i", "m6i", "r6i", "c6id", "m6id", "r6id", "c6in", "m6in", "r6in", "m6idn", "r6idn"),
                    "large xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge 24xlarge 32xlarge metal"),
    **dict.fromkeys(("c7i", "m7i", "r7i"),
                    "large xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge 24xlarge 48xlarge metal-24xl metal-48xl"),
    **dict.fromkeys(("c7a", "m7a", "r7a"),
                    "medium large xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge 24xlarge 32xlarge 48xlarge "
                    "metal-48xl"),
    **dict.fromkeys(("c7g", "m7g", "r7g", "c7gd", "m7gd", "r7gd"),
                    "medium large xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge metal"),
    "c7gn": "medium large xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge metal",
    **dict.fromkeys(("c8i", "m8i", "r8i", "c8id", "m8id", "r8id", "c8in", "m8in", "r8in"),
                    "large xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge 24xlarge 32xlarge 48xlarge 96xlarge "
                    "metal-48xl metal-96xl"),
    **dict.fromkeys(("c8a", "m8a", "r8a"),
                    "medium large xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge 24xlarge 48xlarge metal-24xl "
                    "metal-48xl"),
    **dict.fromkeys(("c8g", "m8g", "r8g", "c8gd", "m8gd", "r8gd", "c8gn", "m8gn", "r8gn"),
                    "medium large xlarge 2xlarge 4xlarge 8xlarge 12xlarge 16xlarge 24xlarge 48xlarge metal-24xl "
                    "metal-48xl"),
    "inf1": "xlarge 2xlarge 6xlarge 24xlarge",
    "inf2": "xlarge 8xlarge 24xlarge 48xlarge",
}  # fmt: skip
"""Sizes of the EC2 families that classes name."""


def _has(key: str, *values: str) -> LabelRequirement:
    if not values:
        return LabelRequirement(key=key, operator=SelectorOperator.EXISTS)
    return LabelRequirement(key=key, operator=SelectorOperator.IN, values=values)


def _lacks(key: str) -> LabelRequirement:
    return LabelRequirement(key=key, operator=SelectorOperator.DOES_NOT_EXIST)


def _term(*requirements: LabelRequirement) -> NodeTerm:
    return NodeTerm(match_expressions=requirements)


def _ec2(*families: str) -> tuple[NodeTerm, ...]:
    """By instance type, which every EKS node has, and by family, so that Karpenter makes sizes that are not listed."""
    types = [f"{family}.{size}" for family in families for size in _SIZES[family].split()]
    return _term(_has(INSTANCE_TYPE, *types)), _term(_has(KARPENTER_FAMILY, *families))


def _neuron(family: str, accelerator: str) -> tuple[NodeTerm, ...]:
    """EC2 nodes with Neuron devices; also by the labels of the device plugin and Karpenter."""
    return *_ec2(family), _term(_has(NEURON_PRESENT, "true"), _has(KARPENTER_ACCELERATOR, accelerator))


def _gke(family: str, *further: LabelRequirement) -> NodeTerm:
    return _term(_has(GKE_FAMILY, family), *further)


def _aks(letters: str, sizes: Iterable[int], *, version: str) -> NodeTerm:
    """Such as Standard_D8ads_v6 for `Dads`."""
    names = [f"Standard_{kind[0]}{size}{kind[1:]}_{version}" for kind in letters.split() for size in sizes]
    return _term(_has(INSTANCE_TYPE, *names))


def _nfd(vendor: str, family: int, models: Iterable[int], *further: LabelRequirement) -> NodeTerm:
    return _term(
        _has(f"{NFD}/cpu-model.vendor_id", _NFD_VENDOR[vendor]),
        _has(f"{NFD}/cpu-model.family", str(family)),
        _has(f"{NFD}/cpu-model.id", *map(str, models)),
        *further,
    )


def _flag(name: str) -> LabelRequirement:
    return _has(f"{NFD}/cpu-cpuid.{name}", "true")


def _threads(*, several: bool) -> LabelRequirement:
    return _has(f"{NFD}/cpu-hardware_multithreading", "true" if several else "false")


_ON_DEDICATED_POOLS = Toleration(key=DEDICATED, operator=TolerationOperator.EXISTS)
_ON_NEURON_POOLS = Toleration(key=NEURON_DEVICE, operator=TolerationOperator.EXISTS, effect=TaintEffect.NO_SCHEDULE)
_ON_ARM_POOLS = Toleration(
    key="kubernetes.io/arch", operator=TolerationOperator.EQUAL, value="arm64", effect=TaintEffect.NO_SCHEDULE
)
_ICE_LAKE = Processors(vendor=_INTEL, family=6, models=(106, 108))
_CASCADE_LAKE = Processors(vendor=_INTEL, family=6, models=(85,))
_SAPPHIRE_RAPIDS = Processors(vendor=_INTEL, family=6, models=(143, 207))
_ZEN4 = Processors(vendor=_AMD, family=25, models=(*range(0x10, 0x20), *range(0xA0, 0xB0)))
_GRANITE_RAPIDS = Processors(vendor=_INTEL, family=6, models=(173, 174))
_ZEN5 = Processors(vendor=_AMD, family=26, models=(*range(0x20),))
_NEOVERSE_V2 = Processors(vendor="0x41", family=8, models=(0xD4F,))
_NEOVERSE_V1 = Processors(vendor="0x41", family=8, models=(0xD40,))

HARDWARE_CLASSES: dict[str, HardwareClassSpec] = {
    "any": HardwareClassSpec(
        description="Every node. One CPU is requested for each core: where SMT is on, create a class with "
        "threadsPerCore: 2.",
        tolerations=(_ON_DEDICATED_POOLS,),
    ),
    "icelake": HardwareClassSpec(
        description="Intel Xeon of the 3rd generation (Ice Lake): AVX-512 with VNNI.",
        architecture=Architecture.AMD64,
        node_selector_terms=(
            *_ec2("c6i", "m6i", "r6i", "c6id", "m6id", "r6id", "c6in", "m6in", "r6in", "m6idn", "r6idn"),
            _gke("n2", _has(f"{GKE_PLATFORM}/Intel_Ice_Lake"), _lacks(f"{GKE_PLATFORM}/Intel_Sapphire_Rapids")),
            _nfd(_INTEL, 6, _ICE_LAKE.models, _flag("AVX512VNNI")),
        ),
        tolerations=(_ON_DEDICATED_POOLS,),
        threads_per_core=2,
        isa=Isa.AVX512_VNNI,
        processors=(_ICE_LAKE,),
    ),
    "cascadelake": HardwareClassSpec(
        description="Intel Xeon of the 2nd generation (Cascade Lake): AVX-512 with VNNI.",
        architecture=Architecture.AMD64,
        node_selector_terms=(
            # Other sizes of C5, and all of M5 and R5, may be Skylake, which has no VNNI: there, NFD labels decide.
            _ec2("c5")[0],
            _gke("n2", _has(f"{GKE_PLATFORM}/Intel_Cascade_Lake"), _lacks(f"{GKE_PLATFORM}/Intel_Ice_Lake")),
            _gke("c2"),
            _nfd(_INTEL, 6, _CASCADE_LAKE.models, _flag("AVX512VNNI"), _lacks(f"{NFD}/cpu-cpuid.AVX512BF16")),
        ),
        tolerations=(_ON_DEDICATED_POOLS,),
        threads_per_core=2,
        isa=Isa.AVX512_VNNI,
        processors=(_CASCADE_LAKE,),
    ),
    "sapphirerapids": HardwareClassSpec(
        description="Intel Xeon of the 4th and 5th generation (Sapphire Rapids, Emerald Rapids): AMX.",
        architecture=Architecture.AMD64,
        node_selector_terms=(
            *_ec2("c7i", "m7i", "r7i"),
            _gke("c3"),
            _aks("Ds Dds Es Eds", (2, 4, 8, 16, 32, 48, 64, 96, 128), version="v6"),
            _nfd(_INTEL, 6, _SAPPHIRE_RAPIDS.models, _flag("AMXINT8"), _flag("AMXTILE")),
        ),
        tolerations=(_ON_DEDICATED_POOLS,),
        threads_per_core=2,
        isa=Isa.AMX,
        processors=(_SAPPHIRE_RAPIDS,),
    ),
    "graniterapids": HardwareClassSpec(
        description="Intel Xeon 6 with P-cores (Granite Rapids): AMX.",
        architecture=Architecture.AMD64,
        node_selector_terms=(
            # Machines of GKE's C4 are Emerald Rapids or Granite Rapids under one label: there, NFD labels decide.
            *_ec2("c8i", "m8i", "r8i", "c8id", "m8id", "r8id", "c8in", "m8in", "r8in"),
            _aks("Ds Dds Es Eds", (2, 4, 8, 16, 32, 48, 64, 96, 128, 192), version="v7"),
            _nfd(_INTEL, 6, _GRANITE_RAPIDS.models, _flag("AMXINT8"), _flag("AMXTILE")),
        ),
        tolerations=(_ON_DEDICATED_POOLS,),
        threads_per_core=2,
        isa=Isa.AMX,
        processors=(_GRANITE_RAPIDS,),
    ),
    "zen4": HardwareClassSpec(
        description="AMD EPYC of the 4th generation (Zen 4) with two threads a core: AVX-512 with VNNI and bf16.",
        architecture=Architecture.AMD64,
        node_selector_terms=(
            _gke("c3d"),
            _aks("Das Dads Eas Eads", (2, 4, 8, 16, 32, 48, 64, 96), version="v6"),
            _nfd(_AMD, 25, _ZEN4.models, _flag("AVX512BF16"), _threads(several=True)),
        ),
        tolerations=(_ON_DEDICATED_POOLS,),
        threads_per_core=2,
        isa=Isa.AVX512_BF16,
        processors=(_ZEN4,),
    ),
    "zen4-full-cores": HardwareClassSpec(
        description="AMD EPYC of the 4th generation (Zen 4) where a CPU is a whole core, as on EC2.",
        architecture=Architecture.AMD64,
        node_selector_terms=(
            *_ec2("c7a", "m7a", "r7a"),
            _aks("Fas Fads Fals Falds Fams Famds", (2, 4, 8, 16, 32, 48, 64), version="v6"),
            _nfd(_AMD, 25, _ZEN4.models, _flag("AVX512BF16"), _threads(several=False)),
        ),
        tolerations=(_ON_DEDICATED_POOLS,),
        threads_per_core=1,
        isa=Isa.AVX512_BF16,
        processors=(_ZEN4,),
    ),
    "zen5": HardwareClassSpec(
        description="AMD EPYC of the 5th generation (Zen 5) with two threads a core: AVX-512 with VNNI and bf16.",
        architecture=Architecture.AMD64,
        node_selector_terms=(_gke("c4d"), _nfd(_AMD, 26, _ZEN5.models, _flag("AVX512BF16"), _threads(several=True))),
        tolerations=(_ON_DEDICATED_POOLS,),
        threads_per_core=2,
        isa=Isa.AVX512_BF16,
        processors=(_ZEN5,),
    ),
    "zen5-full-cores": HardwareClassSpec(
        description="AMD EPYC of the 5th generation (Zen 5) where a CPU is a whole core, as on EC2.",
        architecture=Architecture.AMD64,
        node_selector_terms=(
            *_ec2("c8a", "m8a", "r8a"),
            _nfd(_AMD, 26, _ZEN5.models, _flag("AVX512BF16"), _threads(several=False)),
        ),
        tolerations=(_ON_DEDICATED_POOLS,),
        threads_per_core=1,
        isa=Isa.AVX512_BF16,
        processors=(_ZEN5,),
    ),
    "graviton3": HardwareClassSpec(
        description="AWS Graviton 3 (Neoverse V1): 8-bit and bf16 matrix products.",
        architecture=Architecture.ARM64,
        node_selector_terms=_ec2("c7g", "m7g", "r7g", "c7gd", "m7gd", "r7gd", "c7gn"),
        tolerations=(_ON_DEDICATED_POOLS, _ON_ARM_POOLS),
        threads_per_core=1,
        isa=Isa.NEON_I8MM,
        processors=(_NEOVERSE_V1,),
    ),
    "graviton4": HardwareClassSpec(
        description="AWS Graviton 4 (Neoverse V2): 8-bit and bf16 matrix products.",
        architecture=Architecture.ARM64,
        node_selector_terms=_ec2("c8g", "m8g", "r8g", "c8gd", "m8gd", "r8gd", "c8gn", "m8gn", "r8gn"),
        tolerations=(_ON_DEDICATED_POOLS, _ON_ARM_POOLS),
        threads_per_core=1,
        isa=Isa.NEON_I8MM,
        processors=(_NEOVERSE_V2,),
    ),
    "inf1": HardwareClassSpec(
        description="AWS Inferentia: devices of 4 NeuronCores. Not yet run on a device; AWS no longer supports Inf1.",
        architecture=Architecture.AMD64,
        node_selector_terms=_neuron("inf1", "inferentia"),
        tolerations=(_ON_DEDICATED_POOLS, _ON_NEURON_POOLS),
        neuron=Neuron(target=NeuronGeneration.INF1, cores_per_device=4, host_cpus_per_device=2, most_devices=16),
    ),
    "inf2": HardwareClassSpec(
        description="AWS Inferentia 2: devices of 2 NeuronCores. Not yet run on a device.",
        architecture=Architecture.AMD64,
        node_selector_terms=_neuron("inf2", "inferentia2"),
        tolerations=(_ON_DEDICATED_POOLS, _ON_NEURON_POOLS),
        neuron=Neuron(target=NeuronGeneration.INF2, cores_per_device=2, host_cpus_per_device=2, most_devices=12),
    ),
}
"""Hardware classes by name."""


def fulfilled(requirement: LabelRequirement, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels satisfies the requirement, by the rules of node affinity."""
    value = labels.get(requirement.key)
    match requirement.operator:
        case SelectorOperator.EXISTS:
            return value is not None
        case SelectorOperator.DOES_NOT_EXIST:
            return value is None
        case SelectorOperator.IN:
            return value in requirement.values
        case SelectorOperator.NOT_IN:
            return value not in requirement.values
    number, bound = _integer(value), _integer(requirement.values[0])
    if number is None or bound is None:
        return False
    return number > bound if requirement.operator is SelectorOperator.GREATER else number < bound


def belongs(labels: Mapping[str, str], hardware: HardwareClassSpec) -> bool:
    """Whether a node with these labels belongs to the class."""
    if hardware.architecture is not None and labels.get(ARCHITECTURE) != hardware.architecture.value:
        return False
    terms = hardware.node_selector_terms
    return not terms or any(all(fulfilled(one, labels) for one in term.match_expressions) for term in terms)


def _integer(text: str | None) -> int | None:
    """An integer as the scheduler parses it: 64 bits; None for other text."""
    try:
        number = int(text or "", 10)
    except ValueError:
        return None
    plain = text is not None and text.isascii() and "_" not in text and text.strip() == text
    return number if plain and -(2**63) <= number < 2**63 else None
