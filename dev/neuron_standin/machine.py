"""The described machine: devices, memory, driver, and the faults that a test sets."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

MACHINE_VARIABLE = "STANDIN_MACHINE"
"""A JSON file with the fields of `Machine`. Not set, or no such file: a host without devices."""
FAULTS_VARIABLE = "STANDIN_FAULTS"
"""JSON with fields of `Faults`; the machine's file has further ones, which count more."""


@dataclass(frozen=True)
class Faults:
    """Failures to produce. The file is read again for each use, so that a test can change them in a running process."""

    # The compiler.
    refuse_pipeline_cores: tuple[int, ...] = ()
    """The compiler refuses these numbers."""
    compiler_killed: bool = False
    """The compiler ends by SIGKILL, as if the host's memory were exhausted."""
    compiler_segfault: bool = False
    """The process that traces ends by SIGSEGV."""
    missing_library: str = ""
    """A shared library that the compiler's programs do not find."""
    compile_seconds: float = 0.0
    """Time of each compilation."""
    bf16_error: float = 0.0
    """Relative error of weights that are rounded to bfloat16, on top of the rounding."""
    # The device.
    busy_cores: tuple[int, ...] = ()
    """Another process seems to own these cores."""
    delayed_release_seconds: float = 0.0
    """Cores stay taken for this long after their process has ended."""
    abort_when_taken: bool = False
    """A process that finds its cores taken aborts, rather than raise an exception."""
    execution_timeout_cores: tuple[int, ...] = ()
    """Runs on these cores fail with status 5."""
    hardware_error_cores: tuple[int, ...] = ()
    """Runs on these cores fail with status 1202."""
    kill_on_core: int | None = None
    """A run on this core ends the process."""
    memory_full_from_load: int | None = None
    """The load with this number (from 1) and all later ones find no device memory."""
    load_seconds: float = 0.0
    first_run_seconds: float = 0.0
    run_seconds: float = 0.0
    wrong_answers: float = 0.0
    """Added to each output value."""
    noise_in_padding: bool = True
    """Rows with a second input of zeros have random outputs, so that a caller that keeps them is found out."""


@dataclass(frozen=True)
class Machine:
    """A host with Neuron devices."""

    generation: str
    """`inf1` or `inf2`."""
    chips: int
    state: str
    """A folder for the locks of cores, shared by all processes that see the devices."""
    cores_per_chip: int
    gib_per_chip: float
    driver: str
    faults: Faults = field(default_factory=Faults)

    @property
    def cores(self) -> int:
        """NeuronCores of the host."""
        return self.chips * self.cores_per_chip

    @property
    def bytes_per_core(self) -> int:
        """Device memory of one core."""
        return int(self.gib_per_chip * 2**30 / self.cores_per_chip)


def _faults(given: dict[str, Any]) -> Faults:
    known = {one.name for one in fields(Faults)}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"unknown faults of the stand-in: {', '.join(unknown)}")
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}
    return Faults(**values)


def read_machine() -> Machine | None:
    """The machine that the environment describes; None: a host without devices."""
    path = os.environ.get(MACHINE_VARIABLE)
    if not path or not Path(path).is_file():
        return None
    given = json.loads(Path(path).read_text("utf-8"))
    inf1 = given["generation"] == "inf1"
    defaults = {
        "chips": 1,
        "cores_per_chip": 4 if inf1 else 2,
        "gib_per_chip": 8 if inf1 else 32,
        "driver": "2.24.13.0" if inf1 else "2.29.0.0",
    }
    return Machine(**{**defaults, **given, "faults": read_faults(given.get("faults"))})


def read_faults(of_machine: dict[str, Any] | None = None) -> Faults:
    """The faults of the environment, then of the machine's file."""
    return _faults({**json.loads(os.environ.get(FAULTS_VARIABLE) or "{}"), **(of_machine or {})})


def write_machine(path: Path, state: Path, generation: str, *, chips: int = 1, **more: Any) -> Path:
    """Describe a machine in `path`, for `STANDIN_MACHINE`. `more`: further fields; `faults` is a dict. Atomic."""
    state.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"generation": generation, "chips": chips, "state": str(state), **more})
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
    return path


def runtime_log(text: str) -> None:
    """One line on stderr in the form of the Neuron runtime's log."""
    stamp = time.strftime("%Y-%b-%d %H:%M:%S.0000", time.gmtime())
    # The descriptor, as a C library would, and not Python's sys.stderr, which tests may replace.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{stamp} {os.getpid()}:{os.getpid()} {text}\n".encode())
