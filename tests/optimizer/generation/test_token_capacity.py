"""The capacity curve of text generation: which numbers of clients are measured, and the measurement itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity import TokenPoint
from penstock.resources.endpoint import Objective, TokenTime, Workload
from penstock_optimizer.generation import token_capacity
from penstock_optimizer.generation.token_capacity import (
    DEFAULT_LENGTHS,
    MOST_CLIENTS,
    CapacityClients,
    ClientSteps,
    capacity_findings,
    lengths_text,
    measure_tokens,
    request_lengths,
)
from tests.runtime.generation.paged_engine import PagedEngine

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
    (finding,) = capacity_findings(ClientSteps(LIMITS, points).curve, LIMITS)
    assert words in finding
    assert capacity_findings(ClientSteps(LIMITS, [point(1, tokens=60)]).curve, LIMITS) == []


def left_of(seconds: float) -> Callable[[], float]:
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()


def test_clients_are_answered_by_the_scheduler_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LEAST_SECONDS": 0.05, "MOST_SECONDS": 30.0, "ANSWERS": 4, "MOST_CLIENTS": 4}.items():
        monkeypatch.setattr(token_capacity, name, value)
    engine = PagedEngine(blocks=32)
    reported: list[TokenPoint] = []
    lengths = [(8, 4), (20, 6)]
    clients = CapacityClients(engine, lambda ids: " ".join(map(str, ids)), lengths)
    curve = measure_tokens(clients.measure, lengths, Objective(), seconds_left=left_of(60), on_point=reported.append)
    clients.loop.close()
    assert [one.clients for one in curve.points] == sorted(one.clients for one in reported)
    assert curve.points[0].clients == 1
    for one in curve.points:
        # An answer has 4 or 6 tokens; those at the ends of the measurement count in part.
        assert one.samples >= 4
        tokens = one.tokens_per_second / one.requests_per_second
        assert 4 - 6 * one.clients / one.samples <= tokens <= 6 + 6 * one.clients / one.samples
    assert curve.within is not None


def test_without_time_nothing_is_measured() -> None:
    def measure(count: int, seconds: float) -> TokenPoint | None:
        pytest.fail(f"{count} clients were measured for {seconds} s")

    curve = measure_tokens(measure, [(4, 4)], Objective(), seconds_left=lambda: 0.0)
    assert curve.points == ()


def test_an_engine_that_fails_gives_no_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_capacity, "LEAST_SECONDS", 0.05)
    monkeypatch.setattr(token_capacity, "MOST_SECONDS", 0.1)
    engine = PagedEngine()
    engine.fail = RuntimeError("no")
    clients = CapacityClients(engine, lambda _: "", [(4, 4)])
    curve = measure_tokens(clients.measure, [(4, 4)], Objective(), seconds_left=left_of(60))
    clients.loop.close()
    assert curve.points == ()
