"""The gateway starts, is replaced, is killed, and loses the API server."""

from __future__ import annotations

import time

import httpx

from tests.gateway.balancer import balancing
from tests.gateway.load import load
from tests.gateway.rig import Crowd, Rig, post


def test_a_gateway_is_not_ready_before_it_has_listed_the_replicas(rig: Rig) -> None:
    rig.api.fail(True)
    gateway = rig.gateway(wait=False)
    gateway.until_logged("listing the replicas failed")
    assert httpx.get(f"{gateway.status}/readyz", trust_env=False, verify=False).status_code == 503
    assert httpx.get(f"{gateway.status}/healthz", trust_env=False, verify=False).status_code == 200
    rig.api.fail(False)
    rig.until_ready(gateway)


def test_without_the_api_server_the_gateway_keeps_its_replicas(rig: Rig) -> None:
    rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    rig.api.fail(True)
    rig.start("b", announce=False)

    assert post(gateway.url).status_code == 200
    rig.announce()
    rig.api.fail(False)
    gateway.until("replicas", 2)


def test_an_expired_watch_is_restarted_with_a_list(rig: Rig) -> None:
    rig.api.expire = 1
    gateway = rig.gateway()
    rig.start("a")
    gateway.until("replicas", 1)

    assert sum("watch" not in query for query in rig.api.queries) == 2
    assert rig.api.queries[0]["labelSelector"] == ["kubernetes.io/service-name=emotion-pods"]


def test_one_of_two_gateways_is_replaced_under_load_and_nothing_is_lost(rig: Rig) -> None:
    rig.start("a")
    first, second = rig.gateway(), rig.gateway()
    for gateway in (first, second):
        gateway.until("replicas", 1)
    with balancing([first.port, second.port]) as balancer, load(balancer.url, clients=6) as running:
        running.more(100)
        # The Service removes it, and the kubelet sends it SIGTERM.
        balancer.backends = [second.port]
        first.terminate()
        assert first.process.wait(120) == 0
        running.more(50)
        third = rig.gateway()
        third.until("replicas", 1)
        balancer.backends = [second.port, third.port]
        second.terminate()
        balancer.backends = [third.port]
        assert second.process.wait(120) == 0
        running.more(50)

    assert not running.failures
    assert third.metric("requests_total") >= 50


def test_requests_held_by_a_draining_gateway_are_answered_when_a_replica_starts(rig: Rig) -> None:
    gateway = rig.gateway(drain_seconds=0)
    crowd = Crowd(gateway.url, 3)
    gateway.until("held_requests", 3)
    gateway.terminate()
    rig.start("a")

    assert [answer.status_code for answer in crowd.finish()] == [200] * 3
    assert gateway.process.wait(120) == 0


def test_new_requests_to_a_gateway_that_is_removed_are_answered(rig: Rig) -> None:
    rig.start("a")
    gateway = rig.gateway(drain_seconds=4)
    gateway.until("replicas", 1)
    # The slices are deleted before the pods of the gateway have ended and before the Service selects other pods.
    rig.api.remove()
    gateway.until_logged("was deleted")
    gateway.terminate()

    assert post(gateway.url).status_code == 200
    assert gateway.process.wait(120) == 0


def test_scrapes_of_its_metrics_do_not_delay_the_end_of_a_gateway(rig: Rig) -> None:
    gateway = rig.gateway(finish_seconds=600)
    with httpx.Client(trust_env=False, verify=False) as reader:
        assert reader.get(f"{gateway.status}/metrics").status_code == 200
        # The connection is kept for the next time, as the operator keeps it.
        gateway.terminate()

        assert gateway.process.wait(120) == 0


def test_a_restarted_gateway_finds_its_replicas(rig: Rig) -> None:
    rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    gateway.kill()
    again = rig.gateway(ports=(gateway.port, gateway.status_port))
    again.until("replicas", 1)

    assert post(again.url).status_code == 200


def test_a_connection_is_closed_at_its_maximum_age(rig: Rig) -> None:
    rig.start("a")
    gateway = rig.gateway(connection_age_seconds=1)
    gateway.until("replicas", 1)
    ends: list[float] = []
    with httpx.Client(trust_env=False, verify=False, timeout=120) as client:
        begin = time.monotonic()
        while len(ends) < 3:
            answer = client.post(f"{gateway.url}/predict", json={"inputs": "x"})
            assert answer.status_code == 200
            if answer.headers.get("connection") == "close":
                ends.append(time.monotonic() - begin)
            assert time.monotonic() - begin < 60

    # From three quarters of the maximum age on; not with every answer.
    assert ends[2] > 3 * 0.7


def test_metrics_are_those_that_the_document_lists(rig: Rig) -> None:
    gateway = rig.gateway()
    text = httpx.get(f"{gateway.status}/metrics", trust_env=False, verify=False).text
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}

    assert names == {
        "penstock_gateway_requests_total",
        "penstock_gateway_in_flight_requests",
        "penstock_gateway_held_requests",
        "penstock_gateway_queued_requests",
        "penstock_gateway_refused_requests_total",
        "penstock_gateway_retries_total",
        "penstock_gateway_replicas",
        "penstock_gateway_canary_requests_total",
    }
    assert (
        "haproxy_frontend_http_requests_total"
        in httpx.get(f"{gateway.status}/metrics/haproxy", trust_env=False, verify=False).text
    )
