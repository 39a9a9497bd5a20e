"""What the tests on an API server have in common."""

from __future__ import annotations

import pytest

from testbed.cluster import Cluster


@pytest.fixture(scope="module")
def classes(crds: Cluster) -> Cluster:
    """The hardware class of the endpoints here."""
    crds.kubectl.apply(
        {"apiVersion": "penstock.dev/v1alpha1", "kind": "HardwareClass", "metadata": {"name": "any"}, "spec": {}}
    )
    return crds
