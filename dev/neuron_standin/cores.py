"""Which process owns which NeuronCores: one lock file for each core, held for the life of the process.

The kernel frees a lock when its process ends, also by SIGKILL, as the Neuron driver frees cores.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from neuron_standin.machine import Machine, runtime_log

NOT_INITIALIZED = (
    "The PyTorch Neuron Runtime could not be initialized. Neuron Driver issues are logged to your system logs. "
    "See the Neuron Runtime's troubleshooting guide for help on this topic"
)
_HOLD_AFTER_DEATH = """
import os, sys, time
parent, seconds = int(sys.argv[1]), float(sys.argv[2])
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(seconds)
"""


def parse_visible(text: str) -> list[int]:
    """`3`, `0-3` or `0,2-3` -> core numbers. ValueError for anything else."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def free_cores(machine: Machine) -> list[int]:
    """Cores that no process owns at the moment."""
    found = []
    for core in range(machine.cores):
        descriptor = _lock(machine, core)
        if descriptor is not None:
            os.close(descriptor)
            found.append(core)
    return found


def _lock(machine: Machine, core: int) -> int | None:
    if core in machine.faults.busy_cores:
        return None
    descriptor = os.open(Path(machine.state) / f"core{core}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    os.truncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def claim(machine: Machine) -> list[int]:
    """Take the cores that the environment names, until this process ends. RuntimeError when another has them.

    `NEURON_RT_VISIBLE_CORES` exactly; else the first free run of `NEURON_RT_NUM_CORES`; else all.
    """
    visible, number = os.environ.get("NEURON_RT_VISIBLE_CORES"), int(os.environ.get("NEURON_RT_NUM_CORES") or 0)
    if visible:
        try:
            wanted = parse_visible(visible)
        except ValueError as error:
            raise RuntimeError(NOT_INITIALIZED) from error
        asked = f"nc{wanted[0]}-nc{wanted[-1]}"
        if wanted != list(range(wanted[0], wanted[0] + len(wanted))):
            runtime_log("ERROR NRT:nrt_init Neuron cores are not contiguous")
            raise RuntimeError(NOT_INITIALIZED)
        if wanted[-1] >= machine.cores:
            runtime_log(f"ERROR TDRV:tdrv_get_dev_info Could not open the nd{wanted[-1] // machine.cores_per_chip}")
            raise RuntimeError(NOT_INITIALIZED)
    elif number:
        free, asked = free_cores(machine), str(number)
        runs = ([first + offset for offset in range(number)] for first in free)
        wanted = next((run for run in runs if set(run) <= set(free)), [])
    else:
        wanted, asked = list(range(machine.cores)), str(machine.cores)
    locks = [_lock(machine, core) for core in wanted]
    held = [descriptor for descriptor in locks if descriptor is not None]
    if not wanted or len(held) < len(wanted):
        for descriptor in held:
            os.close(descriptor)
        runtime_log(
            f"ERROR NRT:nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:{asked} Available:{len(held)}"
        )
        if machine.faults.abort_when_taken:
            os.abort()
        raise RuntimeError(NOT_INITIALIZED)
    if machine.faults.delayed_release_seconds:
        # A lock belongs to the open file: this process keeps it after ours has ended.
        arguments = [str(os.getpid()), str(machine.faults.delayed_release_seconds)]
        subprocess.Popen([sys.executable, "-S", "-c", _HOLD_AFTER_DEATH, *arguments], pass_fds=held)  # fmt: skip
    return wanted
