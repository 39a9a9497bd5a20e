"""The processor's identity from `/proc/cpuinfo`, x86 and Arm."""

from __future__ import annotations

import ctypes
import platform

from penstock.hardware import CpuIdentity, Isa, arithmetic_flags
from penstock_runtime.host.files import number

_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP = 0x1021
_XTILEDATA = 18
"""Bit of the tile registers in the kernel's mask of features that a process may ask for (Documentation/arch/x86)."""


def read_processors(text: str) -> list[dict[str, str]]:
    """The blocks of `/proc/cpuinfo`, one for each logical CPU."""
    processors: list[dict[str, str]] = []
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if not separator:
            continue
        if key.strip() == "processor":
            processors.append({})
        if processors:
            processors[-1][key.strip()] = value.strip()
    return processors


def identify(processors: list[dict[str, str]], *, amx_permitted: bool) -> CpuIdentity:
    """The identity of the first processor, with the flags that all have: cores of a hybrid part may differ."""
    if not processors:
        return CpuIdentity()
    first = processors[0]
    flag_sets = [set((cpu.get("flags") or cpu.get("Features") or "").split()) for cpu in processors]
    common = set.intersection(*flag_sets)
    isa = Isa.from_flags(common, amx_permitted=amx_permitted)
    flags = arithmetic_flags(common)
    if "CPU implementer" in first:
        identity = CpuIdentity(
            vendor=first["CPU implementer"],
            family=number(first.get("CPU architecture")) or 0,
            model=number(first.get("CPU part")) or 0,
            stepping=number(first.get("CPU revision")) or 0,
            isa=isa,
            flags=flags,
        )
        name = identity.microarchitecture or f"Arm {identity.vendor} part {identity.model:#x}"
        return identity.model_copy(update={"model_name": name})
    return CpuIdentity(
        vendor=first.get("vendor_id", "unknown"),
        family=number(first.get("cpu family")) or 0,
        model=number(first.get("model")) or 0,
        stepping=number(first.get("stepping")) or 0,
        model_name=first.get("model name", "unknown"),
        isa=isa,
        flags=flags,
    )


def amx_permitted_here() -> bool:
    """Whether this kernel lets processes ask for the AMX tiles (5.16 and later, not in every sandbox).

    The flags stand in `/proc/cpuinfo` on older kernels as well, where using the tiles kills the process.
    """
    if platform.machine() != "x86_64":
        return False
    mask = ctypes.c_uint64(0)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_ARCH_GET_XCOMP_SUPP), ctypes.c_void_p(ctypes.addressof(mask))
    )
    return failed == 0 and bool(mask.value >> _XTILEDATA & 1)
