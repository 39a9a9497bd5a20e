"""Fixtures of the tests on an API server. The tests act as the kubelet, so no nodes may run their pods."""

from __future__ import annotations

import pytest

from testbed.cluster import Cluster
from testbed.fixtures import install_crds


@pytest.fixture
def namespace_cluster(nodeless: Cluster) -> Cluster:
    """A control plane without nodes."""
    return nodeless


@pytest.fixture(scope="session")
def crds(nodeless: Cluster) -> Cluster:
    """The same with Penstock's resources installed."""
    install_crds(nodeless)
    return nodeless


@pytest.fixture(scope="module")
def classes(crds: Cluster) -> Cluster:
    """The hardware class of the endpoints here."""
    crds.kubectl.apply(
        {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}}
    )
    return crds
