"""What the tests on an API server have in common: they play the kubelet, so no nodes may run their pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.cluster import Cluster
from testbed.fixtures import install_crds
from testbed.kubectl import Kubectl


@pytest.fixture(scope="session")
def crds(nodeless: Cluster) -> Cluster:
    """A control plane without nodes that knows our resources."""
    install_crds(nodeless)
    return nodeless


@pytest.fixture(scope="session")
def kubeconfig(nodeless: Cluster) -> Path:
    """Its administrator's."""
    return nodeless.kubeconfig


@pytest.fixture
def namespace(nodeless: Cluster) -> Iterator[str]:
    """A namespace there of this test's own."""
    with nodeless.temporary_namespace() as name:
        yield name


@pytest.fixture
def kubectl(nodeless: Cluster, namespace: str) -> Kubectl:
    """What kubectl does in it."""
    return nodeless.kubectl.within(namespace)


@pytest.fixture(scope="module")
def classes(crds: Cluster) -> Cluster:
    """The hardware class of the endpoints here."""
    crds.kubectl.apply(
        {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}}
    )
    return crds
