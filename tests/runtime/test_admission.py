from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_runtime.admission import Admission, Entry, Waiting, check_size, client_of, fits, retry_after_seconds
from penstock_runtime.errors import InvalidInput, Overloaded, RequestError
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.settings import QueueSettings
from tests.runtime.batching.echo import EchoEngine
from tests.runtime.serving.small import small_model

LIMITS = QueueSettings(max_queue_rows=10, max_queue_tokens=100)
RATE = 1000.0


@pytest.mark.parametrize(
    ("rows", "tokens", "waiting", "expected"),
    [
        (1, 1, Waiting(0, 0), True),
        (10, 100, Waiting(0, 0), True),
        (1, 10, Waiting(9, 90), True),
        (5, 10, Waiting(5, 90), True),
        (1, 500, Waiting(0, 0), True),  # one row over the limit is accepted when no other waits: it cannot be split
        (1, 1, Waiting(10, 50), False),
        (1, 1, Waiting(5, 100), False),
        (2, 2, Waiting(9, 50), False),
        (2, 20, Waiting(5, 90), False),
        (10, 100, Waiting(1, 1), False),
        (1, 500, Waiting(1, 1), False),
    ],
)
def test_what_fits_next_to_the_waiting_requests(rows: int, tokens: int, waiting: Waiting, *, expected: bool) -> None:
    assert fits(LIMITS, rows, tokens, waiting) is expected


@pytest.mark.parametrize(("rows", "tokens", "what"), [(11, 50, "11 sequences"), (5, 101, "101 tokens")])
@pytest.mark.parametrize("waiting", [Waiting(0, 0), Waiting(9, 9)])
def test_a_request_larger_than_the_queue_is_refused_permanently(
    rows: int, tokens: int, what: str, waiting: Waiting
) -> None:
    with pytest.raises(InvalidInput) as caught:
        Admission(LIMITS).admit(entry(rows=rows, tokens=tokens), lambda: waiting, RATE, field="prompt")

    assert what in caught.value.message
    assert "smaller requests" in caught.value.remedy
    assert caught.value.field == "prompt"


@given(rows=st.integers(1, 20), tokens=st.integers(1, 200))
def test_a_request_that_can_ever_fit_fits_into_an_empty_queue(rows: int, tokens: int) -> None:
    try:
        check_size(LIMITS, rows, tokens)
    except InvalidInput:
        assert rows > LIMITS.max_queue_rows or tokens > LIMITS.max_queue_tokens
    else:
        assert fits(LIMITS, rows, tokens, Waiting(0, 0))


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (9500, 10), (10**9, 60)])
def test_retry_after_is_the_time_that_the_queue_takes(tokens: int, seconds: int) -> None:
    assert retry_after_seconds(tokens, RATE) == seconds


def test_retry_after_is_a_second_before_anything_was_measured() -> None:
    assert retry_after_seconds(10**6, 0.0) == 1


def test_a_client_is_its_token_or_its_address() -> None:
    assert client_of("", "10.0.0.1") == "10.0.0.1"
    assert client_of("team", "10.0.0.1") == client_of("team", "10.0.0.2")
    assert client_of("10.0.0.1", "") != client_of("", "10.0.0.1")


@pytest.mark.parametrize(("seconds", "expected"), [(None, 5.0 + LIMITS.deadline_seconds), (0.5, 5.5)])
def test_a_deadline_is_the_requests_or_that_of_the_settings(seconds: float | None, expected: float) -> None:
    assert Admission(LIMITS).deadline(5.0, seconds) == expected


@dataclass(eq=False)
class Job:
    """A request that waits until the test starts it."""

    waits: bool = True
    refused: list[RequestError] = field(default_factory=list)

    def is_waiting(self) -> bool:
        return self.waits

    def refuse(self, error: RequestError) -> None:
        self.waits = False
        self.refused.append(error)


def entry(client: str = "a", *, rows: int = 1, tokens: int = 3, priority: int = 0) -> Entry:
    return Entry(client, rows, tokens, math.inf, priority=priority)


class Bench:
    """An admission with requests of a row each."""

    def __init__(self, most_rows: int) -> None:
        self.admission = Admission(QueueSettings(max_queue_rows=most_rows))
        self.admitted: list[tuple[Entry, Job]] = []

    def waiting(self) -> Waiting:
        found = [one for one, job in self.admitted if job.waits]
        return Waiting(sum(one.rows for one in found), sum(one.tokens for one in found))

    def add(self, client: str, *, tokens: int = 3, priority: int = 0, runs: bool = False) -> Job:
        one, job = entry(client, tokens=tokens, priority=priority), Job(waits=not runs)
        self.admission.admit(one, self.waiting, RATE)
        one.work = job
        self.admitted.append((one, job))
        return job

    def refused(self) -> list[int]:
        return [index for index, (_, job) in enumerate(self.admitted) if job.refused]


def test_the_newest_requests_of_the_largest_client_give_way() -> None:
    bench = Bench(10)
    for _ in range(10):
        bench.add("many")
    with pytest.raises(Overloaded) as caught:
        bench.add("many")
    for _ in range(4):
        bench.admission.check("few", bench.waiting(), RATE)
        bench.add("few")

    assert bench.refused() == [6, 7, 8, 9]
    assert caught.value.retry_after_seconds == 1
    assert "10 sequences with 30 tokens" in caught.value.message
    with pytest.raises(Overloaded):
        bench.admission.check("many", bench.waiting(), RATE)


@pytest.mark.parametrize(("second", "refused"), [(3, None), (20, [1])])
def test_a_request_that_runs_does_not_give_way_but_counts(second: int, refused: list[int] | None) -> None:
    bench = Bench(1)
    bench.add("a", tokens=50, runs=True)
    bench.add("b", tokens=second)
    if refused is None:
        with pytest.raises(Overloaded):
            bench.add("c")
    else:
        bench.add("c")
        assert bench.refused() == refused


def test_clients_with_equal_shares_of_a_full_queue_do_not_displace_each_other() -> None:
    bench = Bench(4)
    for client in ("a", "b", "a", "b"):
        bench.add(client)
    for client in ("a", "b"):
        with pytest.raises(Overloaded):
            bench.add(client)

    assert bench.refused() == []


def test_a_lower_priority_class_gives_way_first_whatever_the_shares() -> None:
    bench = Bench(4)
    for _ in range(3):
        bench.add("many")
    bench.add("few", priority=1)
    bench.add("many")
    with pytest.raises(Overloaded):
        bench.add("few", priority=1, tokens=100)

    assert bench.refused() == [3]


clients = st.sampled_from(["a", "b", "c"])


@given(st.lists(st.tuples(clients, st.integers(1, 30), st.booleans()), max_size=40), st.integers(1, 8))
def test_the_queue_never_has_more_than_its_limit_and_a_refusal_is_fair(
    asked: list[tuple[str, int, bool]], most_rows: int
) -> None:
    bench = Bench(most_rows)
    for client, tokens, ends in asked:
        held: dict[str, int] = {}
        for one, job in bench.admitted:
            if not job.refused:
                held[one.client] = held.get(one.client, 0) + one.tokens
        try:
            bench.add(client, tokens=tokens)
        except Overloaded:
            assert max(held.values()) <= held.get(client, 0) + tokens
        assert bench.waiting().rows <= most_rows
        if ends and bench.admitted:
            first, _ = bench.admitted.pop(0)
            bench.admission.release(first)
            bench.admission.release(first)


async def refusals(*requests: tuple[str, str]) -> list[bool]:
    """Which of requests of (token, address) a server with room for two waiting rows refuses."""
    engine = EchoEngine()
    engine.gate.clear()
    predictor = Predictor(small_model(engine), queue=QueueSettings(max_queue_rows=2))
    tasks: list[asyncio.Task[Any]] = []
    for caller, (token, address) in enumerate(requests):
        tasks.append(asyncio.create_task(predictor.predict([3], {}, caller=caller, client=address, tenant=token)))
        if not caller:
            await asyncio.to_thread(engine.began.acquire, timeout=60)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    engine.gate.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    await predictor.drain()
    return [isinstance(one, Overloaded) for one in found]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (("other", "gateway"), [False, False, True, False]),
        (("one", "elsewhere"), [False, False, False, True]),
        (("", "gateway"), [False, False, True, False]),
    ],
)
def test_clients_behind_one_address_are_distinguished_by_their_tokens(
    last: tuple[str, str], expected: list[bool]
) -> None:
    requests = [("one", "gateway")] * 3

    assert asyncio.run(refusals(*requests, last)) == expected
