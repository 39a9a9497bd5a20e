"""Each request goes to the replica with the fewest requests, and is retried on another one if it fails."""

from __future__ import annotations

import http.client
import json
import socket
import time

import httpx

from tests.gateway.load import load
from tests.gateway.rig import Crowd, Rig, post, sent


def test_requests_go_to_the_replica_that_has_the_fewest(rig: Rig) -> None:
    replicas = [rig.start(name, seconds=600) for name in ("a", "b")]
    gateway = rig.gateway()
    gateway.until("replicas", 2)
    Crowd(gateway.url, 12)
    gateway.until("in_flight_requests", 12)

    # With a random choice, one of them would get eight or more every third time.
    for replica in replicas:
        until_busy(replica.port, 6)


def test_a_slow_replica_gets_fewer_requests(rig: Rig) -> None:
    slow, fast = rig.start("slow", seconds=2.0), rig.start("fast", seconds=0.02)
    gateway = rig.gateway()
    gateway.until("replicas", 2)
    with load(gateway.url, clients=4) as running:
        running.more(80)
    counts = [served(replica.port) for replica in (slow, fast)]

    assert not running.failures
    assert counts[1] > 4 * counts[0]


def test_requests_of_a_persistent_connection_reach_a_new_replica(rig: Rig) -> None:
    rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    with httpx.Client(trust_env=False, verify=False, timeout=120) as client:
        url = f"{gateway.url}/predict"
        assert client.post(url, json={"inputs": "x"}).status_code == 200
        later = rig.start("b")
        gateway.until("replicas", 2)
        for _ in range(10):
            assert client.post(url, json={"inputs": "x"}).status_code == 200

    assert served(later.port) >= 4


def test_requests_of_a_replica_that_is_killed_are_answered_by_another(rig: Rig) -> None:
    doomed = rig.start("a", seconds=600)
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    crowd = Crowd(gateway.url, 8)
    until_busy(doomed.port, 8)
    rig.start("b")
    gateway.until("replicas", 2)
    doomed.kill()
    answers = crowd.finish()

    assert [answer.status_code for answer in answers] == [200] * 8
    assert gateway.metric("retries_total") >= 8


def test_a_request_too_long_to_be_sent_again_is_the_only_one_that_fails_and_has_the_reason(rig: Rig) -> None:
    doomed = rig.start("a", seconds=600)
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    crowd = Crowd(gateway.url, 1, body=json.dumps({"inputs": "x" * 300_000}).encode())
    until_busy(doomed.port)
    rig.start("b")
    gateway.until("replicas", 2)
    doomed.kill()
    (answer,) = crowd.finish()

    assert answer.status_code == 502
    assert answer.json() == {
        "error": "a replica broke off its answer",
        "error_type": "bad_gateway",
        "remedy": "Try again",
    }
    assert post(gateway.url).status_code == 200


def test_no_request_is_lost_when_replicas_start_and_drain(rig: Rig) -> None:
    rig.start("a", drain_delay_seconds=1)
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    with load(gateway.url, clients=6) as running:
        for old, new in (("a", "b"), ("b", "c")):
            running.more(50)
            rig.start(new, drain_delay_seconds=1)
            running.more(50)
            # As in a cluster: the pod gets the signal at the same moment as all watches.
            rig.announce(ending=(old,))
            rig.replicas[old].terminate()
            rig.replicas.pop(old).wait()
            rig.announce()
        running.more(50)

    assert not running.failures
    gateway.until("replicas", 1)


def test_no_request_is_lost_when_one_of_two_replicas_is_killed(rig: Rig) -> None:
    doomed, _ = rig.start("a"), rig.start("b")
    gateway = rig.gateway()
    gateway.until("replicas", 2)
    with load(gateway.url, clients=6) as running:
        running.more(50)
        doomed.kill()
        # The gateway has no event yet: its connections fail.
        running.more(200)
        rig.announce(without=("a",))
        gateway.until("replicas", 1)
        running.more(50)

    assert not running.failures


def test_when_the_last_replica_is_killed_requests_wait_for_the_next(rig: Rig) -> None:
    doomed = rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    doomed.kill()
    rig.announce(without=("a",))
    gateway.until("replicas", 0)
    crowd = Crowd(gateway.url, 3)
    gateway.until("held_requests", 3)
    del rig.replicas["a"]
    rig.start("b")

    assert [answer.status_code for answer in crowd.finish()] == [200] * 3


def test_requests_wait_while_the_only_replica_restarts(rig: Rig) -> None:
    """A killed container restarts at the same address; the gateway gets no event of either."""
    doomed = rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    assert post(gateway.url).status_code == 200
    doomed.kill()
    # The first request may meet the ended replica and fail; the later ones wait.
    first = post(gateway.url)
    assert first.status_code in {200, 503}
    crowd = Crowd(gateway.url, 5)
    gateway.until("held_requests", 5)
    del rig.replicas["a"]
    rig.start("a", announce=False, port=doomed.port)

    assert [answer.status_code for answer in crowd.finish()] == [200] * 5


def test_requests_beyond_the_replicas_capacity_are_queued_up_to_the_bound(rig: Rig) -> None:
    busy = rig.start("a", seconds=600)
    gateway = rig.gateway(concurrency=2, max_held=3)
    gateway.until("replicas", 1)
    crowd = Crowd(gateway.url, 5)
    gateway.until("queued_requests", 3)
    refused = post(gateway.url)

    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "2"
    assert refused.json()["error_type"] == "overloaded"
    assert gateway.metric('refused_requests_total{reason="queue"}') == 1
    rig.start("b")
    gateway.until("in_flight_requests", 2)
    busy.kill()
    assert [answer.status_code for answer in crowd.finish()] == [200] * 5


def test_a_request_whose_client_has_disconnected_is_not_computed(rig: Rig) -> None:
    replica = rig.start("a", seconds=600)
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    with sent(gateway):
        until_busy(replica.port)
    deadline = time.monotonic() + 60
    while cancelled(replica.port) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_errors_of_a_replica_come_through_as_they_are(rig: Rig) -> None:
    rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    answer = post(gateway.url, b"no JSON")

    assert answer.status_code == 400
    assert answer.json()["error_type"] == "malformed"
    too_long = post(gateway.url, json.dumps({"inputs": "x" * 3_000_000}).encode())
    assert too_long.status_code == 413
    assert too_long.json()["error_type"] == "too_large"


def test_haproxy_refuses_invalid_http_before_any_replica(rig: Rig) -> None:
    """Before there is a request, HAProxy knows only the pages that it was built with."""
    replica = rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        with http.client.HTTPResponse(connection) as answer:
            answer.begin()
            found = (answer.status, answer.headers.get_content_type(), answer.getheader("connection"))

    assert found == (400, "text/html", "close")
    assert served(replica.port) == 0


def sample(port: int, name: str) -> float:
    """A sum over the series of that beginning, from a replica's /metrics."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, verify=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def served(port: int) -> float:
    """Requests to the model that a replica has answered."""
    return sample(port, "penstock_request_seconds_count")


def cancelled(port: int) -> float:
    """Requests whose clients disconnected."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, verify=False).text
    lines = [line for line in text.splitlines() if line.startswith("penstock_requests_total") and 'code="499"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def until_busy(port: int, count: int = 1) -> None:
    """Wait until a replica has this number of requests in progress (the scrape itself is one of them)."""
    deadline = time.monotonic() + 60
    while sample(port, "penstock_in_flight_requests") != count + 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
