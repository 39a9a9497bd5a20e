"""CPU identity and topology from `/proc/cpuinfo` and `/sys`: which logical CPUs share a core, a cache, a NUMA node."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.hardware import CpuIdentity, Isa, arithmetic_flags
from penstock_runtime.host.procfs import number, read_cpus, read_number

SLOW_SHARE = 0.8
"""A core below this share of the fastest core's capacity is slow; favoured cores of one kind differ by less."""


@dataclass(frozen=True)
class Core:
    """One physical core."""

    cpus: tuple[int, ...]
    """Its logical CPUs, sorted: one, or several SMT siblings."""
    node: int
    """NUMA node."""
    cache: int
    """The lowest CPU that shares its last-level cache (a core complex on AMD)."""
    fast: bool = True
    """False for the efficiency cores of a hybrid processor."""


def read_cores(root: Path, online: Sequence[int], processors: Sequence[Mapping[str, str]]) -> tuple[Core, ...]:
    """The cores of the online CPUs, by lowest CPU. Without /sys the siblings come from `/proc/cpuinfo`."""
    nodes = _nodes(root)
    slow = _slow(root, online)
    from_cpuinfo = _siblings_of_cpuinfo(processors)
    cores: list[Core] = []
    seen: set[int] = set()
    for cpu in sorted(online):
        if cpu in seen:
            continue
        siblings = set(_siblings(root, cpu) or from_cpuinfo.get(cpu, (cpu,))) | {cpu}
        cpus = tuple(sorted((siblings & set(online)) - seen))
        seen.update(cpus)
        cores.append(
            Core(cpus=cpus, node=nodes.get(cpu, 0), cache=_cache(root, cpu, online), fast=not slow.intersection(cpus))
        )
    return tuple(cores)


def _siblings(root: Path, cpu: int) -> tuple[int, ...] | None:
    folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
    return read_cpus(root, f"{folder}/core_cpus_list") or read_cpus(root, f"{folder}/thread_siblings_list")


def _siblings_of_cpuinfo(processors: Iterable[Mapping[str, str]]) -> dict[int, tuple[int, ...]]:
    by_core: dict[tuple[str, str], list[int]] = {}
    for processor in processors:
        cpu = number(processor.get("processor"))
        if cpu is not None and "core id" in processor:
            by_core.setdefault((processor.get("physical id", ""), processor["core id"]), []).append(cpu)
    return {cpu: tuple(cpus) for cpus in by_core.values() for cpu in cpus}


def _cache(root: Path, cpu: int, online: Sequence[int]) -> int:
    """The lowest CPU that shares the highest cache level; the lowest of all if /sys has none."""
    best: tuple[int, tuple[int, ...]] = (0, tuple(online))
    for index in range(8):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
        level = read_number(root, f"{folder}/level")
        shared = read_cpus(root, f"{folder}/shared_cpu_list")
        if level is not None and shared and level > best[0]:
            best = (level, shared)
    # Levels 1 and 2 belong to one or a few cores: then no last level is shared, or /sys hides it (virtual machines).
    return min(best[1]) if best[0] >= 3 else min(online)


def _nodes(root: Path) -> dict[int, int]:
    """NUMA node by CPU; empty if the kernel reports none."""
    folder = "/sys/devices/system/node"
    names = sorted(path.name for path in (root / folder.lstrip("/")).glob("node*"))
    nodes = {name: node for name in names if (node := number(name.removeprefix("node"))) is not None}
    return {cpu: node for name, node in nodes.items() for cpu in read_cpus(root, f"{folder}/{name}/cpulist") or ()}


def _slow(root: Path, online: Sequence[int]) -> set[int]:
    """The CPUs of the efficiency cores: Intel lists the performance cores, Arm has a capacity for each CPU."""
    performance = read_cpus(root, "/sys/devices/cpu_core/cpus")
    if performance:
        return set(online) - set(performance)
    capacity = {cpu: read_number(root, f"/sys/devices/system/cpu/cpu{cpu}/cpu_capacity") or 0 for cpu in online}
    fastest = max(capacity.values(), default=0)
    return {cpu for cpu, value in capacity.items() if 0 < value < SLOW_SHARE * fastest}


_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP = 0x1021
_XTILEDATA = 18
"""Bit of the tile registers in the kernel's mask of features that a process may request (Documentation/arch/x86)."""


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
    """The identity of the first processor, with the flags common to all: cores of a hybrid processor may differ."""
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
    """True if this kernel lets processes use the AMX tiles (5.16 and later, not in every sandbox).

    `/proc/cpuinfo` has the flags on older kernels as well, where using the tiles kills the process.
    """
    if platform.machine() != "x86_64":
        return False
    mask = ctypes.c_uint64(0)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_ARCH_GET_XCOMP_SUPP), ctypes.c_void_p(ctypes.addressof(mask))
    )
    return failed == 0 and bool(mask.value >> _XTILEDATA & 1)
