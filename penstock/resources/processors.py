"""The processors and Inferentia devices of a HardwareClass."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from penstock.hardware import CpuIdentity, NeuronGeneration
from penstock.resources.base import NO_SCHEMA_DEFAULT, Spec
from penstock.resources.fields.rules import Rule

NEURON_DEVICE = "aws.amazon.com/neuron"
NEURON_CORE = "aws.amazon.com/neuroncore"
NEURON_RESOURCES = (NEURON_DEVICE, NEURON_CORE, "aws.amazon.com/neurondevice")
"""Resources of the Neuron device plugin: devices or cores, never both; the last is the old name of devices."""


class Processors(Spec):
    """Processors of the class, as identified by /proc/cpuinfo."""

    vendor: str = Field(
        min_length=1, max_length=32, description="GenuineIntel, AuthenticAMD; on Arm the implementer, such as 0x41."
    )
    family: int = Field(ge=0, le=1_000_000, description="On Arm the architecture version.")
    models: tuple[Annotated[int, Field(ge=0, le=1_000_000)], ...] = Field(
        min_length=1, max_length=64, description="On Arm part numbers."
    )

    def include(self, cpu: CpuIdentity) -> bool:
        """True when the processor is one of these."""
        return (cpu.vendor, cpu.family) == (self.vendor, self.family) and cpu.model in self.models


class NeuronResource(StrEnum):
    """What pods request of the Neuron device plugin. Both belong to one device, and the plugin's accounts of them
    differ: a class requests one of them, and the nodes of a class should have no pods that request the other."""

    DEVICE = "device"
    CORE = "core"

    @property
    def name_on_nodes(self) -> str:
        """The extended resource that nodes advertise."""
        return NEURON_DEVICE if self is NeuronResource.DEVICE else NEURON_CORE


class Neuron(Spec):
    """AWS Inferentia: `cores` of an endpoint are then NeuronCores, allocated as whole devices."""

    target: NeuronGeneration | None = Field(
        default=None,
        description="What models are compiled for. Default: what coresPerDevice tells. AWS no longer supports inf1.",
    )
    resource: NeuronResource = Field(
        default=NeuronResource.DEVICE,
        description="What pods request: aws.amazon.com/neuron (device) or aws.amazon.com/neuroncore (core). All pods "
        "of a node should request the same.",
        json_schema_extra=NO_SCHEMA_DEFAULT,
    )
    cores_per_device: int = Field(ge=1, le=16, description="NeuronCores of one device: 4 on Inf1, 2 on Inf2.")
    host_cpus_per_device: int = Field(
        default=2, ge=1, le=64, description="CPUs of the host for each device, for tokenisation and the server."
    )
    most_devices: int = Field(default=16, ge=1, le=64, description="Devices of the largest node of the class.")

    RULES: ClassVar[tuple[Rule, ...]] = (
        # Without a default of the field: classes of releases that had no target stay valid.
        Rule(
            "has(self.target) ? self.coresPerDevice == (self.target == 'inf1' ? 4 : 2) : self.coresPerDevice in [2, 4]",
            lambda it: it.cores_per_device == it.generation.cores_per_device,
            "a device of inf1 has 4 NeuronCores, one of inf2 has 2: write coresPerDevice: 4 with target: inf1, or "
            "coresPerDevice: 2 with target: inf2",
        ),
    )

    @property
    def generation(self) -> NeuronGeneration:
        """What models are compiled for."""
        inf1 = NeuronGeneration.INF1
        return self.target or (inf1 if self.cores_per_device == inf1.cores_per_device else NeuronGeneration.INF2)

    def needs_neighbours(self, devices: int) -> bool:
        """Whether a pod with this number of devices has to get neighbouring ones: more than one, and not all of the
        node's; with cores also the ones of one device, where a node has several."""
        fewest = 2 if self.resource is NeuronResource.DEVICE else 1
        return fewest <= devices < self.most_devices
