"""Text generation on a cluster: streams through the Service outlast rollouts and changes of the number of replicas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.endtoend_cluster.chat import NO_END, SECONDS, SPEC, TOKENS, until_streamed
from tests.endtoend_cluster.installation import Endpoint, Json, is_ready
from tests.gateway.streams import streams

pytestmark = pytest.mark.slow


def test_streams_outlast_rollouts_and_changes_of_the_number_of_replicas(
    chat_model: str, endpoint: Callable[[str], Endpoint]
) -> None:
    chat_endpoint = endpoint("chat")

    def apply(**changes: object) -> None:
        chat_endpoint.apply(**SPEC | changes, model=chat_model)

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
