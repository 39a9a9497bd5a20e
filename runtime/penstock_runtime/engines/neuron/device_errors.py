"""Failures of the Neuron runtime: their kind, from the codes and lines that the Neuron SDK documents. Pure.

The runtime writes its errors to the standard error of the process, and raises a RuntimeError or ends the process. Its
exceptions have no codes, so that both texts are searched for those below. A text that is not known is a
failure of that run, and nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from penstock.errors import ArtefactError, DeviceUnavailable, HostError, PenstockError


class DeviceFailure(StrEnum):
    """What failed."""

    CORES_TAKEN = "cores-taken"
    """Another process has the cores, or one that has ended has not released them yet."""
    NO_DEVICE = "no-device"
    NO_DRIVER = "no-driver"
    NOT_OPENED = "not-opened"
    """A device of NEURON_RT_VISIBLE_CORES cannot be opened."""
    NOT_CONTIGUOUS = "not-contiguous"
    OTHER_GENERATION = "other-generation"
    TOO_FEW_CORES = "too-few-cores"
    DEVICE_MEMORY = "device-memory"
    TIMED_OUT = "timed-out"
    HARDWARE = "hardware"
    NOT_A_NUMBER = "not-a-number"
    BAD_INPUT = "bad-input"
    OTHER = "other"

    @property
    def takes_core_out(self) -> bool:
        """True if no further run is given to the core."""
        return self in {DeviceFailure.TIMED_OUT, DeviceFailure.HARDWARE}


_TEXTS = (
    (re.compile(r"NeuronCore\(s\) not available", re.IGNORECASE), DeviceFailure.CORES_TAKEN),
    (re.compile(r"No neuron device available", re.IGNORECASE), DeviceFailure.NO_DEVICE),
    (re.compile(r"Unable to determine Neuron Driver version", re.IGNORECASE), DeviceFailure.NO_DRIVER),
    (re.compile(r"Could not open the nd\d+", re.IGNORECASE), DeviceFailure.NOT_OPENED),
    (re.compile(r"Neuron cores are not contiguous", re.IGNORECASE), DeviceFailure.NOT_CONTIGUOUS),
    (re.compile(r"NEFF version mismatch", re.IGNORECASE), DeviceFailure.OTHER_GENERATION),
    (re.compile(r"Could not find VNC id", re.IGNORECASE), DeviceFailure.TOO_FEW_CORES),
    (re.compile(r"device mempool \[\d+:\d+\] total", re.IGNORECASE), DeviceFailure.DEVICE_MEMORY),
)
"""Lines of the runtime, as in its troubleshooting guide. The guide has the one about `device mempool` and the one about
`VNC id` from the log of the system, where this process does not look; their exceptions have codes (4, 9)."""
_CODES = {
    4: DeviceFailure.DEVICE_MEMORY,
    5: DeviceFailure.TIMED_OUT,
    9: DeviceFailure.TOO_FEW_CORES,
    10: DeviceFailure.OTHER_GENERATION,
    1002: DeviceFailure.BAD_INPUT,
    1003: DeviceFailure.NOT_A_NUMBER,
    1005: DeviceFailure.CORES_TAKEN,
}
"""Return codes of the runtime's API (`nrt.h`)."""
_HARDWARE_CODES = range(1200, 1210)
_NAMES = {
    "NRT_TIMEOUT": DeviceFailure.TIMED_OUT,
    "NRT_EXEC_HW_ERR": DeviceFailure.HARDWARE,
    "NRT_RESOURCE": DeviceFailure.DEVICE_MEMORY,
}
_NAME = re.compile(r"\bNRT_[A-Z_]+")
_CODE = re.compile(
    r"(?:(?<!exit )(?<!exit-)(?<!return )\b(?:status|err|code)\s*[:=]?\s*|\bNRT_[A-Z_]+\s*\(\s*)(\d{1,4})\b",
    re.IGNORECASE,
)
"""Not the exit code of a process."""


DETAIL_CHARACTERS = 400


def detail_of(message: str) -> str:
    """The message of a failure; of a long one, its beginning and its end. Exceptions of TorchScript have many lines of
    code, and the cause in the last one."""
    half = DETAIL_CHARACTERS // 2
    return message if len(message) <= DETAIL_CHARACTERS else f"{message[:half]} … {message[-half:]}"


def failure_in(text: str) -> DeviceFailure | None:
    """The kind of failure that a line or an exception's message names; None if it names none that is known."""
    for pattern, failure in _TEXTS:
        if pattern.search(text):
            return failure
    for name in _NAME.findall(text):
        for start, failure in _NAMES.items():
            if name.startswith(start):
                return failure
    for digits in _CODE.findall(text):
        code = int(digits)
        if code in _HARDWARE_CODES:
            return DeviceFailure.HARDWARE
        if code in _CODES:
            return _CODES[code]
    return None


def failure_of(message: str, lines: Iterable[str]) -> DeviceFailure:
    """The failure that an exception's message names, or else the last of the runtime's `lines` that names one."""
    found = failure_in(message)
    if found is None:
        found = next((known for line in reversed(list(lines)) if (known := failure_in(line)) is not None), None)
    return DeviceFailure.OTHER if found is None else found


def start_error(failure: DeviceFailure, details: str, *, visible: str) -> PenstockError:
    """The error of a start that failed. `details`: the runtime's output; `visible`: NEURON_RT_VISIBLE_CORES."""
    cores = f"NEURON_RT_VISIBLE_CORES is {visible}" if visible else "NEURON_RT_VISIBLE_CORES is not set"
    match failure:
        case DeviceFailure.CORES_TAKEN:
            return DeviceUnavailable(
                f"the NeuronCores are taken by another process ({cores}): {details}",
                remedy="End the process that has them (`neuron-ls` on the node shows it), or give this one other cores",
            )
        case DeviceFailure.NO_DEVICE | DeviceFailure.NOT_OPENED:
            return HostError(
                f"no Neuron device can be used here ({cores}): {details}",
                remedy="Run it on an Inferentia instance, in a container with /dev/neuron0 (in Kubernetes a resource "
                "of the Neuron device plugin, such as aws.amazon.com/neuron: 1)",
            )
        case DeviceFailure.NO_DRIVER:
            return HostError(
                f"no Neuron driver is loaded on this machine: {details}",
                remedy="Install aws-neuronx-dkms on the node (docs/how-to/inferentia.md has the version)",
            )
        case DeviceFailure.NOT_CONTIGUOUS | DeviceFailure.TOO_FEW_CORES:
            return HostError(
                f"the model does not fit onto the granted NeuronCores ({cores}): {details}",
                remedy="Grant whole neighbouring devices, with as many cores as the endpoint's spec.cores",
            )
        case DeviceFailure.OTHER_GENERATION:
            return ArtefactError(
                f"the model was compiled for another generation of the device: {details}",
                remedy="Optimise it again with the hardware class of this node (inf1 or inf2)",
            )
        case DeviceFailure.DEVICE_MEMORY:
            return HostError(
                f"the compiled shapes do not fit into the device's memory: {details}",
                remedy="Optimise it again with fewer lengths in the workload, or with more devices for each copy",
            )
        case _:
            return DeviceUnavailable(
                f"the Neuron runtime failed at start: {details}",
                remedy="The log has its messages; look them up in the troubleshooting guide of the Neuron runtime",
            )
