"""The capacity curve of text generation: which numbers of clients are measured, and the measurement itself."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity import TokenPoint
from penstock.resources.endpoint import Objective, TokenTime, Workload
from penstock_optimizer.capacity import tokens
from penstock_optimizer.capacity.curve import CapacityFailed, ReplicaBroken, ReplicaServer
from penstock_optimizer.capacity.tokens import (
    DEFAULT_LENGTHS,
    MOST_CLIENTS,
    ClientSteps,
    StreamingClients,
    lengths_text,
    measure_tokens,
    request_lengths,
)
from penstock_optimizer.targets.decoder import of_token_curve
from tests.optimizer.load.test_texts import wordpiece

LIMITS = Objective(time_to_first_token=TokenTime(p95_milliseconds=100), tokens_per_second=50)


def point(clients: int, *, tokens: float, first: float = 10.0, following: float = 5.0) -> TokenPoint:
    return TokenPoint(
        clients=clients,
        requests_per_second=tokens / 10,
        tokens_per_second=tokens,
        first_token_p95_milliseconds=first,
        next_token_p95_milliseconds=following,
        samples=10,
    )


def measured(objective: Objective, at: Callable[[int], TokenPoint]) -> list[int]:
    """The numbers of clients in the order in which they are measured."""
    steps = ClientSteps(objective)
    counts: list[int] = []
    while (count := steps.next_clients()) is not None:
        counts.append(count)
        assert len(counts) < 20
        steps.points.append(at(count))
    return counts


@pytest.mark.parametrize(
    ("at", "counts"),
    [
        (lambda n: point(n, tokens=10 * n), [1, 2, 4, 8, 16, 32, 64]),
        (lambda n: point(n, tokens=10 * min(n, 6)), [1, 2, 4, 8, 16]),
        (lambda n: point(n, tokens=10 * n, first=20 * n), [1, 2, 4, 8, 6]),
        (lambda n: point(n, tokens=10 * n, first=60 * n), [1, 2]),
        (lambda n: point(n, tokens=10 * n, first=101), [1]),
        (lambda n: point(n, tokens=10 * n, following=15.0 * n), [1, 2, 4, 8, 6]),
    ],
    ids=["scales", "saturates", "late first tokens", "good and bad are next to each other", "one is late", "gaps"],
)
def test_the_number_of_clients_is_doubled_until_more_are_of_no_use(
    at: Callable[[int], TokenPoint], counts: list[int]
) -> None:
    assert measured(LIMITS, at) == counts


@given(st.floats(0.1, 1000), st.floats(0.1, 1000), st.floats(1, 200), st.floats(0, 1))
def test_a_curve_ends_whatever_the_engine_does(first: float, following: float, rate: float, growth: float) -> None:
    def at(clients: int) -> TokenPoint:
        return point(clients, tokens=rate * clients**growth, first=first * clients, following=following)

    counts = measured(Objective(), at)
    assert counts[0] == 1
    assert len(set(counts)) == len(counts)
    assert max(counts) <= MOST_CLIENTS


@pytest.mark.parametrize(
    ("workload", "context", "expected"),
    [
        (Workload(), 2048, DEFAULT_LENGTHS),
        (Workload(lengths="100,20\n7,9"), 2048, ((100, 20), (7, 9))),
        (Workload(sequence_lengths=(30,)), 2048, ((30, 64),)),
        (Workload(lengths="100,20"), 64, ((44, 20),)),
        (Workload(lengths="5,100"), 64, ((5, 32),)),
    ],
)
def test_requests_are_those_of_the_workload_within_the_context(
    workload: Workload, context: int, expected: Sequence[tuple[int, int]]
) -> None:
    lengths = request_lengths(workload, context)
    assert lengths == expected
    assert all(prompt + output <= context for prompt, output in lengths)


def test_lengths_are_described_in_one_line() -> None:
    assert lengths_text(DEFAULT_LENGTHS) == "prompts of 64 to 512 tokens, answers of 32 to 96"
    assert lengths_text([(5, 6)]) == "prompts of 5 tokens, answers of 6"


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([], "was not measured"),
        ([point(1, tokens=10, first=500)], "One client alone does not get the first token within 100 ms"),
        ([point(1, tokens=10)], "The 50 tokens/s of the objective are not reached: one replica takes 10 of them."),
    ],
)
def test_what_the_curve_misses_is_a_finding(points: list[TokenPoint], words: str) -> None:
    (finding,) = of_token_curve(ClientSteps(LIMITS, points).curve, LIMITS)
    assert words in finding
    assert not list(of_token_curve(ClientSteps(LIMITS, [point(1, tokens=60)]).curve, LIMITS))


def test_without_time_nothing_is_measured() -> None:
    def measure(count: int, seconds: float) -> TokenPoint | None:
        pytest.fail(f"{count} clients were measured for {seconds} s")

    curve = measure_tokens(measure, [(4, 4)], Objective(), seconds_left=lambda: 0.0)
    assert curve.points == ()


FIRST, NEXT = 0.05, 0.01
"""Seconds before the first event of an answer, and between two of them."""
EVENTS = 4
"""Events of an answer; the second has two tokens."""


@contextmanager
def streaming(status: int = 200) -> Iterator[tuple[ReplicaServer, list[dict[str, Any]]]]:
    """A server that streams an answer of five tokens to each request, or refuses it; and the bodies that it has got."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if status != 200:
                self.send_error(status)
                return
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            time.sleep(FIRST)
            for _ in range(EVENTS):
                self.send({"choices": [{"text": "word", "finish_reason": None}], "usage": None})
                time.sleep(NEXT)
            self.send({"choices": [{"text": "", "finish_reason": "length"}], "usage": None})
            self.send({"choices": [], "usage": {"completion_tokens": EVENTS + 1}})
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")

        def send(self, value: object) -> None:
            event = f"data: {json.dumps(value)}\n\n".encode()
            # In two pieces, as a network may deliver it.
            self.chunk(event[:20])
            self.chunk(event[20:])

        def chunk(self, data: bytes) -> None:
            with suppress(OSError):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield ReplicaServer(f"http://127.0.0.1:{server.server_port}", os.getpid()), bodies
        finally:
            server.shutdown()
            thread.join()


def test_tokens_and_times_are_what_a_client_reads_from_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LEAST_SECONDS": 0.05, "ANSWERS": 4, "BODIES": 20}.items():
        monkeypatch.setattr(tokens, name, value)
    tokenizer = wordpiece()
    with streaming() as (server, bodies):
        found = StreamingClients(server, tokenizer, [(8, 4), (12, 6)]).measure(2, 60.0)

    assert found is not None
    assert found.clients == 2
    assert found.samples >= 8
    assert found.tokens_per_second / found.requests_per_second == pytest.approx(EVENTS + 1, rel=0.5)
    assert found.first_token_p95_milliseconds >= 1000 * FIRST
    assert found.next_token_p95_milliseconds >= 1000 * NEXT
    plain = wordpiece()
    plain.no_truncation()
    plain.no_padding()
    assert {len(plain.encode(body["prompt"]).ids) for body in bodies} == {8, 12}
    assert {body["max_tokens"] for body in bodies} >= {4, 6}
    assert len({body["prompt"] for body in bodies}) == len(bodies)


def test_a_replica_that_answers_no_client_is_broken_and_one_that_refuses_many_is_not() -> None:
    with streaming(status=500) as (server, _):
        clients = StreamingClients(server, wordpiece(), [(8, 4)])
        with pytest.raises(ReplicaBroken, match="no answer to 1 of 1 clients: 500"):
            clients.measure(1, 60.0)
        with pytest.raises(CapacityFailed) as failed:
            clients.measure(2, 60.0)
    assert not isinstance(failed.value, ReplicaBroken)
