"""Text generation on a cluster: streams through the Service outlast rollouts and changes of the number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from testbed.kubectl import Kubectl
from tests.endtoend_cluster.installation import Endpoint, Json, is_ready
from tests.gateway.streams import chat, read_stream, streams
from tests.runtime.models.gguf_files import write_gguf

pytestmark = pytest.mark.slow

CLAIM = "chat-model"
CONTEXT = 4096
TOKENS = 1500
"""Of an answer: some seconds, so that each change of the pods meets streams in progress."""
NO_END = {"1": -100}
"""The model is random, and its end token would come by chance."""
SECONDS = 600.0
SPEC: Json = {
    "model": f"pvc://{CLAIM}/model.gguf",
    "task": "text-generation",
    "objective": {"timeToFirstToken": {"p95Milliseconds": 60_000}},
    "workload": {"lengths": "16,32"},
    "serving": {},
    # Nothing is searched for: the fp32 model serves first, and then the same with its measured capacity.
    "optimization": {"mode": "Disabled", "budgetSeconds": 120},
    "scaling": {"mode": "None"},
    "rollout": {"drainSeconds": 3, "finishSeconds": 120},
}


@pytest.fixture
def model(shared_kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A small model on a volume of the nodes, which are this machine."""
    folder = tmp_path_factory.mktemp("model")
    header: Json = {"llama.context_length": CONTEXT}
    write_gguf(folder / "model.gguf", **header)
    folder.chmod(0o755)
    (folder / "model.gguf").chmod(0o644)
    volume = f"{CLAIM}-{shared_kubectl.namespace}"
    common: Json = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    shared_kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": common | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM},
            "spec": common | {"volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}},
        },
    )
    yield
    shared_kubectl("delete", "persistentvolumeclaim", CLAIM, "--ignore-not-found", "--wait=false")
    shared_kubectl("delete", "persistentvolume", volume, "--ignore-not-found", "--wait=false")


def until_streamed(address: str, endpoint: Endpoint) -> None:
    """Wait until the Service leads to a pod that generates."""

    def is_it(_: Json) -> bool:
        with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
            found = read_stream(client, f"http://{address}", {**chat(4), "logit_bias": NO_END})
            return found.problem == "" and found.generated == 4

    endpoint.until(is_it, "streaming", seconds=SECONDS)


@pytest.mark.usefixtures("model")
def test_streams_outlast_rollouts_and_changes_of_the_number_of_replicas(endpoint: Callable[[str], Endpoint]) -> None:
    chat_endpoint = endpoint("chat")

    def apply(**changes: object) -> None:
        chat_endpoint.apply(**SPEC | changes)

    def pods() -> list[Json]:
        """Those that are ready, and those that end."""
        labels = "app.kubernetes.io/name=penstock-runtime,penstock.dev/endpoint=chat"
        return chat_endpoint.kubectl.items("pods", labels)

    def until_pods(count: int, what: str, *, other_than: frozenset[str] = frozenset()) -> frozenset[str]:
        """Wait until as many pods are ready and none is left that ends; returns their names."""

        def is_it(_: Json) -> bool:
            found = pods()
            ready = [pod for pod in found if is_ready(pod)]
            names = {pod["metadata"]["name"] for pod in found}
            return len(found) == len(ready) == count and not names & other_than

        chat_endpoint.until(is_it, what, seconds=SECONDS)
        return frozenset(pod["metadata"]["name"] for pod in pods())

    apply()
    chat_endpoint.until(lambda body: bool(body.get("status", {}).get("url")), "known")
    address = chat_endpoint.address()
    until_streamed(address, chat_endpoint)

    # Each stream on a connection of its own: the Service chooses a pod for each.
    with streams(f"http://{address}", tokens=TOKENS, clients=2, new_connections=True, logit_bias=NO_END) as load:
        load.more(2, seconds=SECONDS)
        # The fp32 model has served during the optimisation; its result takes over.
        body = chat_endpoint.until_optimised(seconds=SECONDS)
        load.more(2, seconds=SECONDS)

        first = until_pods(1, "served by one pod")
        # The pods' own limit changes, so that they are replaced.
        changed = {"rollout": SPEC["rollout"] | {"finishSeconds": 119}}
        apply(**changed)
        second = until_pods(1, "rolled over", other_than=first)
        load.more(2, seconds=SECONDS)

        apply(**changed, replicas=2)
        both = until_pods(2, "served by two pods")
        assert second < both
        load.more(4, seconds=SECONDS)

        apply(**changed, replicas=1)
        until_pods(1, "served by one pod again")
        load.more(2, seconds=SECONDS)

    assert load.failures == []
    assert load.answered >= 12
    model = chat_endpoint.kubectl.get("optimizedmodel", body["status"]["optimizedModel"])
    assert model["status"]["result"]["tokenCapacity"]["tokensPerSecond"] > 0
