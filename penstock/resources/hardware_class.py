"""HardwareClass (`penstock.dev/v1alpha1`, cluster-scoped): a kind of node, and the resources that its pods request.

The classes that the chart installs are values in `penstock.resources.shipped_classes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.errors import SpecError
from penstock.hardware import CpuIdentity, Isa, NeuronGeneration
from penstock.resources.base import Metadata, Resource, Spec
from penstock.resources.fields.rules import ObjectName, Rule
from penstock.resources.fields.text_fields import LabelKey, LabelValue
from penstock.resources.processors import NEURON_RESOURCES, Neuron, NeuronResource, Processors


class TolerationOperator(StrEnum):
    """How a toleration is compared with a taint."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """Effects of taints."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Spec):
    """A toleration, as in a pod."""

    key: LabelKey | None = Field(default=None, description="The taint's key. None, with `Exists`: every taint.")
    operator: TolerationOperator = Field(
        default=TolerationOperator.EQUAL, description="`Exists` compares the key, `Equal` key and value."
    )
    value: LabelValue | None = Field(default=None, description="The taint's value, with `Equal`.")
    effect: TaintEffect | None = Field(default=None, description="None: every effect.")
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=86_400, description="How long to stay on a node with such a NoExecute taint."
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.operator != 'Equal' || has(self.key)",
            lambda it: it.operator is not TolerationOperator.EQUAL or it.key is not None,
            "operator Equal needs a key: add it, or write operator: Exists to tolerate every taint",
        ),
        Rule(
            "self.operator != 'Exists' || !has(self.value) || self.value == ''",
            lambda it: it.operator is not TolerationOperator.EXISTS or not it.value,
            "operator Exists takes no value: remove value, or write operator: Equal",
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            lambda it: it.toleration_seconds is None or it.effect is TaintEffect.NO_EXECUTE,
            "tolerationSeconds is for effect NoExecute: write effect: NoExecute, or remove tolerationSeconds",
        ),
    )


class Architecture(StrEnum):
    """Values of the label kubernetes.io/arch."""

    AMD64 = "amd64"
    ARM64 = "arm64"


class SelectorOperator(StrEnum):
    """Operators of node affinity."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GREATER = "Gt"
    LESS = "Lt"


class LabelRequirement(Spec):
    """A condition on one label of a node, as in node affinity."""

    key: LabelKey = Field(description="The label.")
    operator: SelectorOperator
    values: tuple[LabelValue, ...] = Field(
        default=(), max_length=256, description="Values to compare with; none for Exists and DoesNotExist."
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(self.operator in ['In', 'NotIn']) || (has(self.values) && size(self.values) > 0)",
            lambda it: it.operator not in {SelectorOperator.IN, SelectorOperator.NOT_IN} or bool(it.values),
            "operators In and NotIn need values: list at least one",
        ),
        Rule(
            "!(self.operator in ['Exists', 'DoesNotExist']) || !has(self.values) || size(self.values) == 0",
            lambda it: it.operator not in {SelectorOperator.EXISTS, SelectorOperator.DOES_NOT_EXIST} or not it.values,
            "operators Exists and DoesNotExist take no values: remove them",
        ),
        Rule(
            "!(self.operator in ['Gt', 'Lt']) || (has(self.values) && size(self.values) == 1 && "
            "self.values[0].matches('^[0-9]{1,15}$'))",
            lambda it: (
                it.operator not in {SelectorOperator.GREATER, SelectorOperator.LESS}
                or (len(it.values) == 1 and it.values[0].isascii() and it.values[0].isdigit())
            ),
            "operators Gt and Lt need one value, a whole number in quotes",
        ),
    )


class NodeTerm(Spec):
    """Conditions that all have to be true of a node."""

    match_expressions: tuple[LabelRequirement, ...] = Field(
        min_length=1, max_length=8, description="Conditions on labels, all of which must be true."
    )


class NamespaceRequirement(LabelRequirement):
    """A condition on one label of a namespace, as in a label selector."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *LabelRequirement.RULES,
        Rule(
            "!(self.operator in ['Gt', 'Lt'])",
            lambda it: it.operator not in {SelectorOperator.GREATER, SelectorOperator.LESS},
            "namespaces are selected with In, NotIn, Exists and DoesNotExist: write one of them",
        ),
    )

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether it is true of a namespace with these labels."""
        if self.operator is SelectorOperator.IN:
            return labels.get(self.key) in self.values
        if self.operator is SelectorOperator.NOT_IN:
            return labels.get(self.key) not in self.values
        return (self.key in labels) is (self.operator is SelectorOperator.EXISTS)


class NamespaceSelector(Spec):
    """Namespaces by their labels. Kubernetes gives each the label kubernetes.io/metadata.name."""

    match_labels: dict[str, LabelValue] = Field(
        default_factory=dict, max_length=16, description="Labels that a namespace must have, with these values."
    )
    match_expressions: tuple[NamespaceRequirement, ...] = Field(
        default=(), max_length=16, description="Conditions on labels, all of which must be true as well."
    )

    def includes(self, labels: Mapping[str, str]) -> bool:
        """Whether a namespace with these labels is selected."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            requirement.holds(labels) for requirement in self.match_expressions
        )


class Price(Spec):
    """The price of a core, for the cost of a million requests. Without it the instance type of the nodes counts, if one
    of the shipped lists has it (penstock.prices)."""

    per_core_hour: float = Field(ge=0, le=1_000_000, description="The price of one core (or NeuronCore) for an hour.")
    currency: str = Field(default="USD", min_length=3, max_length=3, description="Such as USD.")


class HardwareClassSpec(Spec):
    """Which nodes belong to the class, and the resources that pods request on them."""

    description: str = Field(default="", max_length=512, description="For people, such as the processor's name.")
    architecture: Architecture | None = Field(
        default=None, description="The label kubernetes.io/arch of the nodes. None: any."
    )
    node_selector_terms: tuple[NodeTerm, ...] = Field(
        default=(),
        max_length=12,
        description="A node belongs to the class when one of these is true. Empty: every node.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=16, description="Taints of such nodes that the pods tolerate."
    )
    threads_per_core: int = Field(default=1, ge=1, le=8, description="CPUs of one physical core: 2 where SMT is on.")
    isa: Isa | None = Field(
        default=None, description="The instruction set of every node of the class; the pods check it. None: any."
    )
    processors: tuple[Processors, ...] = Field(
        default=(), max_length=16, description="The processors of the class; the pods check it. Empty: any."
    )
    neuron: Neuron | None = Field(default=None, description="Inferentia devices of the nodes. None: the CPUs compute.")
    resources: dict[str, Annotated[int, Field(ge=1, le=1_000_000)]] = Field(
        default_factory=dict, max_length=8, description="Extended resources that every pod requests, as whole numbers."
    )
    scheduler_name: ObjectName | None = Field(
        default=None, description="The scheduler of the pods, such as the Neuron scheduler extension's. None: default."
    )
    runtime_class_name: ObjectName | None = Field(default=None, description="The runtime class of the pods.")
    price: Price | None = None
    allowed_namespaces: NamespaceSelector | None = Field(
        default=None, description="Namespaces whose endpoints may use the class. None: all."
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.resources) || self.resources.all(name, !(name in "
            "['aws.amazon.com/neuron', 'aws.amazon.com/neuroncore', 'aws.amazon.com/neurondevice']))",
            lambda it: not any(name in NEURON_RESOURCES for name in it.resources),
            "Neuron devices are asked for by spec.neuron, in whole devices: remove them from resources and "
            "write neuron.coresPerDevice",
            field_path=".resources",
        ),
        Rule(
            "!has(self.resources) || self.resources.all(name, name.contains('/'))",
            lambda it: all("/" in name for name in it.resources),
            "resources are extended ones, such as example.com/device: cpu and memory come from the endpoint",
            field_path=".resources",
        ),
        Rule(
            "!has(self.neuron) || (!has(self.isa) && (!has(self.processors) || size(self.processors) == 0))",
            lambda it: it.neuron is None or (it.isa is None and not it.processors),
            "isa and processors promise what the CPUs compute, and with neuron the devices do it: remove them",
        ),
        Rule(
            "!has(self.neuron) || !has(self.neuron.resource) || self.neuron.resource != 'core' || "
            "self.neuron.mostDevices == 1 || "
            "has(self.schedulerName)",
            lambda it: (
                it.neuron is None
                or it.neuron.resource is not NeuronResource.CORE
                or it.neuron.most_devices == 1
                or it.scheduler_name is not None
            ),
            "with neuron.resource core, a pod has to get neighbouring NeuronCores, which only the Neuron scheduler "
            "extension ensures on nodes of several devices: write schedulerName, or mostDevices: 1",
        ),
    )

    @property
    def target(self) -> NeuronGeneration | None:
        """The Inferentia devices that models are compiled for; None: CPUs compute."""
        return None if self.neuron is None else self.neuron.generation

    def devices(self, cores: int) -> int:
        """The devices for this number of NeuronCores; 0 for a class without. SpecError when it is not whole devices."""
        if self.neuron is None:
            return 0
        each = self.neuron.cores_per_device
        devices, rest = divmod(cores, each)
        if rest:
            near = f"{devices * each} or {(devices + 1) * each}" if devices else f"{each}"
            raise SpecError(
                f"spec.cores: {cores} NeuronCores are not whole devices, which have {each} each",
                field="spec.cores",
                remedy=f"Write {near}",
            )
        return devices

    def devices_text(self, cores: int) -> str:
        """For messages, the devices for a pod with this number of cores; empty for a class without. SpecError
        as `devices`."""
        if self.neuron is None:
            return ""
        resource = self.neuron.resource.name_on_nodes
        return f"{self.requests(cores)[resource]} {resource}"

    def objection_to_cores(self, cores: int) -> SpecError | None:
        """Why pods with this number of cores cannot serve on the class, as an error; None: they can."""
        try:
            devices = self.devices(cores)
        except SpecError as error:
            return error
        if self.neuron is None:
            return None
        if devices > self.neuron.most_devices:
            most = self.neuron.most_devices * self.neuron.cores_per_device
            return SpecError(
                f"spec.cores: {cores} NeuronCores are more than the {most} of the class's largest node "
                "(neuron.mostDevices)",
                field="spec.cores",
                remedy=f"Write at most {most}",
            )
        if self.scheduler_name is None and self.neuron.needs_neighbours(devices):
            return SpecError(
                f"spec.cores: {cores} NeuronCores have to be those of {devices} neighbouring devices, of the up to "
                f"{self.neuron.most_devices} of a node, and the default scheduler does not ensure that",
                field="spec.cores",
                remedy=f"Write {self.neuron.cores_per_device}; or install the Neuron scheduler extension and write its "
                "name in schedulerName of the HardwareClass; or make a class of nodes with that many devices and write "
                "their number in neuron.mostDevices",
            )
        return None

    def cpus(self, cores: int) -> int:
        """The CPUs of a pod: its cores with all their threads, or the host CPUs of the Neuron devices. SpecError as
        `devices`."""
        if self.neuron is not None:
            return self.devices(cores) * self.neuron.host_cpus_per_device
        return cores * self.threads_per_core

    def requests(self, cores: int) -> dict[str, int]:
        """The container's resources besides memory: whole CPUs and extended resources. SpecError as `devices`."""
        wanted = {"cpu": self.cpus(cores), **self.resources}
        if self.neuron is not None:
            devices = self.devices(cores)
            by_device = self.neuron.resource is NeuronResource.DEVICE
            wanted[self.neuron.resource.name_on_nodes] = devices if by_device else cores
        return wanted

    @property
    def compile_host(self) -> HardwareClassSpec:
        """The nodes that compile models for the devices of this class: x86 nodes, with CPUs only.

        The compilers of the Neuron SDK run on x86 and need no device. Without the toleration of Neuron nodes the pod
        stays away from them where they are tainted.
        """
        return HardwareClassSpec(
            architecture=Architecture.AMD64,
            tolerations=tuple(one for one in self.tolerations if one.key not in NEURON_RESOURCES),
        )

    def objection(self, cpu: CpuIdentity, *, name: str) -> str:
        """Why a node with this processor does not belong to the class `name`, whatever its labels; else empty."""
        if self.isa is not None and cpu.isa is not self.isa:
            return f"hardwareClass {name} promises {self.isa.value}, and the node has {cpu.isa.value}: {cpu.summary}"
        if self.processors and not any(known.include(cpu) for known in self.processors):
            return (
                f"hardwareClass {name} does not list the node's processor: {cpu.summary}, "
                f"{cpu.vendor} family {cpu.family} model {cpu.model}"
            )
        return ""


class HardwareClass(Resource):
    """A kind of node: which nodes belong to it, the resources that pods request on them, and their processors.
    Endpoints name one in spec.hardwareClass."""

    KIND: ClassVar[str] = "HardwareClass"

    api_version: Literal["penstock.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["HardwareClass"]
    metadata: Metadata
    spec: HardwareClassSpec = HardwareClassSpec()
