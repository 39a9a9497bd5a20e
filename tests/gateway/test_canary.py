"""A canary behind a real gateway: its pods get their share of the requests, and no request is lost when they fail."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.gateway.load import load
from tests.gateway.rig import Gateway, Replica, Rig

CANARY = "emotion-canary"
REQUESTS = 600


@pytest.fixture
def gateway(rig: Rig) -> Gateway:
    """A gateway that knows the name of the canary, with two replicas and one pod of the canary, without a share yet."""
    for name in ("emotion-7d9f-a", "emotion-7d9f-b", f"{CANARY}-5c8b-x"):
        rig.start(name, announce=False)
    rig.announce()
    gateway = rig.gateway(canary=CANARY)
    gateway.until("replicas", 2)
    return gateway


def canary_of(rig: Rig) -> Replica:
    return rig.replicas[f"{CANARY}-5c8b-x"]


def send(gateway: Gateway, count: int = REQUESTS) -> None:
    with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
        for _ in range(count):
            assert client.post(f"{gateway.url}/predict", json={"inputs": "i like you"}).status_code == 200


def test_a_canary_without_a_share_gets_no_request(rig: Rig, gateway: Gateway) -> None:
    send(gateway, 50)

    assert canary_of(rig).answered() == 0


def test_a_canary_gets_its_share_and_nothing_after_it_ends(rig: Rig, gateway: Gateway) -> None:
    rig.announce(canary_percent=20)
    gateway.until_logged("the canary gets 20 % of the requests")
    send(gateway)

    share = canary_of(rig).answered()
    assert gateway.metric("canary_requests_total") == share
    # A fifth of 600 is 120, with a standard deviation of 10.
    assert 60 <= share <= 180
    print({n: r.answered() for n, r in rig.replicas.items()})
    assert gateway.metric("canary_requests_total") == share
    assert sum(one.answered() for one in rig.replicas.values()) == REQUESTS
    rig.announce()
    gateway.until_logged("the canary gets 0 % of the requests")
    send(gateway, 50)
    assert canary_of(rig).answered() == share


def test_no_request_is_lost_when_the_canary_is_killed(rig: Rig, gateway: Gateway) -> None:
    rig.announce(canary_percent=50)
    gateway.until_logged("the canary gets 50 % of the requests")
    with load(gateway.url, clients=8) as requests:
        requests.more(200)
        assert canary_of(rig).answered() > 0
        canary_of(rig).kill()
        requests.more(400)

    assert requests.failures == []


def test_no_request_is_lost_when_the_canary_ends(rig: Rig, gateway: Gateway) -> None:
    rig.announce(canary_percent=50)
    gateway.until_logged("the canary gets 50 % of the requests")
    with load(gateway.url, clients=8) as requests:
        requests.more(200)
        rig.announce(ending=(f"{CANARY}-5c8b-x",))
        gateway.until_logged("the canary gets 0 % of the requests")
        canary_of(rig).terminate()
        requests.more(400)

    assert requests.failures == []
    canary_of(rig).wait()


def test_a_canary_with_all_its_places_taken_leaves_requests_to_the_others(rig: Rig) -> None:
    rig.start("emotion-7d9f-a", announce=False)
    rig.start(f"{CANARY}-5c8b-x", announce=False, seconds=5)
    rig.announce(canary_percent=50)
    gateway = rig.gateway(canary=CANARY, concurrency=2)
    gateway.until_logged("the canary gets 50 % of the requests")

    with load(gateway.url, clients=4, pause_seconds=0.001) as requests:
        begin = time.monotonic()
        # Two at a time take five seconds each in the canary: with a queue there, most would wait for these.
        requests.more(300)
        assert canary_of(rig).answered() <= 2 * (1 + (time.monotonic() - begin) / 5)

    assert requests.failures == []


def test_a_gateway_that_knows_no_canary_treats_its_pods_like_the_others(rig: Rig) -> None:
    for name in ("emotion-7d9f-a", f"{CANARY}-5c8b-x"):
        rig.start(name, announce=False)
    rig.announce(canary_percent=20)
    gateway = rig.gateway()

    gateway.until("replicas", 2)
    assert gateway.metric("canary_requests_total") == 0
