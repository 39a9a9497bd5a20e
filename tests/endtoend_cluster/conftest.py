"""Fixtures on real nodes: the project's own images, installed by helm, on kubelets that allocate whole cores."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from images.build import builder
from images.errors import ImageError
from images.target import project_version, target_named
from testbed.cluster import OF_TESTS, Cluster
from testbed.errors import BedError
from testbed.kubectl import Kubectl
from testbed.machine import machine_lock
from testbed.sharing import STARTED_BY_TESTS
from tests.charts.helm import Helm
from tests.endtoend_cluster.chat import CONTEXT
from tests.endtoend_cluster.inferentia import INTERPRETER
from tests.endtoend_cluster.installation import (
    Endpoint,
    Installation,
    Json,
    installed,
    prepare_capacity,
    remove_endpoints,
)
from tests.runtime.models.gguf_files import write_gguf

IMAGES = ("operator", "runtime", "gateway", "optimizer-demo")
"""The demonstration's optimiser has the example's model inside: nothing here leaves the machine."""

VALUES: dict[str, object] = {
    "images": {
        "optimizer": {"repository": "localhost/penstock-optimizer-demo", "tag": project_version()},
        # A stand-in for the Neuron SDK comes in volumes: test_inferentia.py.
        "runtimeNeuron": {"repository": "localhost/penstock-runtime", "tag": project_version()},
        "optimizerNeuron": {"repository": "localhost/penstock-optimizer-demo", "tag": project_version()},
        "pullPolicy": "Never",
    },
    "jobs": {"overtimeSeconds": 300},
    # Tests of other endpoints do not wait for each other.
    "maxConcurrentOptimizations": 8,
    "maxConcurrentRollouts": 8,
    "inferentia": {"compileCpus": 1, "compileMemory": "3Gi"},
    "extraEnv": INTERPRETER,
    # A Prometheus runs in the namespace of a test.
    "prometheus": {"allowedHosts": ["*.svc"]},
    # The nodes own one or two cores each: a tenth of one would keep a pod from its own.
    "operator": {
        "settings": {
            "PROGRESS_SECONDS": "1",
            "SCALING_INTERVAL_SECONDS": "2",
            "PROMETHEUS_INTERVAL_SECONDS": "2",
            "GATEWAY_CPU": "0",
        },
        "resources": {"requests": {"cpu": 0, "memory": "128Mi"}},
        "podAnnotations": {OF_TESTS: "yes"},
    },
}
"""What differs from the chart's defaults."""


@pytest.fixture(scope="module", autouse=True)
def turn(full_cluster: Cluster) -> None:
    """These tests use the cores that nodes own: one module at a time."""


@pytest.fixture(scope="session")
def file_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the nodes whose models endpoints may name; of the nodes that are this machine."""
    folder = tmp_path_factory.mktemp("sources")
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def archives() -> list[Path]:
    """The archives of IMAGES."""
    working = builder(lambda line: print(line, file=sys.stderr, flush=True))
    try:
        return [working.build(target_named(name)) for name in IMAGES]
    except ImageError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def installation(
    machine_cluster: Cluster,
    helm: Path,
    archives: list[Path],
    file_sources: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installation]:
    """Penstock, installed on the whole cluster as in its README, once for all modules, and uninstalled at the end."""
    # One release for each cluster, whichever test process it belongs to.
    with machine_lock("installation.lock"):
        try:
            machine_cluster.require_free_of_penstock()
        except BedError as error:
            pytest.fail(str(error), pytrace=False)
        if machine_cluster.machine is not None:
            for archive in archives:
                machine_cluster.load_image(archive)
        # The nodes are this machine, and its own folder of artefacts is none of ours.
        path = {"path": str(tmp_path_factory.mktemp("store"))} if machine_cluster.machine else {}
        helm_here = Helm(helm, machine_cluster.kubeconfig)
        values = {
            **VALUES,
            "store": {"hostPath": {"enabled": True, **path}},
            "policy": {"fileSources": [str(file_sources)]},
        }
        with installed(machine_cluster, helm_here, values, stays=STARTED_BY_TESTS.exists()) as installation:
            yield installation


@pytest.fixture(scope="session")
def shared_kubectl(installation: Installation) -> Iterator[Kubectl]:
    """kubectl in a namespace that all modules share, so that each spec is optimised once."""
    cluster = installation.cluster
    with cluster.temporary_namespace(wait_for_pods=True) as namespace:
        kubectl = cluster.kubectl.within(namespace)
        prepare_capacity(installation, kubectl)
        yield kubectl


@pytest.fixture
def endpoint(installation: Installation, shared_kubectl: Kubectl) -> Iterator[Callable[[str], Endpoint]]:
    """Gives an endpoint by its name; nothing is applied yet. They end with the test: they hold cores."""
    names: list[str] = []

    def new(name: str) -> Endpoint:
        names.append(name)
        return Endpoint(installation, shared_kubectl, name)

    yield new
    remove_endpoints(shared_kubectl, *names)


@pytest.fixture
def chat_model(shared_kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`spec.model` of a small language model on a volume of the nodes, which are this machine."""
    folder = tmp_path_factory.mktemp("chat-model")
    header: Json = {"llama.context_length": CONTEXT}
    write_gguf(folder / "model.gguf", **header)
    folder.chmod(0o755)
    (folder / "model.gguf").chmod(0o644)
    # Another one each time: Kubernetes keeps a claim as long as the pods of ended jobs refer to it.
    claim = f"chat-model-{secrets.token_hex(4)}"
    common: Json = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    shared_kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": claim},
            "spec": common | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim},
            "spec": common | {"volumeName": claim, "resources": {"requests": {"storage": "1Gi"}}},
        },
    )
    yield f"pvc://{claim}/model.gguf"
    shared_kubectl("delete", "persistentvolumeclaim", claim, "--ignore-not-found", "--wait=false")
    shared_kubectl("delete", "persistentvolume", claim, "--ignore-not-found", "--wait=false")
