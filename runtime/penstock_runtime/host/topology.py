"""Which logical CPUs share a core, a cache, a NUMA node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_runtime.host.files import number, read_cpus, read_number

SLOW_SHARE = 0.8
"""A core under this share of the fastest one's capacity is a slow one; favoured cores of one kind differ by less."""


@dataclass(frozen=True)
class Core:
    """One physical core."""

    cpus: tuple[int, ...]
    """Its logical CPUs, sorted: one, or the SMT siblings."""
    node: int
    """NUMA node."""
    cache: int
    """The lowest CPU that shares its last-level cache (a core complex on AMD)."""
    fast: bool = True
    """False for the efficiency cores of a hybrid processor."""


def read_cores(root: Path, online: Sequence[int], processors: Sequence[Mapping[str, str]]) -> tuple[Core, ...]:
    """The cores of the CPUs that are online, by lowest CPU. Without /sys, `/proc/cpuinfo` tells the siblings."""
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
    """The lowest CPU that shares the highest cache level; the lowest of all when /sys does not tell."""
    best: tuple[int, tuple[int, ...]] = (0, tuple(online))
    for index in range(8):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
        level = read_number(root, f"{folder}/level")
        shared = read_cpus(root, f"{folder}/shared_cpu_list")
        if level is not None and shared and level > best[0]:
            best = (level, shared)
    # Level 1 and 2 belong to a core or a few: no last level is shared then, or /sys hides it (virtual machines).
    return min(best[1]) if best[0] >= 3 else min(online)


def _nodes(root: Path) -> dict[int, int]:
    """NUMA node by CPU; empty where the kernel knows of none."""
    folder = "/sys/devices/system/node"
    names = sorted(path.name for path in (root / folder.lstrip("/")).glob("node*"))
    nodes = {name: node for name in names if (node := number(name.removeprefix("node"))) is not None}
    return {cpu: node for name, node in nodes.items() for cpu in read_cpus(root, f"{folder}/{name}/cpulist") or ()}


def _slow(root: Path, online: Sequence[int]) -> set[int]:
    """The CPUs of the efficiency cores: Intel names them, Arm gives every CPU a capacity."""
    performance = read_cpus(root, "/sys/devices/cpu_core/cpus")
    if performance:
        return set(online) - set(performance)
    capacity = {cpu: read_number(root, f"/sys/devices/system/cpu/cpu{cpu}/cpu_capacity") or 0 for cpu in online}
    fastest = max(capacity.values(), default=0)
    return {cpu for cpu, value in capacity.items() if 0 < value < SLOW_SHARE * fastest}
