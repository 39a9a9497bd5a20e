"""The available memory, and the error when it is not enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import HostError
from penstock_runtime.host import HostMemory, read_host, require_memory
from penstock_runtime.host.cgroup import size
from tests.runtime.host.trees import Machine, cgroup_v1, cgroup_v2, single_threaded

GIB = 2**30


def memory(root: Path, files: dict[str, str]) -> HostMemory:
    return read_host(Machine(single_threaded(1), files=files).write(root), amx_permitted=True).memory


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    assert memory(tmp_path, {}) == HostMemory(total=64 * GIB, limit=None, available=48 * GIB)


@pytest.mark.parametrize(
    "files",
    [
        cgroup_v2(
            memory__max=str(2 * GIB),
            memory__current=str(GIB),
            memory__stat=f"anon 5\ninactive_file {GIB // 8}\nactive_file {GIB * 3 // 8}\nshmem {GIB // 4}\n",
        ),
        cgroup_v1(
            "/kubepods/c1",
            base="/kubepods/c1",
            memory={
                "memory.limit_in_bytes": str(2 * GIB),
                "memory.usage_in_bytes": str(GIB),
                "memory.stat": f"active_file 9\ntotal_inactive_file {GIB // 8}\ntotal_active_file {GIB * 3 // 8}\n",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_file_cache_counts_as_free(files: dict[str, str], tmp_path: Path) -> None:
    assert memory(tmp_path, files) == HostMemory(total=64 * GIB, limit=2 * GIB, available=3 * GIB // 2)


@pytest.mark.parametrize(
    "files",
    [cgroup_v2(memory__max="max"), cgroup_v1("/", memory={"memory.limit_in_bytes": "9223372036854771712"})],
    ids=["v2", "v1"],
)
def test_values_of_the_kernel_for_no_limit_are_recognised(files: dict[str, str], tmp_path: Path) -> None:
    assert memory(tmp_path, files).limit is None


def test_a_limit_above_the_machine_limits_nothing(tmp_path: Path) -> None:
    assert memory(tmp_path, cgroup_v2(memory__max=str(100 * GIB))).limit is None


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    files = cgroup_v2("/a/b", memory__max=str(8 * GIB), memory__current="0") | {
        "/sys/fs/cgroup/a/memory.max": str(4 * GIB),
        "/sys/fs/cgroup/a/memory.current": str(3 * GIB),
    }
    assert memory(tmp_path, files) == HostMemory(total=64 * GIB, limit=4 * GIB, available=GIB)


def test_enough_memory_passes() -> None:
    require_memory(HostMemory(total=GIB, limit=None, available=GIB), GIB, "serving a")


def test_a_machine_with_unknown_memory_is_not_refused() -> None:
    require_memory(HostMemory(total=0, limit=None, available=0), GIB, "serving a")


def test_too_little_under_a_limit_names_the_missing_amount() -> None:
    with pytest.raises(HostError) as caught:
        require_memory(HostMemory(total=64 * GIB, limit=2 * GIB, available=GIB), 3 * GIB, "serving emotion")
    assert str(caught.value) == (
        "serving emotion needs 3 GiB, but 1 GiB of the limit of 2 GiB are free. "
        "Raise the memory limit of this container by 2 GiB, or use fewer streams"
    )


def test_too_little_on_the_machine_names_the_machine() -> None:
    with pytest.raises(HostError, match="but 1 GiB of this machine's 4 GiB are free"):
        require_memory(HostMemory(total=4 * GIB, limit=None, available=GIB), 3 * GIB, "serving emotion")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (3 * GIB, "3 GiB"), (5 * 2**40, "5 TiB")]
)
def test_sizes_are_written_with_units(count: int, text: str) -> None:
    assert size(count) == text


@given(st.integers(0, 999 * 2**40))
def test_sizes_never_take_an_exponent(count: int) -> None:
    assert "e" not in size(count)


def test_the_memory_of_a_host_is_read_again_when_it_is_asked_for() -> None:
    before = replace(read_host(), memory=HostMemory(total=1, limit=None, available=1))
    now = before.with_present_memory()

    assert now.memory.total == read_host().memory.total
    assert now.memory.available > 1
    assert replace(now, memory=before.memory) == before
