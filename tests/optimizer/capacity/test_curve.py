"""Measuring a replica, with real servers that are slow, broken or both."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock_optimizer.capacity import curve as capacity
from penstock_optimizer.capacity.curve import (
    CapacityFailed,
    CapacityMeasurement,
    ReplicaBroken,
    ReplicaServer,
    measure_capacity,
)
from penstock_optimizer.load.client import RequestBody
from tests.optimizer.load.known_server import Answer, ok, serving

FAILS = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\noops"


@pytest.fixture(autouse=True)
def _short_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "SATURATION_SECONDS": 0.3,
        "LONGEST_SECONDS": 0.8,
        "LEAST_SECONDS": 0.3,
        "MOST_SECONDS": 0.3,
        "WARM_UP_SECONDS": 0.1,
    }.items():
        monkeypatch.setattr(capacity, name, seconds)
    monkeypatch.setattr(capacity, "VOTES", 1)


def measured(answer: Answer, *, seconds_left: float = 600.0) -> CapacityMeasurement:
    """Measure a server with these answers. It cannot meet the objective, so the curve is short."""
    with serving(answer) as url:
        return measure_capacity(
            ReplicaServer(url, os.getpid()),
            [RequestBody(body='{"inputs":"x"}')],
            p95_objective=1.0,
            load_cpus=(),
            seconds_left=lambda: seconds_left,
        )


def test_a_server_slower_than_the_first_request_limit_is_not_broken() -> None:
    found = measured(lambda number, _: (0.9 if number <= capacity.CLIENTS else 0.1, ok()))

    assert found.saturation_per_second > 0
    assert found.curve.points


def test_a_server_slower_than_the_later_request_limit_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "REQUEST_SECONDS", 0.4)

    found = measured(lambda number, _: (0.7 if number <= 3 * capacity.CLIENTS else 0.1, ok()))

    assert found.saturation_per_second > 0


def test_a_server_whose_every_answer_is_an_error_is_broken() -> None:
    with pytest.raises(ReplicaBroken, match=r"no request was answered: \{'500': \d+\}, first: 500 oops"):
        measured(lambda *_: (0.01, FAILS))


def test_a_server_without_a_clear_fault_is_only_not_measured() -> None:
    with pytest.raises(CapacityFailed, match="none of 32 clients had an answer within 1 s") as failed:
        measured(lambda *_: (1.5, ok()))
    assert not isinstance(failed.value, ReplicaBroken)


def test_longer_tries_keep_to_the_budget() -> None:
    with pytest.raises(CapacityFailed, match="the time budget was spent") as failed:
        measured(lambda *_: (1.5, ok()), seconds_left=0.3 + 0.1 + capacity.OVERHEAD_SECONDS + 0.1)
    assert not isinstance(failed.value, ReplicaBroken)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (b"# HELP penstock_tokens_total x\npenstock_tokens_total 640.0\npenstock_request_seconds_count 20.0\n", 32.0),
        (b"penstock_tokens_total 0.0\npenstock_request_seconds_count 20.0\n", None),
        (b"penstock_tokens_total 640.0\npenstock_request_seconds_count 0.0\n", None),
        (b"penstock_request_seconds_count 20.0\n", None),
        (b"\xff\xfe", None),
    ],
)
def test_the_length_of_the_requests_is_the_servers_count(metrics: bytes, expected: float | None) -> None:
    with answering(200, metrics) as url:
        assert capacity.tokens_per_request(url) == expected


def test_a_server_without_metrics_has_no_length_of_its_requests() -> None:
    with answering(404, b"not here") as url:
        assert capacity.tokens_per_request(url) is None
    assert capacity.tokens_per_request(url) is None, "it has ended"


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server with this answer on every path; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
