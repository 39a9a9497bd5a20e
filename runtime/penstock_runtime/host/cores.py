"""Chooses the cores for inference, and pins the process and its threads to them.

One logical CPU for each physical core, never more cores than the CPU quota allows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import HostError
from penstock_runtime.host.cpus import Core
from penstock_runtime.host.procfs import format_cpus

_QUOTA_NOISE = 1e-6
"""Quotas are ratios of microseconds: 3.9999999 means 4."""


@dataclass(frozen=True)
class CoreGrant:
    """The cores for engines."""

    cpus: tuple[int, ...]
    """One logical CPU for each core, and for each compute thread."""
    siblings: tuple[int, ...]
    """The other SMT threads of these cores that this process may use."""
    nodes: tuple[int, ...]
    """NUMA nodes of the cores."""
    pinned: bool
    """True if the cores are exclusive: the cpuset is exactly these cores, and no quota is below them."""
    keep: bool
    """True if the process should be pinned to `cpus` (`pin_process`): the cores are exclusive, or there is no quota.
    With a quota on shared CPUs the scheduler finds free CPUs better than a fixed choice."""
    findings: tuple[str, ...]
    """Readable findings about unusual conditions; usually empty."""

    @property
    def cores(self) -> int:
        """Number of cores."""
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
    """Choose cores among the allowed CPUs; `asked` None means all. HostError if there are fewer than `asked`.

    Fast cores come before slow ones, and cores that share a last-level cache or a NUMA node come together.
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
    """`count` cores: fast ones first, then the smallest cache group and node that holds the rest."""
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
    """The next group: the smallest sufficient one, otherwise the largest; if possible on a node already in use."""
    by_cache: dict[tuple[int, int], list[Core]] = {}
    by_node: dict[int, list[Core]] = {}
    for core in pool:
        by_cache.setdefault((core.node, core.cache), []).append(core)
        by_node.setdefault(core.node, []).append(core)
    enough = [group for group in by_cache.values() if len(group) >= missing]
    if enough:
        return min(enough, key=lambda group: (group[0].node not in nodes, len(group)))
    # No cache group is sufficient: the largest one, if possible on the smallest node that is sufficient.
    fitting = [node for node, group in by_node.items() if len(group) >= missing]
    node = min(fitting or by_node, key=lambda node: (node not in nodes, len(by_node[node]) * (1 if fitting else -1)))
    return max((group for (of, _), group in by_cache.items() if of == node), key=len)


def _not_pinned(
    own: set[int], *, online: set[int], allowed: set[int], cpuset: Iterable[int] | None, quota: float | None
) -> list[str]:
    """Reasons why the cores may not be exclusive; empty if they are.

    The kernel does not report exclusive CPUs. A kubelet with the static CPU manager grants them as a cpuset that is
    smaller than the machine and exactly as large as the request.
    """
    reasons: list[str] = []
    if cpuset is None:
        return ["no cpuset can be read, so other processes may run on these cores"]
    granted = set(cpuset)
    if granted >= online:
        reasons.append("other processes may run on these cores: no core of the machine is reserved for this process")
    elif granted - own:
        reasons.append(
            f"the cpuset {format_cpus(granted)} is wider than the {format_cpus(own)} in use, "
            "so it may be shared with others"
        )
    elif own - granted:
        reasons.append(
            f"CPUs {format_cpus(own - granted)} run on the same cores but belong to others "
            "(SMT siblings outside the cpuset)"
        )
    elif own - allowed:
        reasons.append(f"the affinity leaves out CPUs {format_cpus(own - allowed)} of the cpuset")
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
        pairs = ", ".join(format_cpus(allowed.intersection(core.cpus)) for core in shared[:4])
        more = ", ..." if len(shared) > 4 else ""
        findings.append(f"SMT siblings share a core (CPUs {pairs}{more}): using one on each")
    nodes = {core.node for core in chosen}
    if len(nodes) > 1:
        findings.append(f"the cores span {len(nodes)} NUMA nodes ({format_cpus(nodes)})")
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


STREAM_NICENESS = 5
"""Niceness of compute threads below the event loop, which wakes for 0.1 ms at a time."""


def pin_process(cpus: Iterable[int]) -> None:
    """Restrict all threads of this process to these CPUs; threads started later inherit it.

    To be called before engines start: they size and pin their thread pools by the affinity.
    HostError if the kernel refuses (a CPU outside the cpuset, or a sandbox).
    """
    wanted = set(cpus)
    try:
        # Pid 0 is only the calling thread: threads that libraries started on import would keep their affinity.
        for thread in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), wanted)
            except ProcessLookupError:
                continue
    except (OSError, ValueError) as error:
        raise HostError(
            f"this process cannot be kept on CPUs {format_cpus(wanted) or '(none)'}: {error}",
            remedy=f"Allowed are CPUs {format_cpus(os.sched_getaffinity(0))}: ask for cores among them",
        ) from error


def is_on_one_core() -> bool:
    """True if this thread, and threads that it starts, have one CPU only."""
    return len(os.sched_getaffinity(0)) == 1


def lower_priority(thread: int = 0) -> None:
    """Give a thread (native id; 0: this one) a lower priority than the event loop has. Errors of the kernel are
    ignored: answers are the same."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + STREAM_NICENESS)
        # Niceness is a weight, not a strict priority: a thread that slept longer than the loop would preempt it.
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def place_stream(thread: int, stream: int, streams: int) -> None:
    """Pin the thread (native id) of stream number `stream` of `streams` to a core, at a lower priority than the event
    loop. For threads of which there is one for each core.

    Otherwise the kernel sometimes runs two of them on one core, in time slices of 4 ms, and the event loop alone on
    another. Does nothing unless the process is pinned to as many CPUs as there are streams: elsewhere the scheduler
    finds free CPUs better. Errors of the kernel are ignored.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) != streams:
        return
    with contextlib.suppress(OSError):
        # The first stream, which does all work at low load, on the last core: most interrupts go to the first core.
        os.sched_setaffinity(thread, {cpus[-1 - stream]})
        lower_priority(thread)
