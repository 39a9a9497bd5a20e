"""Kernel file formats: values are parsed, and damaged files are never an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_runtime.host import read_host, read_throttling
from penstock_runtime.host.procfs import cpu_list, format_cpus, key_values, number
from tests.runtime.host.trees import Machine, cgroup_v1, cgroup_v2, single_threaded


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("5", (5,)),
        ("", ()),
        ("\n", ()),
        ("3-1", ()),
        ("1,1-2", (1, 2)),
        ("a", None),
        ("0-99999999", None),
        ("-1", None),
        (None, None),
    ],
)
def test_a_cpu_list_is_parsed_or_none(text: str | None, cpus: tuple[int, ...] | None) -> None:
    assert cpu_list(text) == cpus


@given(st.sets(st.integers(0, 4096)))
def test_a_cpu_list_is_read_as_it_is_written(cpus: set[int]) -> None:
    assert cpu_list(format_cpus(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize(("text", "value"), [("12\n", 12), ("0xd40", 3392), ("", None), ("1.5", None), ("max", None)])
def test_a_number_is_parsed_or_none(text: str, value: int | None) -> None:
    assert number(text) == value


def test_lines_without_a_number_are_left_out() -> None:
    assert key_values("MemTotal:  12 kB\nnr_periods 3\nodd\nname text\n") == {"MemTotal": 12, "nr_periods": 3}


DAMAGED = [
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/self/status",
    "/proc/self/cgroup",
    "/proc/self/mountinfo",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
    "/sys/devices/system/cpu/cpu0/cache/index3/level",
    "/sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list",
    "/sys/devices/system/node/node0/cpulist",
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/cpuset.cpus.effective",
    "/sys/fs/cgroup/memory.max",
]
LINES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([
        b"0-3\n", b"processor: x\nflags: avx2\n", b"0::/..\n", b"9:cpu:/a\n", b"Cpus_allowed_list:\t7-9\n", b"-5 0\n",
        b"1 2 0:1 / / rw - cgroup2 cgroup2 rw\n", b"max 0\n", b"99999999999999999999999 1\n",
    ]),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(DAMAGED), LINES, max_size=4))
def test_damaged_kernel_files_still_give_a_host(damage: dict[str, bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = cgroup_v2(cpu__max="max 100000", cpuset__cpus__effective="0-1", memory__max="max")
        root = Machine(single_threaded(2), files=files).write(Path(folder))
        for path, content in damage.items():
            (root / path.lstrip("/")).write_bytes(content)
        host = read_host(root, amx_permitted=False)
        assert host.usable_cores().cores >= 1
        assert host.memory.available >= 0
        _ = read_throttling(root)


@pytest.mark.parametrize(
    "files",
    [
        cgroup_v2(cpu__stat="usage_usec 9\nnr_periods 40\nnr_throttled 3\nthrottled_usec 2500000\n"),
        cgroup_v1("/", cpu={"cpu.stat": "nr_periods 40\nnr_throttled 3\nthrottled_time 2500000000\n"}),
    ],
    ids=["v2", "v1"],
)
def test_throttling_is_counted_in_seconds(files: dict[str, str], tmp_path: Path) -> None:
    throttling = read_throttling(Machine(single_threaded(1), files=files).write(tmp_path))
    assert throttling is not None
    assert (throttling.periods, throttling.throttled_periods, throttling.throttled_seconds) == (40, 3, 2.5)


@pytest.mark.parametrize("files", [{}, cgroup_v2(cpu__stat="usage_usec 9\n")], ids=["no cgroups", "no quota"])
def test_no_counters_without_a_quota(files: dict[str, str], tmp_path: Path) -> None:
    assert read_throttling(Machine(single_threaded(1), files=files).write(tmp_path)) is None
