"""Requests wait at the gateway while no replica is ready, and are released at once when there is one."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock_gateway.config import PUBLIC
from tests.gateway.rig import Crowd, Rig, post, sent

OVER_A_BUFFER = 200_000
"""Bytes: more than HAProxy keeps of a request."""


def test_a_request_is_held_until_a_replica_is_there_and_answered_then(rig: Rig) -> None:
    gateway = rig.gateway()
    crowd = Crowd(gateway.url, 5)
    gateway.until("held_requests", 5)
    rig.start("a")
    answers = crowd.finish()

    assert [answer.status_code for answer in answers] == [200] * 5
    assert all(int(answer.headers["x-held-time"]) > 0 for answer in answers)
    gateway.until("held_requests", 0)


def test_held_requests_are_released_within_a_tenth_of_a_second_of_a_known_replica(rig: Rig) -> None:
    gateway = rig.gateway()
    rig.start("a", announce=False)
    seconds: list[float] = []
    # The best of several: even a busy machine has quiet moments, but a gateway that polls seldom is always slow.
    while min(seconds, default=1.0) > 0.1 and len(seconds) < 30:
        rig.announce(without=("a",))
        gateway.until("replicas", 0)
        crowd = Crowd(gateway.url, 1)
        gateway.until("held_requests", 1)
        begin = time.monotonic()
        rig.announce()
        (answer,) = crowd.finish()
        seconds.append(time.monotonic() - begin)
        assert answer.status_code == 200

    # Some 0.06 s on a quiet machine: the watch, three commands, at most 25 ms until the waiter looks, the answer. One
    # that is three times slower, and never quiet, has twice as much as it would take.
    assert min(seconds) < 0.4


def test_a_request_that_is_not_held_has_no_hold_header(rig: Rig) -> None:
    rig.start("a")
    gateway = rig.gateway()
    gateway.until("replicas", 1)

    assert "x-held-time" not in post(gateway.url).headers


@pytest.mark.parametrize("characters", [1, 1_000, 60_000, OVER_A_BUFFER, 1_900_000])
def test_held_requests_of_all_body_sizes_arrive_complete(rig: Rig, characters: int) -> None:
    gateway = rig.gateway()
    crowd = Crowd(gateway.url, 2, body=json.dumps({"inputs": "x" * characters}).encode())
    gateway.until("held_requests", 2)
    rig.start("a")

    assert [characters, characters] == [answer.json()[0][0] for answer in crowd.finish()]


def test_a_held_chunked_body_arrives_complete(rig: Rig) -> None:
    gateway = rig.gateway()
    text = b'{"inputs": "%b"}' % (b"x" * OVER_A_BUFFER)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as client:
        client.sendall(
            b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for begin in range(0, len(text), 7_000):
            if begin == 70_000:
                # The gateway's buffer is full.
                gateway.until("held_requests", 1)
                rig.start("a")
            piece = text[begin : begin + 7_000]
            client.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.sendall(b"0\r\n\r\n")
        answer = b""
        while b"]" not in answer:
            answer += client.recv(65536)

    assert answer.startswith(b"HTTP/1.1 200")
    assert str(float(OVER_A_BUFFER)).encode() in answer


def test_a_client_that_waits_for_100_continue_gets_its_answer(rig: Rig) -> None:
    gateway = rig.gateway()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=120) as client:
        client.sendall(
            b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
            b"content-length: 24\r\n\r\n"
        )
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 100")
        client.sendall(b'{"inputs": "i like you"}')
        gateway.until("held_requests", 1)
        rig.start("a")
        while b"]" not in answer:
            answer += client.recv(65536)

    assert b"HTTP/1.1 200" in answer


def test_hundreds_are_held_at_once_and_all_are_answered(rig: Rig) -> None:
    gateway = rig.gateway(max_held=400, concurrency=8)
    crowd = Crowd(gateway.url, 300)
    gateway.until("held_requests", 300)
    rig.start("a")
    answers = crowd.finish()

    assert [answer.status_code for answer in answers] == [200] * 300
    # The replica had at most eight requests at a time; the others waited in the gateway.
    assert max(answer.json()[0][1] for answer in answers) <= 8


def test_requests_beyond_the_bound_are_refused_with_retry_after(rig: Rig) -> None:
    gateway = rig.gateway(max_held=3)
    crowd = Crowd(gateway.url, 3)
    gateway.until("held_requests", 3)
    refused = post(gateway.url)

    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "2"
    assert refused.headers["content-type"] == "application/json"
    assert refused.json() == {
        "error": "3 requests wait for the first replica of emotion already",
        "error_type": "overloaded",
        "remedy": "Try again in 2 s",
    }
    assert gateway.metric('refused_requests_total{reason="full"}') == 1
    rig.start("a")
    assert [answer.status_code for answer in crowd.finish()] == [200] * 3


def test_a_request_is_held_for_a_limited_time(rig: Rig) -> None:
    gateway = rig.gateway(hold_seconds=1)
    begin = time.monotonic()
    answer = post(gateway.url)

    assert 0.9 < time.monotonic() - begin < 30
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.json() == {
        "error": "no replica of emotion came up within 1 s",
        "error_type": "not_ready",
        "remedy": "Ask for the reason with: kubectl describe modelendpoint emotion",
    }
    assert gateway.metric('refused_requests_total{reason="late"}') == 1


@pytest.mark.parametrize("characters", [10, 1_000])
def test_a_held_client_that_disconnects_frees_its_place(rig: Rig, characters: int) -> None:
    gateway = rig.gateway(max_held=1)
    body = json.dumps({"inputs": "x" * characters}).encode()
    with sent(gateway, body):
        gateway.until("held_requests", 1)
    # A waiting request that no longer polls is removed after a second.
    gateway.until("held_requests", 0)
    crowd = Crowd(gateway.url, 1)
    gateway.until("held_requests", 1)
    rig.start("a")

    assert [answer.status_code for answer in crowd.finish()] == [200]
    # The request of the disconnected client was not computed.
    assert gateway.metric("requests_total") == 2


def test_a_poll_for_demand_is_answered_as_soon_as_there_is_any(rig: Rig) -> None:
    gateway = rig.gateway()
    with httpx.Client(trust_env=False, verify=False, timeout=120) as client:
        assert client.get(f"{gateway.status}/demand?seconds=0").text == "0\n"
        crowd = Crowd(gateway.url, 1)
        # A client would not wait that long.
        assert client.get(f"{gateway.status}/demand?seconds=60").text == "1\n"
    rig.start("a")
    crowd.finish()


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready"])
def test_probes_are_answered_at_once_and_start_nothing(rig: Rig, path: str) -> None:
    gateway = rig.gateway()
    answer = httpx.get(f"{gateway.url}{path}", trust_env=False, verify=False)

    assert answer.status_code == 503
    assert answer.json()["error"] == "no replica runs"
    assert gateway.metric("held_requests") == 0
    assert gateway.metric("requests_total") == 0


class TestKeys:
    """An endpoint with keys: a request without one is not held, so that it starts no replica."""

    def ask(self, url: str, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
            return client.post(f"{url}/predict", json={"inputs": "x"}, headers=headers)

    def test_a_request_without_a_key_is_refused_and_reported_to_no_autoscaler(self, rig: Rig, tmp_path: Path) -> None:
        (tmp_path / "alice").write_text("right\n")
        gateway = rig.gateway(keys_folder=tmp_path)
        answers = [self.ask(gateway.url, key) for key in ("", "wrong", "Right")]

        assert [answer.status_code for answer in answers] == [401] * 3
        assert answers[0].headers["www-authenticate"] == "Bearer"
        assert answers[0].json()["error_type"] == "unauthorized"
        assert gateway.metric("held_requests") == 0
        assert gateway.metric("requests_total") == 0
        assert gateway.metric('refused_requests_total{reason="unauthorized"}') == 3
        demand = httpx.get(f"{gateway.status}/demand?seconds=0", trust_env=False, verify=False)
        assert demand.text == "0\n"

    def test_a_request_with_a_key_is_held_until_a_replica_is_there(self, rig: Rig, tmp_path: Path) -> None:
        (tmp_path / "alice").write_text("right")
        gateway = rig.gateway(keys_folder=tmp_path)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(self.ask, gateway.url, "right")
            gateway.until("held_requests", 1)
            rig.start("a")

            assert asked.result(60).status_code == 200

    def test_changed_keys_apply_without_a_restart(self, rig: Rig, tmp_path: Path) -> None:
        (tmp_path / "alice").write_text("old")
        gateway = rig.gateway(keys_folder=tmp_path, hold_seconds=1)
        before = self.ask(gateway.url, "old").status_code
        (tmp_path / "alice").unlink()
        (tmp_path / "bob").write_text("new")
        gateway.until_logged("1 keys are accepted", times=2)

        assert before == 503  # held until the end of its time
        assert [self.ask(gateway.url, key).status_code for key in ("old", "new")] == [401, 503]

    def test_with_a_replica_too_a_request_without_a_key_is_refused_here_and_is_no_load(
        self, rig: Rig, tmp_path: Path
    ) -> None:
        (tmp_path / "alice").write_text("right")
        gateway = rig.gateway(keys_folder=tmp_path)
        replica = rig.start("a")
        gateway.until("replicas", 1)
        refused = [self.ask(gateway.url, key) for key in ("", "wrong")]
        open_before = [
            httpx.request(verb, f"{gateway.url}{path}", trust_env=False, verify=False)
            for verb, path in (
                ("OPTIONS", "/predict"),
                *(("GET", path) for path in (*PUBLIC, "/v2/models/emotion/ready")),
            )
        ]
        answered = self.ask(gateway.url, "right")

        assert [one.status_code for one in refused] == [401, 401]
        # Some are for the internal port only: 404.
        assert {one.status_code for one in open_before} <= {200, 204, 404}
        assert answered.status_code == 200
        assert replica.answered() == 1
        assert gateway.metric("requests_total") == 1
        assert gateway.metric('refused_requests_total{reason="unauthorized"}') == 2

    @pytest.mark.parametrize(
        ("path", "headers", "status"),
        [
            ("/v1/messages", {"x-api-key": "right"}, 503),  # held until the end of its time
            ("/v1/messages/count_tokens", {"x-api-key": "right"}, 503),
            ("/v1/messages?beta=true", {"x-api-key": "right"}, 503),
            ("/v1/messages", {"x-api-key": "wrong"}, 401),
            ("/v1/messages", {"x-api-key": ""}, 401),
            ("/v1/messages", {"x-api-key": "right", "authorization": "Bearer wrong"}, 401),
            ("/v1/messages", {"x-api-key": "wrong", "authorization": "Bearer right"}, 503),
            ("/v1/messages_", {"x-api-key": "right"}, 401),
            ("/beta/litellm_basic_guardrail_api", {"x-api-key": "right"}, 503),
            ("/beta/litellm_basic_guardrail_api", {"x-api-key": "wrong"}, 401),
            ("/request", {"x-api-key": "right"}, 503),
            ("/predict", {"x-api-key": "right"}, 401),
        ],
    )
    def test_anthropics_clients_have_their_key_in_another_header(
        self, rig: Rig, tmp_path: Path, path: str, headers: dict[str, str], status: int
    ) -> None:
        (tmp_path / "alice").write_text("right")
        gateway = rig.gateway(keys_folder=tmp_path, hold_seconds=1)
        with httpx.Client(trust_env=False, verify=False, timeout=60) as client:
            assert client.post(f"{gateway.url}{path}", json={}, headers=headers).status_code == status

    @pytest.mark.parametrize("request_line", [("GET", "/docs"), ("OPTIONS", "/predict"), ("GET", "/health")])
    def test_what_needs_no_key_starts_no_replica_where_others_need_one(
        self, rig: Rig, tmp_path: Path, request_line: tuple[str, str]
    ) -> None:
        gateway = rig.gateway(keys_folder=tmp_path)
        answer = httpx.request(
            request_line[0], f"{gateway.url}{request_line[1]}", trust_env=False, verify=False, timeout=30
        )

        assert (answer.status_code, answer.json()["error"]) == (503, "no replica runs")
        assert gateway.metric("requests_total") == 0

    def test_a_thousand_keys_are_accepted(self, rig: Rig, tmp_path: Path) -> None:
        (tmp_path / "all").write_text("\n".join(f"key-{number}" for number in range(1000)))
        gateway = rig.gateway(keys_folder=tmp_path, hold_seconds=1)

        assert [self.ask(gateway.url, f"key-{at}").status_code for at in (0, 399, 400, 999, 1000)] == [503] * 4 + [401]

    def test_without_any_key_all_are_refused(self, rig: Rig, tmp_path: Path) -> None:
        gateway = rig.gateway(keys_folder=tmp_path / "missing")

        assert self.ask(gateway.url, "none").status_code == 401
