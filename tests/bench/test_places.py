"""Which CPUs servers and client get."""

from __future__ import annotations

import pytest

from penstock.errors import HostError
from penstock.hardware import CpuIdentity
from penstock_bench.grid import place
from penstock_runtime.host import Core, Host, HostMemory


def host(*siblings: tuple[int, ...], affinity: tuple[int, ...] | None = None) -> Host:
    online = tuple(sorted(cpu for cpus in siblings for cpu in cpus))
    return Host(
        cpu=CpuIdentity(),
        online=online,
        cores=tuple(Core(cpus=cpus, node=0, cache=0) for cpus in siblings),
        affinity=affinity or online,
        cpuset=None,
        quota=None,
        memory=HostMemory(total=2**34, available=2**34, limit=None),
    )


def test_the_client_gets_the_cores_that_the_server_does_not_use() -> None:
    placement = place(host((0,), (1,), (2,), (3,)), 2)

    assert (placement.server, placement.client) == ((0, 1), (2, 3))
    assert placement.note == ""


def test_the_client_does_not_share_a_core_by_way_of_its_sibling() -> None:
    placement = place(host((0, 4), (1, 5), (2, 6), (3, 7)), 2)

    assert (placement.server, placement.client) == ((0, 1), (2, 3, 6, 7))


def test_with_all_cores_in_use_the_client_shares_them_and_a_note_reports_it() -> None:
    placement = place(host((0,), (1,)), 2)

    assert placement.client == ()
    assert "all 2 cores" in placement.note


def test_more_cores_than_there_are_is_an_error() -> None:
    with pytest.raises(HostError, match="cores: 8 was asked for"):
        place(host((0,), (1,)), 8)
