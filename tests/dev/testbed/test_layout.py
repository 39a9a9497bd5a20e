"""Cores are divided among nodes without overlap, and all configuration files of the nodes name them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import BedError
from testbed.host import Facts, complaints
from testbed.layout import MOST_NODES, core_list, layout, parse_core_list

FOLDER = Path("/var/tmp/penstock-testbed-0/machine")
CAPABLE = Facts(root=True, missing_commands=(), has_cni=True, has_cpuset_v1=True, cores=4, foreign_proxy=False)


@given(st.sets(st.integers(0, 255), min_size=2, max_size=64), st.integers(1, MOST_NODES))
def test_no_core_has_two_owners_and_every_node_reserves_the_rest(cores: set[int], nodes: int) -> None:
    if len(cores) < nodes:
        with pytest.raises(BedError, match="too few"):
            layout(sorted(cores), FOLDER, nodes=nodes)
        return

    plan = layout(sorted(cores), FOLDER, nodes=nodes)

    owned = [core for node in plan for core in node.owned]
    assert len(owned) == len(set(owned))
    assert all(node.owned for node in plan)
    assert all(node.owned | node.reserved == cores and not node.owned & node.reserved for node in plan)
    # The static policy wants something for itself.
    assert all(node.reserved for node in plan)


def test_nodes_share_neither_addresses_nor_names() -> None:
    plan = layout(range(16), FOLDER, nodes=MOST_NODES)

    for attribute in ("address", "pod_network", "bridge", "network", "cgroup", "socket", "folder"):
        assert len({getattr(node, attribute) for node in plan}) == MOST_NODES, attribute


@given(st.sets(st.integers(0, 1023)))
def test_core_lists_are_read_as_they_are_written(cores: set[int]) -> None:
    assert parse_core_list(core_list(frozenset(cores))) == cores


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (replace(CAPABLE, root=False), ["nodes need root"]),
        (replace(CAPABLE, missing_commands=("runc", "nft")), ["runc, nft missing: `make system`"]),
        (replace(CAPABLE, has_cni=False), ["/usr/lib/cni/bridge missing"]),
        (replace(CAPABLE, has_cpuset_v1=False), ["no cgroup v1 cpuset"]),
        (replace(CAPABLE, cores=1), ["1 core: pinned pods take a machine of at least two"]),
        (replace(CAPABLE, foreign_proxy=True), ["another kube-proxy"]),
        (replace(CAPABLE, root=False, cores=1), ["nodes need root", "1 core"]),
        (CAPABLE, []),
    ],
)
def test_a_machine_that_cannot_run_nodes_gets_a_list_of_everything_missing(facts: Facts, expected: list[str]) -> None:
    found = complaints(facts)

    assert len(found) == len(expected)
    assert all(text.startswith(start) or start in text for text, start in zip(found, expected, strict=True))
