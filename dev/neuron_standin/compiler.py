"""`neuronx-cc` and `neuron-cc` of the stand-in: check the arguments, produce the configured faults, copy the graph."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from neuron_standin import LABEL
from neuron_standin.machine import read_faults

Check = Callable[[str], bool]


def _among(*values: str) -> Check:
    return lambda value: value in values


_COUNT: Check = str.isdecimal
NEURONX_CC: dict[str, Check | None] = {
    "--target": _among("inf2", "trn1", "trn1n", "trn2"),
    "--model-type": _among("transformer", "generic", "unet-inference"),
    "--auto-cast": _among("none", "matmult", "all"),
    "--auto-cast-type": _among("bf16", "fp16", "tf32", "fp8_e4m3"),
    "--optlevel": _among("1", "2", "3"),
    "-O": _among("1", "2", "3"),
    "-lnc": _among("1", "2"),
    "--enable-fast-loading-neuron-binaries": None,
    "--enable-saturate-infinity": None,
    "--disable-mixed-precision-accumulation": None,
    "--logfile": bool,
    "--verbose": _COUNT,
}
"""Documented options of neuronx-cc and what their values may be; None: takes no value."""
LOG = "log-neuron-cc.txt"
"""In the current folder, where no other file is named."""
_FAST_MATH = (
    "all none fp32-cast-all fp32-cast-matmult fp32-cast-all-bf16 fp32-cast-matmult-bf16 "
    "fp32-cast-all-fp16 fp32-cast-matmult-fp16 fast-relayout no-fast-relayout"
)
NEURON_CC: dict[str, Check | None] = {
    "--neuroncore-pipeline-cores": _COUNT,
    "--fast-math": _among(*_FAST_MATH.split()),
    "--fp32-cast": _among("matmult", "all", "matmult-bf16", "matmult-fp16"),
    "--enable-fast-loading-neuron-binaries": None,
    "--verbose": _COUNT,
}


@dataclass
class Flags:
    """Parsed compiler arguments."""

    values: dict[str, str] = field(default_factory=dict)
    error: str = ""


def parse(arguments: Sequence[str], known: dict[str, Check | None]) -> Flags:
    """Read `--name value`, `--name=value` and switches; the first mistake is in `error`."""
    flags, rest = Flags(), list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in known:
            return Flags(error=f"unrecognized arguments: {name}")
        check = known[name]
        if check is None:
            flags.values[name] = ""
            continue
        if not equals:
            value = rest.pop(0) if rest else ""
        if not check(value):
            return Flags(error=f"argument {name}: invalid choice: {value!r}")
        flags.values[name] = value
    if "-lnc" in flags.values and flags.values.get("--target") != "trn2":
        return Flags(error="argument -lnc: only for trn2")
    return flags


def main(arguments: Sequence[str], known: dict[str, Check | None]) -> int:
    """`NAME compile SOURCE --output FILE OPTION...` -> exit status."""
    if list(arguments) in (["--version"], []):
        print(f"{LABEL}")
        return 0
    if len(arguments) < 4 or arguments[0] != "compile" or arguments[2] != "--output":
        print("usage: compile SOURCE --output FILE [OPTION]...", file=sys.stderr)
        return 2
    flags, faults = parse(arguments[4:], known), read_faults()
    log = Path(flags.values.get("--logfile") or LOG)
    try:
        log.write_text(f"{LABEL}: {' '.join(arguments)}\n", encoding="utf-8")
    except OSError as error:
        print(f"error: {error.strerror}: {log.absolute()}", file=sys.stderr)
        return 1
    if faults.missing_library:
        what = f"{faults.missing_library}: cannot open shared object file"
        message = f"walrus_driver: error while loading shared libraries: {what}"
        log.write_text(f"{message}\n", encoding="utf-8")
        print(message, file=sys.stderr)
        return 1
    if flags.error:
        print(f"error: {flags.error}", file=sys.stderr)
        return 1
    time.sleep(faults.compile_seconds)
    if faults.compiler_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    cores = int(flags.values.get("--neuroncore-pipeline-cores", 1))
    if cores in faults.refuse_pipeline_cores:
        print(
            f"ERROR: The requested number of neuroncore-pipeline-cores ({cores}) may not be suitable for this network",
            file=sys.stderr,
        )
        return 1
    Path(arguments[3]).write_bytes(Path(arguments[1]).read_bytes())
    print(f"Compiler status PASS ({LABEL})")
    return 0
