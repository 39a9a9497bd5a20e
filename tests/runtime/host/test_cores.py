"""The granted cores and findings, by machine and limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import HostError
from penstock_runtime.host import Core, CoreGrant, read_host
from penstock_runtime.host.cores import grant_cores
from tests.runtime.host.trees import Machine, cgroup_v1, cgroup_v2, hyper_threaded, single_threaded

SHARED = "other processes may run on these cores: no core of the machine is reserved for this process"


def grant(machine: Machine, root: Path, asked: int | None = None) -> CoreGrant:
    return read_host(machine.write(root), amx_permitted=True).usable_cores(asked)


def test_one_thread_for_each_physical_core_of_a_machine_with_smt(tmp_path: Path) -> None:
    granted = grant(Machine(hyper_threaded(4)), tmp_path)
    assert (granted.cpus, granted.siblings, granted.cores) == ((0, 1, 2, 3), (4, 5, 6, 7), 4)
    assert "SMT siblings share a core (CPUs 0,4, 1,5, 2,6, 3,7): using one on each" in granted.findings


def test_siblings_are_read_from_cpuinfo_where_sys_is_not_mounted(tmp_path: Path) -> None:
    granted = grant(Machine(hyper_threaded(2), sysfs=False), tmp_path)
    assert (granted.cpus, granted.siblings) == ((0, 1), (2, 3))


def test_two_sockets_are_reported_and_a_smaller_grant_stays_on_one(tmp_path: Path) -> None:
    machine = Machine(hyper_threaded(8, nodes=2))
    assert "the cores span 2 NUMA nodes (0-1)" in grant(machine, tmp_path).findings
    granted = grant(machine, tmp_path, 4)
    assert (granted.cpus, granted.nodes) == ((0, 1, 2, 3), (0,))


def test_cores_of_one_core_complex_are_taken_together(tmp_path: Path) -> None:
    """Two complexes of four; the first has lost a core to the cpuset, so four fit only into the second."""
    machine = Machine(
        [((cpu,), 0, cpu // 4) for cpu in range(8)],
        processor="zen3",
        affinity=range(1, 8),
        files=cgroup_v2(cpuset__cpus__effective="1-7"),
    )
    assert grant(machine, tmp_path, 4).cpus == (4, 5, 6, 7)
    assert grant(machine, tmp_path, 3).cpus == (1, 2, 3)
    assert grant(machine, tmp_path, 5).cpus == (1, 4, 5, 6, 7)


def test_fast_cores_come_before_efficiency_cores(tmp_path: Path) -> None:
    cores = [((0, 1), 0, 0), ((2, 3), 0, 0), ((4,), 0, 0), ((5,), 0, 0)]
    machine = Machine(cores, processor="alder-lake", efficiency=[4, 5])
    two = grant(machine, tmp_path, 2)
    assert two.cpus == (0, 2)
    assert "using the fast cores only (2 of 4)" in two.findings
    three = grant(machine, tmp_path, 3)
    assert three.cpus == (0, 2, 4)
    assert "1 of 3 physical cores are efficiency cores: threads will wait for them" in three.findings


def test_arm_cores_of_lower_capacity_are_efficiency_cores(tmp_path: Path) -> None:
    capacities = {f"/sys/devices/system/cpu/cpu{cpu}/cpu_capacity": text for cpu, text in enumerate(["400", "1024"])}
    assert grant(Machine(single_threaded(2), processor="graviton2", files=capacities), tmp_path, 1).cpus == (1,)


V2_QUOTA = cgroup_v2(cpu__max="150000 100000", cpuset__cpus__effective="0-3")
V1_QUOTA = cgroup_v1(
    "/kubepods/pod1/c1",
    base="/kubepods/pod1/c1",
    cpu={"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"},
    cpuset={"cpuset.effective_cpus": "0-3"},
)


@pytest.mark.parametrize("files", [V2_QUOTA, V1_QUOTA], ids=["v2", "v1"])
def test_a_fractional_quota_rounds_down_with_a_finding(files: dict[str, str], tmp_path: Path) -> None:
    host = read_host(Machine(single_threaded(4), files=files).write(tmp_path), amx_permitted=True)
    granted = host.usable_cores(4)
    assert (host.quota, granted.cores, granted.pinned, granted.keep) == (1.5, 1, False, False)
    assert granted.findings == ("4 CPUs but a quota of 1.5: using 1", SHARED)


def test_a_quota_under_one_cpu_still_grants_one(tmp_path: Path) -> None:
    granted = grant(Machine(single_threaded(2), files=cgroup_v2(cpu__max="20000 100000")), tmp_path)
    assert granted.cores == 1
    assert "2 CPUs but a quota of 0.2: using 1" in granted.findings


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000", None), ("400000 100000", 4.0), ("399999999 100000000", 3.99999999), ("", None), ("rubbish", None)],
)
def test_quotas_of_version_2(text: str, quota: float | None, tmp_path: Path) -> None:
    host = read_host(Machine(single_threaded(8), files=cgroup_v2(cpu__max=text)).write(tmp_path), amx_permitted=True)
    assert host.quota == quota


def test_no_quota_in_version_1_is_minus_one(tmp_path: Path) -> None:
    files = cgroup_v1("/", cpu={"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"})
    assert read_host(Machine(single_threaded(2), files=files).write(tmp_path), amx_permitted=True).quota is None


def test_the_tightest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    files = cgroup_v2("/system.slice/a.service/inner", cpu__max="max 100000") | {
        "/sys/fs/cgroup/system.slice/a.service/cpu.max": "300000 100000",
        "/sys/fs/cgroup/system.slice/cpu.max": "250000 100000",
    }
    host = read_host(Machine(single_threaded(8), files=files).write(tmp_path), amx_permitted=True)
    assert (host.quota, host.usable_cores().cores) == (2.5, 2)


def test_a_hybrid_tree_has_its_quota_in_version_1(tmp_path: Path) -> None:
    files = cgroup_v1("/", cpu={"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"})
    files["/proc/self/cgroup"] += "0::/\n"
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    files["/proc/self/mountinfo"] = unified + files["/proc/self/mountinfo"]
    assert read_host(Machine(single_threaded(4), files=files).write(tmp_path), amx_permitted=True).quota == 2.0


def test_a_group_outside_of_the_mount_falls_back_to_the_mount(tmp_path: Path) -> None:
    """Inside a cgroup namespace the process's group may be named from elsewhere."""
    files = cgroup_v2("/", cpu__max="200000 100000") | {"/proc/self/cgroup": "0::/../../other\n"}
    assert read_host(Machine(single_threaded(4), files=files).write(tmp_path), amx_permitted=True).quota == 2.0


def test_mount_points_with_blanks_are_found(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/my\\040group rw - cgroup2 cgroup2 rw\n",
        "/sys/fs/my group/cpu.max": "200000 100000",
    }
    assert read_host(Machine(single_threaded(4), files=files).write(tmp_path), amx_permitted=True).quota == 2.0


PINNED_V2 = cgroup_v2(cpuset__cpus__effective="2-3", cpu__max="max 100000")
PINNED_V1 = cgroup_v1(
    "/kubepods/pod1/c1",
    base="/kubepods/pod1/c1",
    cpu={"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
    cpuset={"cpuset.cpus": "2-3"},
)


@pytest.mark.parametrize("files", [PINNED_V2, PINNED_V1], ids=["v2", "v1"])
def test_a_cpuset_of_just_the_granted_cores_is_pinned(files: dict[str, str], tmp_path: Path) -> None:
    granted = grant(Machine(single_threaded(8), affinity=[2, 3], files=files), tmp_path, 2)
    assert (granted.cpus, granted.pinned, granted.keep, granted.findings) == ((2, 3), True, True, ())


def test_whole_cores_with_their_siblings_are_pinned(tmp_path: Path) -> None:
    files = cgroup_v2(cpuset__cpus__effective="1-2,9-10", cpu__max="400000 100000")
    granted = grant(Machine(hyper_threaded(8), affinity=[1, 2, 9, 10], files=files), tmp_path, 2)
    assert (granted.cpus, granted.siblings, granted.pinned) == ((1, 2), (9, 10), True)


NOT_PINNED = {
    "whole machine": ("0-15", range(16), "max", SHARED),
    "shared pool": ("0-6,8-14", [*range(7), *range(8, 15)], "max", "so it may be shared with others"),
    "half cores": ("1-2", [1, 2], "max", "CPUs 9-10 run on the same cores but belong to others"),
    "fractional quota": ("1-2,9-10", [1, 2, 9, 10], "350000", "a quota of 3.5 CPUs stops threads on 4 CPUs"),
    "taskset inside": ("1-2,9-10", [1, 2], "max", "the affinity leaves out CPUs 9-10 of the cpuset"),
}


@pytest.mark.parametrize("case", NOT_PINNED)
def test_cores_are_not_pinned_with_the_reason(case: str, tmp_path: Path) -> None:
    cpuset, affinity, quota, reason = NOT_PINNED[case]
    files = cgroup_v2(cpuset__cpus__effective=cpuset, cpu__max=f"{quota} 100000")
    granted = grant(Machine(hyper_threaded(8), affinity=affinity, files=files), tmp_path, 2)
    assert not granted.pinned
    assert reason in " ".join(granted.findings)


def test_taskset_narrows_the_cores_but_does_not_pin(tmp_path: Path) -> None:
    files = cgroup_v2(cpuset__cpus__effective="0-3")
    granted = grant(Machine(single_threaded(4), affinity=[1, 2], files=files), tmp_path)
    assert (granted.cpus, granted.pinned, granted.keep) == ((1, 2), False, True)


def test_without_cgroups_the_cores_are_not_called_pinned(tmp_path: Path) -> None:
    granted = grant(Machine(single_threaded(2)), tmp_path)
    assert granted.findings == ("no cpuset can be read, so other processes may run on these cores",)
    assert not granted.pinned


def test_asking_for_more_cores_than_there_are_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        grant(Machine(hyper_threaded(4)), tmp_path, 8)
    assert str(caught.value) == (
        "cores: 8 was asked for, but this process has 4 physical cores (8 CPUs, as SMT siblings share cores). "
        "Write cores: 4 or fewer, or give it more CPUs"
    )


@pytest.mark.parametrize("asked", [0, -1])
def test_asking_for_no_cores_is_an_error(asked: int, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="Write a number from 1"):
        grant(Machine(single_threaded(2)), tmp_path, asked)


def test_an_empty_root_gives_one_cpu_rather_than_an_error(tmp_path: Path) -> None:
    host = read_host(tmp_path, amx_permitted=False)
    assert (host.online, host.quota, host.cpuset, host.usable_cores().cpus) == ((0,), None, None, (0,))


def test_a_cpuset_that_does_not_overlap_the_affinity_is_ignored(tmp_path: Path) -> None:
    files = cgroup_v2(cpuset__cpus__effective="0-1")
    host = read_host(Machine(single_threaded(4), affinity=[2, 3], files=files).write(tmp_path), amx_permitted=True)
    assert host.allowed == (2, 3)


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[Core], set[int]]:
    threads = draw(st.integers(1, 4))
    count = draw(st.integers(1, 24))
    cores = [
        Core(
            cpus=tuple(range(core * threads, (core + 1) * threads)),
            node=draw(st.integers(0, 2)),
            cache=draw(st.integers(0, 3)),
            fast=draw(st.booleans()),
        )
        for core in range(count)
    ]
    allowed = draw(st.sets(st.integers(0, count * threads - 1), min_size=1))
    return cores, allowed


@given(machines(), st.one_of(st.none(), st.floats(0.01, 64)), st.data())
def test_a_grant_uses_each_core_once_and_only_allowed_cpus(
    machine: tuple[list[Core], set[int]], quota: float | None, data: st.DataObject
) -> None:
    cores, allowed = machine
    usable = [core for core in cores if allowed.intersection(core.cpus)]
    asked = data.draw(st.one_of(st.none(), st.integers(1, len(usable))))
    online = [cpu for core in cores for cpu in core.cpus]
    granted = grant_cores(asked, cores=cores, online=online, allowed=allowed, cpuset=allowed, quota=quota)
    of_cpu = {cpu: core for core in cores for cpu in core.cpus}
    chosen = [of_cpu[cpu] for cpu in granted.cpus]
    assert set(granted.cpus) <= allowed
    assert len(set(chosen)) == len(chosen)
    wanted = asked or len(usable)
    assert granted.cores == (wanted if quota is None else max(1, min(wanted, int(quota + 1e-6))))
    assert set(granted.siblings) <= allowed - set(granted.cpus)
    assert granted.pinned <= (quota is None or quota + 1e-6 >= len(allowed))
    # No slow core while a fast one is idle.
    idle_fast = [core for core in usable if core.fast and core not in chosen]
    assert not idle_fast or all(core.fast for core in chosen)
