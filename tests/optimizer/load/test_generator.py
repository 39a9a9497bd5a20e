"""The load generator, in a separate process, with a real HTTP server of known behaviour."""

from __future__ import annotations

import socket

import pytest

from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.generator import ClosedLoop, LoadFailed, LoadResult, LoadSpec, OpenLoop, run_load
from tests.optimizer.load.known_server import ok, serving

DELAY = 0.02


def load(url: str, pattern: OpenLoop | ClosedLoop, **changes: object) -> LoadResult:
    values: dict[str, object] = {
        "url": url,
        "bodies": (RequestBody(body='{"inputs":"x"}', group=8), RequestBody(body='{"inputs":"y y"}', group=16)),
        "pattern": pattern,
        "warm_up_seconds": 0.2,
        "seconds": 1.0,
        "timeout_seconds": 30.0,
    }
    return run_load(LoadSpec.model_validate({**values, **changes}))


def test_an_open_loop_sends_at_its_rate_and_measures_latency() -> None:
    with serving(lambda *_: (DELAY, ok())) as url:
        result = load(url, OpenLoop(arrivals_per_second=100))

    assert result.scheduled == pytest.approx(100, rel=0.25)
    assert set(result.statuses) == {"200"}
    assert result.latency is not None
    # A busy machine can only add to both: no upper limit separates load from an error, but for the time limit.
    assert DELAY * 1e3 <= result.latency.p50 < 30_000
    assert 0 < result.send_lag_p99_milliseconds < 30_000


def test_an_open_loop_counts_the_latency_of_every_request_due_during_a_stall() -> None:
    """Coordinated omission: during half a second of stall one closed client sends nothing and sees one slow answer.
    An open loop's requests keep coming, and their latency counts from when they were due."""

    def stall(_number: int, since: float) -> tuple[float, bytes]:
        return max(0.001, 0.9 - since) if 0.4 < since < 0.9 else 0.001, ok()

    with serving(stall) as url:
        open_loop = load(url, OpenLoop(arrivals_per_second=100), max_connections=1)
    with serving(stall) as url:
        closed_loop = load(url, ClosedLoop(clients=1))

    assert open_loop.latency is not None
    assert closed_loop.latency is not None
    assert open_loop.latency.p90 > 250
    assert closed_loop.latency.p90 < 200


def test_closed_clients_wait_for_their_answers() -> None:
    with serving(lambda *_: (0.2, ok())) as url:
        result = load(url, ClosedLoop(clients=8), seconds=2.0)

    # More than one client could have sent; eight can send no more, but for what was in progress at the beginning.
    assert 1 / 0.2 < result.completed_per_second <= 8 / 0.2 + 8 / 2.0


def test_refusals_count_by_status_and_not_as_latency() -> None:
    refusal = b'HTTP/1.1 429 Too Many Requests\r\ncontent-length: 21\r\n\r\n{"error":"overloaded"}'[:-1]

    def alternate(number: int, _since: float) -> tuple[float, bytes]:
        return (0.0, refusal) if number % 2 else (DELAY, ok())

    with serving(alternate) as url:
        result = load(url, OpenLoop(arrivals_per_second=80))

    assert set(result.statuses) == {"200", "429"}
    assert result.refused_share == pytest.approx(0.5, abs=0.15)
    assert result.latency is not None
    assert result.latency.minimum >= DELAY * 1e3 * 0.9
    assert result.first_failure.startswith('429 {"error":"overload')


def test_a_connection_that_closes_without_an_answer_is_a_lost_request() -> None:
    with serving(lambda number, _: (0.0, b"" if number % 5 == 0 else ok())) as url:
        result = load(url, OpenLoop(arrivals_per_second=100))

    assert set(result.statuses) == {"200", "disconnected"}
    assert 0.05 < result.refused_share < 0.4


def test_an_answer_that_is_not_http_is_a_lost_request() -> None:
    with serving(lambda *_: (0.0, b"SSH-2.0-nothing\r\n\r\n")) as url:
        result = load(url, OpenLoop(arrivals_per_second=20))

    assert set(result.statuses) == {"disconnected"}


def test_an_answer_that_never_comes_times_out() -> None:
    with serving(lambda *_: (30.0, ok())) as url:
        result = load(url, OpenLoop(arrivals_per_second=20), timeout_seconds=0.3)

    assert set(result.statuses) == {"timeout"}
    assert result.latency is None


@pytest.mark.parametrize("pattern", [OpenLoop(arrivals_per_second=20), ClosedLoop(clients=2)])
def test_a_server_that_does_not_listen_is_counted_as_unreachable(pattern: OpenLoop | ClosedLoop) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = load(f"http://127.0.0.1:{port}/", pattern)

    assert set(result.statuses) == {"unreachable"}
    assert result.refused_share == 1.0


def test_a_server_that_closes_after_each_answer_is_served_with_new_connections() -> None:
    with serving(lambda *_: (0.0, ok(b"connection: close\r\n"))) as url:
        result = load(url, ClosedLoop(clients=2))

    assert set(result.statuses) == {"200"}
    assert sum(result.statuses.values()) > 4


def test_the_memory_of_a_process_is_reported() -> None:
    import os

    with serving(lambda *_: (0.001, ok())) as url:
        result = load(url, OpenLoop(arrivals_per_second=100), target_pid=os.getpid())

    assert result.target_rss_bytes is not None
    assert result.target_rss_bytes > 1e6


def test_the_load_process_runs_on_the_cpus_of_its_spec() -> None:
    import os

    cpu = max(os.sched_getaffinity(0))
    with serving(lambda *_: (0.0, ok())) as url:
        result = load(url, ClosedLoop(clients=1), cpus=(cpu,))

    assert set(result.statuses) == {"200"}


def test_a_cpu_that_does_not_exist_is_an_error_with_the_end_of_the_log() -> None:
    with pytest.raises(LoadFailed, match="Invalid argument"):
        load("http://127.0.0.1:9/", ClosedLoop(clients=1), cpus=(4095,))


def test_only_plain_http_is_measured() -> None:
    with pytest.raises(ValueError, match="pattern"):
        load("https://example.org/", ClosedLoop(clients=1))
