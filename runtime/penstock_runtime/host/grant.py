"""Which cores to use: one logical CPU for each physical core, never more than the quota pays for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import HostError
from penstock_runtime.host.files import spoken
from penstock_runtime.host.topology import Core

_QUOTA_NOISE = 1e-6
"""Quotas are ratios of microseconds: 3.9999999 means 4."""


@dataclass(frozen=True)
class CoreGrant:
    """The cores that engines are to use."""

    cpus: tuple[int, ...]
    """One logical CPU for each core: as many as there are compute threads."""
    siblings: tuple[int, ...]
    """The other SMT threads of the same cores, as far as this process may use them."""
    nodes: tuple[int, ...]
    """NUMA nodes that the cores lie on."""
    pinned: bool
    """True when the cores are this process's alone: its cpuset is exactly these cores, and no quota cuts into them."""
    keep: bool
    """True when the process is to be kept on `cpus` (`pin_process`): the cores are its own, or nothing else limits it.
    Under a quota on shared CPUs the scheduler finds free ones better than we do."""
    findings: tuple[str, ...]
    """What is odd, in plain words; empty when all is as it should be."""

    @property
    def cores(self) -> int:
        """How many."""
        return len(self.cpus)


def grant_cores(
    asked: int | None,
    *,
    cores: Sequence[Core],
    online: Iterable[int],
    allowed: Iterable[int],
    cpuset: Iterable[int] | None,
    quota: float | None,
) -> CoreGrant:
    """Choose cores among the allowed CPUs; `asked` None means all. HostError when fewer are there than asked for.

    Close together first: one last-level cache, one NUMA node, fast cores before slow ones.
    """
    allowed = set(allowed)
    usable = [core for core in cores if allowed.intersection(core.cpus)]
    if asked is not None and asked > len(usable):
        raise _too_many(asked, usable, allowed)
    if asked is not None and asked < 1:
        raise HostError(f"cores: {asked} was asked for", remedy="Write a number from 1")
    wanted = len(usable) if asked is None else asked
    count = wanted if quota is None else max(1, min(wanted, int(quota + _QUOTA_NOISE)))
    chosen = _choose(usable, count)
    cpus = tuple(min(allowed.intersection(core.cpus)) for core in chosen)
    own = {cpu for core in chosen for cpu in core.cpus}
    objections = _not_pinned(own, online=set(online), allowed=allowed, cpuset=cpuset, quota=quota)
    return CoreGrant(
        cpus=cpus,
        siblings=tuple(sorted((own & allowed) - set(cpus))),
        nodes=tuple(sorted({core.node for core in chosen})),
        pinned=not objections,
        keep=not objections or quota is None,
        findings=(*_findings(wanted, chosen, usable, allowed, quota), *objections),
    )


def _choose(usable: Sequence[Core], count: int) -> list[Core]:
    """`count` cores: fast ones first, then the smallest cache group and node that holds what is left."""
    chosen: list[Core] = []
    for fast in (True, False):
        pool = [core for core in usable if core.fast is fast]
        while pool and len(chosen) < count:
            missing = count - len(chosen)
            group = _closest(pool, missing, nodes={core.node for core in chosen})
            chosen += group[:missing]
            pool = [core for core in pool if core not in group]
    return sorted(chosen, key=lambda core: core.cpus)


def _closest(pool: Sequence[Core], missing: int, nodes: set[int]) -> list[Core]:
    """The group to take next: the smallest that suffices, else the largest; on a node already in use where possible."""
    by_cache: dict[tuple[int, int], list[Core]] = {}
    by_node: dict[int, list[Core]] = {}
    for core in pool:
        by_cache.setdefault((core.node, core.cache), []).append(core)
        by_node.setdefault(core.node, []).append(core)
    enough = [group for group in by_cache.values() if len(group) >= missing]
    if enough:
        return min(enough, key=lambda group: (group[0].node not in nodes, len(group)))
    # No cache holds them all: take the largest one, on the smallest node that holds them all if there is one.
    fitting = [node for node, group in by_node.items() if len(group) >= missing]
    node = min(fitting or by_node, key=lambda node: (node not in nodes, len(by_node[node]) * (1 if fitting else -1)))
    return max((group for (of, _), group in by_cache.items() if of == node), key=len)


def _not_pinned(
    own: set[int], *, online: set[int], allowed: set[int], cpuset: Iterable[int] | None, quota: float | None
) -> list[str]:
    """Why the cores are not this process's alone; empty when they are.

    The kernel does not say that nobody else has these CPUs: a set smaller than the machine, and exactly as large as
    what was asked for, is how a kubelet with static CPU management grants exclusive ones.
    """
    reasons: list[str] = []
    if cpuset is None:
        return ["no cpuset can be read, so other processes may run on these cores"]
    granted = set(cpuset)
    if granted >= online:
        reasons.append("other processes may run on these cores: the cpuset is the whole machine")
    elif granted - own:
        reasons.append(
            f"the cpuset {spoken(granted)} is wider than the {spoken(own)} in use, so it may be shared with others"
        )
    elif own - granted:
        reasons.append(
            f"CPUs {spoken(own - granted)} run on the same cores but belong to others (SMT siblings outside the cpuset)"
        )
    elif own - allowed:
        reasons.append(f"the affinity leaves out CPUs {spoken(own - allowed)} of the cpuset")
    if quota is not None and quota + _QUOTA_NOISE < len(own):
        reasons.append(f"a quota of {quota:g} CPUs stops threads on {_cpus(len(own))} now and then")
    return reasons


def _findings(
    wanted: int, chosen: Sequence[Core], usable: Sequence[Core], allowed: set[int], quota: float | None
) -> list[str]:
    findings: list[str] = []
    if len(chosen) < wanted and quota is not None:
        findings.append(f"{_cpus(wanted)} but a quota of {quota:g}: using {len(chosen)}")
    shared = [core for core in chosen if len(allowed.intersection(core.cpus)) > 1]
    if shared:
        pairs = ", ".join(spoken(allowed.intersection(core.cpus)) for core in shared[:4])
        more = ", ..." if len(shared) > 4 else ""
        findings.append(f"SMT siblings share a core (CPUs {pairs}{more}): using one on each")
    nodes = {core.node for core in chosen}
    if len(nodes) > 1:
        findings.append(f"the cores span {len(nodes)} NUMA nodes ({spoken(nodes)})")
    slow = sum(not core.fast for core in chosen)
    if slow:
        findings.append(f"{slow} of {_cores(len(chosen))} are efficiency cores: threads will wait for them")
    elif any(not core.fast for core in usable):
        findings.append(f"using the fast cores only ({len(chosen)} of {len(usable)})")
    return findings


def _too_many(asked: int, usable: Sequence[Core], allowed: set[int]) -> HostError:
    there = _cores(len(usable))
    smt = f" ({len(allowed)} CPUs, as SMT siblings share cores)" if len(allowed) > len(usable) else ""
    if not usable:
        return HostError("this process may run on no CPU that is online", remedy="Check its cpuset and affinity")
    return HostError(
        f"cores: {asked} was asked for, but this process has {there}{smt}",
        remedy=f"Write cores: {len(usable)} or fewer, or give it more CPUs",
    )


def _cpus(count: int) -> str:
    return "1 CPU" if count == 1 else f"{count} CPUs"


def _cores(count: int) -> str:
    return "1 physical core" if count == 1 else f"{count} physical cores"
