"""pytest fixtures that give a test a Kubernetes. No conftest is needed; tests/conftest.py loads this module.

Control plane only (5 s to start, once for each test process; no privilege):

    control_plane          a Cluster: `.kubeconfig` (Path, administrator) and `.kubectl`. Shared by all tests of the
                           process, so delete cluster-wide objects that disturb other tests.
    kubeconfig             its administrator's kubeconfig (Path): config.load_kube_config(config_file=str(kubeconfig))
    namespace_cluster      where namespace, kubectl and kubeconfig are: control_plane, unless a conftest overrides it
    namespace              name of a namespace of this test's own, deleted afterwards (its end is not waited for)
    kubectl                kubectl in that namespace: kubectl("get", "pods"), kubectl.apply({...}),
                           kubectl.get("pod", "web"), kubectl.items("pods", "app=web"), kubectl.wait(...)
    crds                   the CustomResourceDefinitions of crds/, applied and established in control_plane
    nodeless               for tests that play the kubelet, and say themselves what becomes of pods: control_plane, or
                           a new one if the environment names a cluster: its nodes would run them
    private_control_plane  a ControlPlane that belongs to this test module alone: stop, launch, restart its programs
                           (`.restart("kube-apiserver", grace_seconds=0)`), make users (`.user("system:...", "group")`
                           gives a kubeconfig). Always our own, even where the environment names a cluster.
    fake_nodes             kwok at work on control_plane: fake_nodes.add([FakeNode("n1", labels={...})]), and
                           pods that tolerate kwok.TOLERATION become Running there. Removed with the module.
    helm                   path of a real helm 3

Whole cluster (12 s to start, root, cgroup v1; nodes a and b that own cores: 1,2 and 3 of four, 0 and 1 of two):

    full_cluster           a Cluster; its `.machine` has `.nodes` and `.node("a")`; `.load_image(archive)` gives the
                           nodes the images of an OCI archive. One for each machine, for all test processes, and only
                           for one test module at a time: cores are few. Uses one that `make cluster` started.
    machine_cluster        the same for fixtures that outlast a module; its tests use full_cluster as well
    full_namespace         name of a namespace of this test's own there; its pods' end is waited for: they hold cores
    full_kubectl           kubectl in that namespace

Tests that use it get the marker `full_cluster`, so that `-m full_cluster` and `-m "not full_cluster"` divide them.

PENSTOCK_TEST_KUBECONFIG (or KUBECONFIG) names a cluster to use instead of control_plane and of full_cluster. Where
neither that nor Go is there the tests fail and name the missing part: one that is skipped for want of a cluster proves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.build import binary
from testbed.cluster import Cluster, given_cluster
from testbed.control_plane import ControlPlane, running_control_plane
from testbed.errors import BedError
from testbed.kubectl import Kubectl
from testbed.kwok import FakeNodes, running_kwok
from testbed.machine import machine_lock
from testbed.sharing import shared_machine
from testbed.tools import HELM

FULL_CLUSTER_SECONDS = 1800
"""A test's time-out includes waiting until another test process's module is done with the machine's cluster."""

CRDS = Path(__file__).parents[2] / "crds"


def pytest_report_header() -> list[str]:
    """Print a warning when the tests run on a cluster that was not started here."""
    try:
        given = given_cluster()
    except BedError as error:
        return [f"cluster: {error}"]
    return [f"cluster: {given.kubeconfig}, given by the environment"] if given else []


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker that `pytest_collection_modifyitems` gives."""
    config.addinivalue_line("markers", "full_cluster: runs on nodes that own cores; one test module at a time")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the whole cluster, before `-m` selects, and let one process after the other have it."""
    for item in items:
        if "full_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("full_cluster")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(FULL_CLUSTER_SECONDS))


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
def nodeless(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A control plane that has no nodes, whatever the environment names."""
    try:
        if given_cluster() is None:
            yield request.getfixturevalue("control_plane")
            return
        with running_control_plane() as plane:
            yield Cluster(plane.kubeconfig, plane.kubectl)
    except BedError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def namespace_cluster(control_plane: Cluster) -> Cluster:
    """Where the fixtures below are. For the tests that use it: folders may have another."""
    return control_plane


@pytest.fixture
def kubeconfig(namespace_cluster: Cluster) -> Path:
    """The administrator's."""
    return namespace_cluster.kubeconfig


@pytest.fixture
def namespace(namespace_cluster: Cluster) -> Iterator[str]:
    """A namespace of this test's own."""
    with namespace_cluster.temporary_namespace() as name:
        yield name


@pytest.fixture
def kubectl(namespace_cluster: Cluster, namespace: str) -> Kubectl:
    """What kubectl does in this test's namespace."""
    return namespace_cluster.kubectl.within(namespace)


@pytest.fixture(scope="session")
def machine_cluster() -> Iterator[Cluster]:
    """The machine's cluster, from the first of the test processes that want it to the last that has it."""
    try:
        if given := given_cluster():
            yield given
            return
        with shared_machine() as running:
            yield Cluster(running.kubeconfig, running.kubectl, running)
    except BedError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def full_cluster(machine_cluster: Cluster) -> Iterator[Cluster]:
    """The whole cluster, for this module alone as long as its tests run."""
    with machine_lock("turn.lock"):
        yield machine_cluster


@pytest.fixture
def full_namespace(full_cluster: Cluster) -> Iterator[str]:
    """A namespace of this test's own; whatever ran in it is gone when the next test starts."""
    with full_cluster.temporary_namespace(wait_for_pods=True) as name:
        yield name


@pytest.fixture
def full_kubectl(full_cluster: Cluster, full_namespace: str) -> Kubectl:
    """What kubectl does in this test's namespace of the whole cluster."""
    return full_cluster.kubectl.within(full_namespace)


@pytest.fixture(scope="session")
def crds(control_plane: Cluster) -> Cluster:
    """The control plane once it knows our resources."""
    try:
        control_plane.require_free_of_penstock()
    except BedError as error:
        pytest.fail(str(error), pytrace=False)
    install_crds(control_plane)
    return control_plane


@pytest.fixture(scope="module")
def fake_nodes(control_plane: Cluster) -> Iterator[FakeNodes]:
    """Nodes that only say that they run pods."""
    try:
        with running_kwok(control_plane.kubeconfig, control_plane.kubectl) as nodes:
            yield nodes
            nodes.remove_all()
    except BedError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def helm() -> Path:
    """A real helm 3."""
    try:
        return binary(HELM)
    except BedError as error:
        pytest.fail(str(error), pytrace=False)


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
