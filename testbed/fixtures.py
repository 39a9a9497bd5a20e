"""pytest fixtures: a Kubernetes for whoever names one. No conftest is needed; tests/conftest.py loads this module.

Control plane only (5 s to start, once for each test process; no privilege):

    control_plane          a Cluster: `.kubeconfig` (Path, administrator) and `.kubectl`. Shared by all tests of the
                           process, so leave no cluster-wide objects behind that others trip over.
    kubeconfig             its administrator's kubeconfig (Path): config.load_kube_config(config_file=str(kubeconfig))
    namespace              name of a namespace of this test's own, deleted afterwards (its end is not waited for)
    kubectl                kubectl in that namespace: kubectl("get", "pods"), kubectl.apply({...}),
                           kubectl.get("pod", "web"), kubectl.items("pods", "app=web"), kubectl.wait(...)
    crds                   the CustomResourceDefinitions of crds/, applied and established in control_plane
    private_control_plane  a ControlPlane that belongs to this test module alone: stop, launch, restart its programs
                           (`.restart("kube-apiserver", grace_seconds=0)`), make users (`.user("system:...", "group")`
                           gives a kubeconfig). Always our own, even where the environment names a cluster.

PENSTOCK_TEST_KUBECONFIG (or KUBECONFIG) names a cluster to use in place of control_plane. Where neither that nor Go is
there the tests fail and say what is missing: a test that is skipped for want of a cluster proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.cluster import Cluster, given_cluster
from testbed.control_plane import ControlPlane, running_control_plane
from testbed.errors import BedError
from testbed.kubectl import Kubectl

CRDS = Path(__file__).parents[1] / "crds"


def pytest_report_header() -> list[str]:
    """Say it loudly when the tests run on somebody's cluster."""
    try:
        given = given_cluster()
    except BedError as error:
        return [f"cluster: {error}"]
    return [f"cluster: {given.kubeconfig}, given by the environment"] if given else []


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """The cluster that the environment names, or a control plane of this test process's own."""
    try:
        if given := given_cluster():
            yield given
            return
        with running_control_plane() as plane:
            yield Cluster(plane.kubeconfig, plane.kubectl)
    except BedError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def kubeconfig(control_plane: Cluster) -> Path:
    """The administrator's."""
    return control_plane.kubeconfig


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A namespace of this test's own."""
    with control_plane.temporary_namespace() as name:
        yield name


@pytest.fixture
def kubectl(control_plane: Cluster, namespace: str) -> Kubectl:
    """What kubectl does in this test's namespace."""
    return control_plane.kubectl.within(namespace)


@pytest.fixture(scope="session")
def crds(control_plane: Cluster) -> Cluster:
    """The control plane once it knows our resources."""
    install_crds(control_plane)
    return control_plane


@pytest.fixture(scope="module")
def private_control_plane() -> Iterator[ControlPlane]:
    """A control plane that this module may break."""
    try:
        with running_control_plane() as plane:
            yield plane
    except BedError as error:
        pytest.fail(str(error), pytrace=False)


def install_crds(cluster: Cluster) -> None:
    """Apply crds/*.yaml and wait until the API server serves them."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename", str(CRDS))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", str(CRDS))
