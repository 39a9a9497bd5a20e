"""An endpoint scales to zero behind its gateway, and scales up for requests without losing one.

The tests share one endpoint. Each test establishes the state that it needs, which is quick in this order.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator

import pytest

from testbed.kubectl import Kubectl
from tests.endtoend_cluster.installation import WITH_CAPACITY, Endpoint, Installation, Json, remove_endpoints
from tests.endtoend_cluster.load import Answer, constant_load, predict

pytestmark = pytest.mark.slow

NAME = "sleepy"
WINDOW_SECONDS = 10
CROWD = 60
GATEWAY = f"app.kubernetes.io/name=penstock-gateway,penstock.dev/endpoint={NAME}"


@pytest.fixture(scope="module")
def endpoint(installation: Installation, shared_kubectl: Kubectl) -> Iterator[Endpoint]:
    """Serving, with a gateway in front."""
    endpoint = Endpoint(installation, shared_kubectl, NAME)
    endpoint.apply(
        **WITH_CAPACITY,
        scaling={"mode": "Internal", "minReplicas": 0, "maxReplicas": 1, "scaleDownWindowSeconds": WINDOW_SECONDS},
        gateway={"holdSeconds": 90},
    )
    endpoint.until(lambda body: endpoint.condition("Ready", body).get("status") == "True", "Ready")
    endpoint.kubectl("rollout", "status", f"deployment/{NAME}-gateway", "--timeout=300s", timeout_seconds=330)
    yield endpoint
    remove_endpoints(shared_kubectl, NAME)


def until_asleep(endpoint: Endpoint) -> Json:
    def asleep(body: Json) -> bool:
        return endpoint.condition("Ready", body).get("reason") == "ScaledToZero" and not endpoint.pods()

    return endpoint.until(asleep, "asleep", seconds=600)


def crowd(address: str, count: int) -> list[Answer | Exception]:
    """A number of requests at once, each on a separate connection; the outcome of each."""
    found: list[Answer | Exception] = []

    def one() -> None:
        try:
            found.append(predict(address, timeout_seconds=300))
        except (OSError, http.client.HTTPException) as error:
            found.append(error)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def answered(answers: list[Answer | Exception]) -> list[Answer]:
    good = [answer for answer in answers if isinstance(answer, Answer) and answer.status == 200]
    assert [answer for answer in answers if answer not in good] == []
    return good


def test_simultaneous_requests_at_zero_replicas_are_held_and_all_answered(endpoint: Endpoint) -> None:
    body = until_asleep(endpoint)

    assert endpoint.condition("Available", body)["reason"] == "ScaledToZero"
    assert body["status"]["replicas"] == 0
    begin = time.monotonic()
    answers = answered(crowd(endpoint.address(), CROWD))
    print(f"{CROWD} requests at zero were answered {time.monotonic() - begin:.1f} s after they came")

    assert len(answers) == CROWD
    assert len({tuple(answer.vector) for answer in answers}) == 1
    # They arrived before there was a replica, and one was started for them.
    assert all(int(answer.headers["x-held-time"]) > 0 for answer in answers)
    assert len(endpoint.pods()) == 1
    events = endpoint.kubectl("get", "events", f"--field-selector=involvedObject.name={NAME},reason=ScaledUp")
    assert "up from 0" in events


def test_an_endpoint_without_requests_scales_to_zero_and_keeps_its_address(endpoint: Endpoint) -> None:
    before = endpoint.address()
    answered(crowd(before, 1))
    until_asleep(endpoint)

    assert endpoint.address() == before
    assert endpoint.read()["status"]["scaling"]["desired"] == 0


def test_one_of_two_gateways_is_replaced_under_load_and_nothing_is_lost(endpoint: Endpoint) -> None:
    answered(crowd(endpoint.address(), 1))
    before = {pod["metadata"]["name"] for pod in endpoint.kubectl.items("pods", GATEWAY)}
    assert len(before) == 2
    with constant_load(endpoint.address(), per_second=10) as load:
        load.more(15)
        endpoint.kubectl("delete", "pod", min(before), "--wait=true", timeout_seconds=600)
        endpoint.kubectl("rollout", "status", f"deployment/{NAME}-gateway", "--timeout=300s", timeout_seconds=330)
        load.more(15)

    assert load.failures == []


def test_a_killed_replica_fails_only_its_own_requests(endpoint: Endpoint) -> None:
    answered(crowd(endpoint.address(), 1))
    (pod,) = endpoint.pods()
    with constant_load(endpoint.address(), per_second=4) as load:
        load.more(6)
        endpoint.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
        endpoint.until(
            lambda _: any(
                one["metadata"]["name"] != pod["metadata"]["name"]
                and all(status["ready"] for status in one["status"].get("containerStatuses", [{"ready": False}]))
                for one in endpoint.pods()
            ),
            "served by another pod",
            seconds=600,
        )
        load.more(6)

    # At most the requests in progress, and the first one on each kind of connection that found no server.
    assert len(load.failures) <= 3, load.failures
