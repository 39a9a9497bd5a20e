"""`neuron-ls` of the stand-in: the devices, and the processes that own their cores."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from neuron_standin import LABEL
from neuron_standin.cores import free_cores
from neuron_standin.machine import Machine, read_machine


def owner(machine: Machine, core: int) -> int | None:
    """The process that owns a core; None: no process."""
    if core in free_cores(machine):
        return None
    text = (Path(machine.state) / f"core{core}.lock").read_text("utf-8")
    return int(text) if text else None


def neuron_ls(arguments: Sequence[str]) -> int:
    """`neuron-ls [-j]` -> exit status. The first line of the text names the stand-in."""
    machine = read_machine()
    if machine is None:
        print("neuron-ls: No neuron device found", file=sys.stderr)
        return 1
    devices = [
        {
            "neuron_device": chip,
            "nc_count": machine.cores_per_chip,
            "memory_size": int(machine.gib_per_chip * 2**30),
            "neuron_processes": [
                {"pid": pid, "command": LABEL}
                for core in range(chip * machine.cores_per_chip, (chip + 1) * machine.cores_per_chip)
                if (pid := owner(machine, core)) is not None
            ],
        }
        for chip in range(machine.chips)
    ]
    if "-j" in arguments or "--json-output" in arguments:
        print(json.dumps(devices))
    else:
        print(LABEL)
        for device in devices:
            print(f"device {device['neuron_device']}: {device['nc_count']} cores")
    return 0
