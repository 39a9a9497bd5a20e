"""Environment variables of the Neuron engine, and the NeuronCores that this process may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from penstock.errors import HostError, SettingError
from penstock.hardware import NeuronGeneration
from penstock.settings import setting
from penstock_runtime.settings import Variables

VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
"""Set by the device plugin for a container, and read by the Neuron runtime: `3`, `0-3` or `0,1,2-5`."""
NUMBER_OF_CORES = "NEURON_RT_NUM_CORES"


class NeuronVariables(Variables):
    """Of a process that serves a model on Inferentia. The operator sets target and cores in pods."""

    neuron_target: NeuronGeneration | None = setting(
        None, "Generation of the device: `inf1` or `inf2`. None: that of the artefact, unchecked."
    )
    neuron_cores: int | None = setting(
        None,
        "NeuronCores to use. Must be as many as NEURON_RT_VISIBLE_CORES names, where that is set. None: those, or as "
        "many as the plan was made for.",
        unit="cores",
        ge=1,
        le=1024,
    )
    neuron_python: Path | None = setting(
        None,
        "Interpreter with torch and its Neuron package, for the process that owns the device. The images set it. None: "
        "the server's own.",
    )
    neuron_start_seconds: float = setting(
        60.0,
        "How long the start is tried again while another process, which may just be ending, has the NeuronCores.",
        unit="s",
        ge=0,
    )
    neuron_capacity_seconds: float = setting(
        75.0,
        "How long a pod may measure the capacity of a replica before it is ready, if no other pod has measured the "
        "artefact. 0: it is not measured.",
        unit="s",
        ge=0,
        le=600,
    )

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Read its variables only: the process checks the remaining ones itself. SettingError as `read`."""
        return cls.read({name: value for name, value in environment.items() if name.startswith("PENSTOCK_NEURON_")})


def visible_cores(text: str) -> tuple[int, ...]:
    """The core numbers of a value of NEURON_RT_VISIBLE_CORES; SettingError if it is not of that form."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise SettingError(
                f"{VISIBLE_CORES} is {text!r}", field=VISIBLE_CORES, remedy="Write core numbers such as 0-3 or 0,1"
            )
        cores += range(int(first), int(last or first) + 1)
    if len(set(cores)) < len(cores):
        raise SettingError(
            f"{VISIBLE_CORES} is {text!r}: a core is named twice", field=VISIBLE_CORES, remedy="Name it once"
        )
    return tuple(cores)


def granted_cores(variables: NeuronVariables, environment: Mapping[str, str], planned: int) -> int:
    """NeuronCores of this process: those that it sees, or the setting's, or `planned`.

    HostError if the setting and the visible cores disagree.
    """
    text = environment.get(VISIBLE_CORES, "").strip()
    wanted = variables.neuron_cores
    if not text:
        return wanted or planned
    visible = len(visible_cores(text))
    if wanted is not None and wanted != visible:
        raise HostError(
            f"PENSTOCK_NEURON_CORES is {wanted}, and {VISIBLE_CORES} is {text}: {visible} cores",
            remedy="Give the pod the devices that its endpoint asks for (spec.cores counts NeuronCores), and leave "
            f"{VISIBLE_CORES} to the device plugin",
        )
    return visible


def child_environment(environment: Mapping[str, str], cores: int) -> dict[str, str]:
    """The environment of the process that owns the device: where no visible cores are set, it takes `cores` free ones
    instead of all."""
    own = dict(environment)
    if not own.get(VISIBLE_CORES, "").strip():
        own.pop(VISIBLE_CORES, None)
        own.setdefault(NUMBER_OF_CORES, str(cores))
    return own
