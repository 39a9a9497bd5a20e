"""Cells sent to real sockets: what is counted, when a cell ends, how failures are reported."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import pairwise

import pytest

from penstock_bench.cell import MOST_FAILURES, CellResult, CellSpec, Client, MeasurementFailed, send_cell
from penstock_bench.server import free_port
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.generator import time_slice_nanoseconds
from tests.bench.conftest import StartStub

BODIES = (RequestBody(body='{"inputs":"a"}', group=8), RequestBody(body='{"inputs":"b"}', group=16))


def spec(url: str, **values: object) -> CellSpec:
    return CellSpec.model_validate(
        {"url": f"{url}/predict", "bodies": BODIES, "seconds": 0.3, "warm_up_seconds": 0.05, **values}
    )


def send(one: CellSpec) -> CellResult:
    return asyncio.run(send_cell(one))


def test_one_client_measures_the_servers_time(start_stub: StartStub) -> None:
    server = start_stub(delay_ms=10)

    result = send(spec(server.url, response_headers=("x-inference-time", "x-absent")))

    count, busy = len(result.latencies_milliseconds), sum(result.latencies_milliseconds) / 1e3
    assert min(result.latencies_milliseconds) >= 10
    assert result.completed_per_second == pytest.approx(count / result.seconds)
    # The rest is the client's own time between an answer and the next request.
    assert result.seconds >= 0.99 * busy
    assert result.failed == 0
    assert set(result.groups) == {8, 16}
    assert result.header_means == {"x-inference-time": 1.5}


def test_many_clients_are_answered_concurrently(start_stub: StartStub) -> None:
    server = start_stub(delay_ms=300)

    result = send(spec(server.url, clients=20, seconds=1.2))

    # One client would get three answers a second, twenty get 66.
    assert result.completed_per_second > 10


def test_a_slow_server_is_asked_as_often_as_needed_whatever_the_seconds(start_stub: StartStub) -> None:
    server = start_stub(delay_ms=120)

    result = send(spec(server.url, seconds=0.05, minimum_requests=3, warm_up_requests=0, warm_up_seconds=0))

    assert len(result.latencies_milliseconds) == 3


def test_a_cell_ends_at_its_longest_time(start_stub: StartStub) -> None:
    server = start_stub(delay_ms=60)

    result = send(spec(server.url, seconds=0.1, minimum_requests=1000, maximum_seconds=0.3))

    # A thousand requests would take a minute.
    assert 0.3 <= result.seconds < 20
    assert len(result.latencies_milliseconds) < 10


def test_an_even_rate_is_kept_whatever_the_answers(start_stub: StartStub) -> None:
    server = start_stub(delay_ms=100)

    result = send(spec(server.url, per_second=50, seconds=0.6, minimum_requests=1))

    # One every 20 ms. Each takes 0.1 s: one connection could carry seven.
    assert len(result.latencies_milliseconds) == pytest.approx(31, abs=4)
    assert min(result.latencies_milliseconds) >= 100
    due = [
        ended - milliseconds / 1e3
        for ended, milliseconds in zip(result.ended_seconds, result.latencies_milliseconds, strict=True)
    ]
    assert [later - earlier for earlier, later in pairwise(due)] == pytest.approx([0.02] * (len(due) - 1), abs=1e-6)


def test_failures_are_counted_by_status_and_end_a_cell_without_answers(start_stub: StartStub) -> None:
    server = start_stub(status=422)

    # All within the warm-up, however busy the machine: it never ends.
    result = send(spec(server.url, seconds=30, maximum_seconds=60, warm_up_seconds=60))

    assert result.latencies_milliseconds == ()
    assert result.failed == MOST_FAILURES
    assert set(result.failures) == {"422"}
    assert result.first_failure.startswith('422 {"bytes"')


def test_requests_over_the_time_limit_count_as_timeouts(start_stub: StartStub) -> None:
    server = start_stub(delay_ms=2000)

    result = send(
        spec(server.url, timeout_seconds=0.2, seconds=0.1, maximum_seconds=0.4, warm_up_seconds=0, warm_up_requests=0)
    )

    assert set(result.failures) == {"timeout"}


def test_the_servers_cpu_time_and_memory_are_read(start_stub: StartStub) -> None:
    server = start_stub()

    result = send(spec(server.url, seconds=0.5, pids=server.pids, cpus=(0,)))

    assert result.server_cores is not None
    assert 0 < result.server_cores < 1.5
    assert result.server_cpu_milliseconds is not None
    assert result.server_cpu_milliseconds < 20
    assert result.server_rss_bytes is not None
    assert result.server_rss_bytes > 1e6
    assert result.foreign_cores is not None


def test_the_client_process_measures_cell_after_cell(start_stub: StartStub, client: Client) -> None:
    server = start_stub(delay_ms=5)

    results = [client.measure(spec(server.url, seconds=0.1)) for _ in range(2)]

    assert all(result.latencies_milliseconds for result in results)


@pytest.mark.skipif(
    time_slice_nanoseconds() is None, reason="this kernel has no time slices (Linux 6.12 and later have)"
)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one CPU client and server share it")
def test_a_client_has_priority_on_separate_cpus_but_not_on_the_servers(start_stub: StartStub) -> None:
    own, other = sorted(os.sched_getaffinity(0))[:2]
    server = start_stub()
    with Client((own,)) as one:
        found = [
            one.measure(spec(server.url, seconds=0.1, cpus=cpus)).client_goes_first
            for cpus in [(other,), (own,), (own, other), (), (other,)]
        ]

    assert found == [True, False, False, False, True]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one CPU client and server share it")
def test_a_real_time_client_keeps_its_priority_on_separate_cpus(start_stub: StartStub) -> None:
    own, other = sorted(os.sched_getaffinity(0))[:2]
    server = start_stub()
    with Client((own,)) as one:
        try:
            os.sched_setscheduler(one.pid, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            pytest.skip("real time is for root (or a user with CAP_SYS_NICE)")
        found = [one.measure(spec(server.url, seconds=0.1, cpus=cpus)).client_goes_first for cpus in [(other,), (own,)]]

        assert found == [True, False]
        assert os.sched_getscheduler(one.pid) == os.SCHED_RR


def test_a_refused_connection_is_a_result_with_a_reason(client: Client) -> None:
    result = client.measure(spec(f"http://127.0.0.1:{free_port()}"))

    assert result.failures == {"unreachable": 1}
    assert "refused" in result.first_failure.lower() or "connect" in result.first_failure.lower()


def test_a_client_that_dies_is_an_error_with_a_message() -> None:
    with Client() as one:
        os.kill(one.pid, signal.SIGKILL)
        with pytest.raises(MeasurementFailed, match=r"measuring client failed: killed by signal 9"):
            one.measure(spec("http://127.0.0.1:1"))


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="maximum_seconds 1 is under seconds 5"):
        spec("http://127.0.0.1:1", seconds=5, maximum_seconds=1)
