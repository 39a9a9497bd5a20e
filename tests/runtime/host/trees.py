"""Writes /proc and /sys trees of machines that these tests do not run on, in the kernel's own formats.

Identities and flags are those of the named processors; the parsers were also tried on the captured trees of
util-linux's lscpu tests (Opteron, EPYC 7451, Xeon X7550, Tiger Lake, Arm big.LITTLE).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_V2 = "sse4_2 avx f16c fma avx2"
_SKX = f"{_V2} avx512f avx512dq avx512cd avx512bw avx512vl"
_GRAVITON2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
_GRAVITON3 = f"{_GRAVITON2} sve sha3 sha512 svei8mm svebf16 i8mm bf16 rng paca pacg"

PROCESSORS: Mapping[str, tuple[str, int, int, int, str, str]] = {
    "zen2": ("AuthenticAMD", 23, 49, 0, "AMD EPYC 7R32", _V2),
    "zen3": ("AuthenticAMD", 25, 1, 1, "AMD EPYC 7763 64-Core Processor", _V2),
    "zen4": ("AuthenticAMD", 25, 17, 1, "AMD EPYC 9R14", f"{_SKX} avx512_bf16 avx512_vnni"),
    "skylake-sp": ("GenuineIntel", 6, 85, 4, "Intel(R) Xeon(R) Platinum 8124M CPU @ 3.00GHz", _SKX),
    "cascade-lake": ("GenuineIntel", 6, 85, 7, "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz", f"{_SKX} avx512_vnni"),
    "cooper-lake": ("GenuineIntel", 6, 85, 11, "Intel(R) Xeon(R) Gold 6330H", f"{_SKX} avx512_vnni avx512_bf16"),
    "ice-lake": ("GenuineIntel", 6, 106, 6, "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", f"{_SKX} avx512_vnni"),
    "sapphire-rapids": (
        "GenuineIntel", 6, 143, 8, "Intel(R) Xeon(R) Platinum 8488C",
        f"{_SKX} avx_vnni avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8",
    ),
    "alder-lake": ("GenuineIntel", 6, 151, 2, "12th Gen Intel(R) Core(TM) i9-12900K", f"{_V2} avx_vnni"),
    "graviton2": ("0x41", 8, 0xD0C, 1, "", _GRAVITON2),
    "graviton3": ("0x41", 8, 0xD40, 1, "", _GRAVITON3),
    "cortex-a72": ("0x41", 8, 0xD08, 3, "", "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"),
    "nehalem": ("GenuineIntel", 6, 26, 5, "Intel(R) Xeon(R) CPU X5570 @ 2.93GHz", "sse4_2"),
}  # fmt: skip
"""Vendor, family, model, stepping, name, flags."""


@dataclass
class Machine:
    """What to write. One entry of `cores` is one physical core: its CPUs, NUMA node and last-level cache."""

    cores: Sequence[tuple[Sequence[int], int, int]]
    processor: str = "ice-lake"
    affinity: Iterable[int] | None = None
    files: dict[str, str] = field(default_factory=dict)
    """Further files by absolute path, such as cgroups."""
    meminfo: str = "MemTotal:       67108864 kB\nMemFree:        30000000 kB\nMemAvailable:   50331648 kB\n"
    efficiency: Iterable[int] = ()
    """CPUs of Intel's efficiency cores."""
    sysfs: bool = True

    @property
    def cpus(self) -> list[int]:
        return sorted(cpu for cpus, _, _ in self.cores for cpu in cpus)

    def write(self, root: Path) -> Path:
        files = {
            "/proc/cpuinfo": self._cpuinfo(),
            "/proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{_listed(self.affinity or self.cpus)}\n",
            "/proc/meminfo": self.meminfo,
        }
        if self.sysfs:
            files |= self._sysfs()
        for path, text in (files | self.files).items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return root

    def _cpuinfo(self) -> str:
        vendor, family, model, stepping, name, flags = PROCESSORS[self.processor]
        blocks = []
        for number, (cpus, _, _) in enumerate(self.cores):
            for cpu in cpus:
                if vendor.startswith("0x"):
                    block = (
                        f"processor\t: {cpu}\nBogoMIPS\t: 2100.00\nFeatures\t: {flags}\nCPU implementer\t: {vendor}\n"
                        f"CPU architecture: {family}\nCPU variant\t: 0x1\n"
                        f"CPU part\t: {model:#x}\nCPU revision\t: {stepping}"
                    )
                else:
                    block = (
                        f"processor\t: {cpu}\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
                        f"model name\t: {name}\nstepping\t: {stepping}\nphysical id\t: 0\ncore id\t\t: {number}\n"
                        f"flags\t\t: fpu vme {flags}"
                    )
                blocks.append((cpu, block))
        return "\n\n".join(block for _, block in sorted(blocks)) + "\n"

    def _sysfs(self) -> dict[str, str]:
        system = "/sys/devices/system"
        files = {f"{system}/cpu/online": _listed(self.cpus)}
        for cpus, node, cache in self.cores:
            shared = [cpu for others, _, other_cache in self.cores if other_cache == cache for cpu in others]
            for cpu in cpus:
                folder = f"{system}/cpu/cpu{cpu}"
                files[f"{folder}/topology/thread_siblings_list"] = _listed(cpus)
                files[f"{folder}/cache/index0/level"] = "1"
                files[f"{folder}/cache/index0/shared_cpu_list"] = _listed(cpus)
                files[f"{folder}/cache/index3/level"] = "3"
                files[f"{folder}/cache/index3/shared_cpu_list"] = _listed(shared)
            files[f"{system}/node/node{node}/cpulist"] = _listed(
                cpu for others, other_node, _ in self.cores if other_node == node for cpu in others
            )
        if self.efficiency:
            files["/sys/devices/cpu_atom/cpus"] = _listed(self.efficiency)
            files["/sys/devices/cpu_core/cpus"] = _listed(set(self.cpus) - set(self.efficiency))
        return files


def single_threaded(count: int) -> list[tuple[Sequence[int], int, int]]:
    """`count` cores without SMT on one node with one cache."""
    return [((cpu,), 0, 0) for cpu in range(count)]


def hyper_threaded(
    count: int, *, nodes: int = 1, cores_per_cache: int | None = None
) -> list[tuple[Sequence[int], int, int]]:
    """`count` cores with two threads each (core n has CPUs n and n + count), divided evenly among nodes."""
    per_node = count // nodes
    per_cache = cores_per_cache or per_node
    return [((core, core + count), core // per_node, core // per_cache) for core in range(count)]


def cgroup_v2(path: str = "/", **values: str) -> dict[str, str]:
    """A version 2 tree at /sys/fs/cgroup with the process in `path`; file names as keywords with `_` for `.`."""
    files = {
        "/proc/self/cgroup": f"0::{path}\n",
        "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n",
    }
    return files | {
        f"/sys/fs/cgroup{path.rstrip('/')}/{name.replace('__', '.')}": text for name, text in values.items()
    }


def cgroup_v1(path: str, base: str = "/", **values: Mapping[str, str]) -> dict[str, str]:
    """Version 1 trees, one for each controller (keyword): its files in the process's group `path`.

    `base` is the group that is mounted; inside a container it is `path` itself.
    """
    files = {
        "/proc/self/cgroup": "".join(f"{number}:{name}:{path}\n" for number, name in enumerate(values, start=2)),
        "/proc/self/mountinfo": "".join(
            f"3{number} 31 0:3{number} {base} /sys/fs/cgroup/{name} ro - cgroup cgroup rw,{name}\n"
            for number, name in enumerate(values)
        ),
    }
    below = path.removeprefix(base.rstrip("/"))
    for name, entries in values.items():
        for file, text in entries.items():
            files[f"/sys/fs/cgroup/{name}{below.rstrip('/')}/{file}"] = text
    return files


def _listed(cpus: Iterable[int]) -> str:
    return ",".join(str(cpu) for cpu in sorted(cpus)) + "\n"
