from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

import pytest

from penstock.recipe import Batching, Plan
from penstock_runtime.batching import workers as workers_module
from penstock_runtime.batching.bounds import QueueBounds
from penstock_runtime.batching.workers import Outcome, Workers
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.engines.routed import RoutedEngine
from penstock_runtime.errors import DeadlineExceeded, InferenceFailed, Overloaded
from penstock_runtime.rows import Outputs, Row
from tests.runtime.batching.echo import IO, POISON, EchoEngine, plan, route, row, rows, total


class Seen:
    """An observer."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()

    def batch(self, rows: int, real_tokens: int, padded_tokens: int) -> None:
        self.batches.put((rows, real_tokens, padded_tokens))

    def cache(self, name: str, *, hit: bool) -> None:
        raise AssertionError((name, hit))


@contextmanager
def working(
    engine: EchoEngine | RoutedEngine,
    served: Plan,
    *,
    bounds: QueueBounds | None = None,
    reduce: Any = total,
    observer: Seen | None = None,
) -> Iterator[tuple[Workers, queue.SimpleQueue[Outcome]]]:
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    workers = Workers(
        engine,
        IO,
        served,
        reduce,
        bounds=bounds or QueueBounds(),
        observer=observer or Seen(),
        deliver=outcomes.put,
    )
    try:
        yield workers, outcomes
    finally:
        if isinstance(engine, EchoEngine):
            engine.gate.set()
        workers.stop()


def push(workers: Workers, *lengths: int, owner: Any = None, deadline: float = math.inf) -> Any:
    return workers.push(rows(lengths), owner, arrived=perf_counter(), deadline=deadline)


def test_rows_come_back_reduced_with_their_times() -> None:
    with working(EchoEngine(), plan()) as (workers, outcomes):
        before = perf_counter()
        workers.push([Row([1, 2, 3])], "me", arrived=before, deadline=math.inf)
        outcome = outcomes.get(timeout=60)

    assert [entry.owner for entry in outcome.rows] == ["me"]
    assert outcome.values == [6.0]
    assert before <= outcome.started <= outcome.ended <= perf_counter()


def test_a_busy_worker_takes_what_has_gathered_meanwhile_as_one_batch() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan(Batching.EQUAL_LENGTH)) as (workers, outcomes):
        push(workers, 5)
        assert engine.began.acquire(timeout=60)
        for length in (8, 8, 9, 8):
            push(workers, length)
        engine.gate.set()
        for _ in range(3):
            outcomes.get(timeout=60)

    assert engine.batches == [[5], [8, 8, 8], [9]]


def test_streams_run_at_once_and_one_request_spreads_over_them() -> None:
    engine = EchoEngine(streams=3)
    engine.gate.clear()
    with working(engine, plan(streams=3)) as (workers, outcomes):
        push(workers, 5, 6, 7, 8)
        for _ in range(3):
            assert engine.began.acquire(timeout=60)
        assert workers.depth == (1, 8)
        engine.gate.set()
        for _ in range(4):
            outcomes.get(timeout=60)

    assert engine.most_at_once == 3


@pytest.mark.parametrize(
    ("tokens_per_second", "lengths", "batches"),
    [
        pytest.param(1e6, [8] * 4, [[8] * 4], id="32 tokens are done in a moment"),
        pytest.param(1e6, [8] * 6, [[8] * 2, [8] * 4], id="more are not"),
        pytest.param(1e3, [8] * 4, [[8] * 2, [8] * 2], id="nor are so many where the engine is slow"),
        pytest.param(1e6, [8, 9], [[8], [9]], id="what cannot run together is run at once all the same"),
    ],
)
def test_what_is_done_in_a_moment_is_left_to_one_stream(
    tokens_per_second: float, lengths: list[int], batches: list[list[int]]
) -> None:
    engine = EchoEngine(streams=2)
    engine.gate.clear()
    with working(engine, plan(Batching.EQUAL_LENGTH, streams=2)) as (workers, outcomes):
        workers.warmed(int(tokens_per_second), 1.0)
        push(workers, *lengths)
        for _ in batches:
            assert engine.began.acquire(timeout=60)
        assert sorted(engine.batches) == batches
        engine.gate.set()
        for _ in batches:
            outcomes.get(timeout=60)


@pytest.mark.parametrize(
    ("lengths", "batches", "wide"),
    [
        pytest.param([64, 64], [[64, 64]], [128], id="a few long ones together, on all cores"),
        pytest.param([63, 63], [[63], [63]], [], id="short ones beside each other"),
        pytest.param([64] * 3, [[64]] * 3, [], id="as many as there are cores, or nearly, too"),
        pytest.param([64, 100], [[64], [100]], [], id="and what cannot run together"),
    ],
)
def test_a_few_long_rows_of_an_idle_server_get_all_cores_together(
    lengths: list[int], batches: list[list[int]], wide: list[int]
) -> None:
    engine = EchoEngine(streams=4, divides_batches=True)
    engine.gate.clear()
    with working(engine, plan(Batching.EQUAL_LENGTH, streams=4, wide_from=64)) as (workers, outcomes):
        push(workers, *lengths)
        for _ in batches:
            assert engine.began.acquire(timeout=60)
        assert sorted(engine.batches) == batches
        assert engine.wide == wide
        if wide:  # beside it, rows are shared as ever
            push(workers, *lengths)
            for _ in lengths:
                assert engine.began.acquire(timeout=60)
            assert sorted(engine.batches) == [[length] for length in lengths] + batches
            assert engine.wide == wide
        engine.gate.set()
        for _ in engine.batches:
            outcomes.get(timeout=60)


def test_of_the_streams_that_sleep_the_first_one_is_woken() -> None:
    engine = EchoEngine(streams=3)
    with working(engine, plan(Batching.SINGLE, streams=3)) as (workers, outcomes):
        for count in (1, 1, 3, 1):
            asleep = perf_counter() + 30
            while len(workers._idle) < 3:
                assert perf_counter() < asleep
                sleep(0.001)
            assert workers._idle == [2, 1, 0]
            engine.threads.clear()
            engine.gate.clear()
            workers.push(rows([5] * count), None, arrived=0.0, deadline=math.inf)
            for _ in range(count):
                assert engine.began.acquire(timeout=30)
            assert engine.threads == {f"penstock-stream-{stream}" for stream in range(count)}
            engine.gate.set()
            for _ in range(count):
                outcomes.get(timeout=30)


@pytest.mark.parametrize(
    ("computes_here", "threads_per_stream", "placed"),
    [(True, 1, {(0, 2), (1, 2)}), (False, 1, set()), (True, 2, set())],
)
def test_streams_get_cores_of_their_own_where_the_engine_computes_in_their_threads(
    monkeypatch: pytest.MonkeyPatch, computes_here: bool, threads_per_stream: int, placed: set[tuple[int, int]]
) -> None:
    found: set[tuple[int, int]] = set()
    monkeypatch.setattr(workers_module, "place_stream", lambda stream, streams: found.add((stream, streams)))
    served = plan(Batching.SINGLE, streams=2).model_copy(update={"threads_per_stream": threads_per_stream})
    with working(EchoEngine(streams=2, in_callers_thread=computes_here), served):
        pass  # the threads have ended when this has

    assert found == placed


def test_a_lone_long_row_gets_all_cores() -> None:
    engine = EchoEngine(streams=2)
    with working(engine, plan(Batching.EQUAL_LENGTH, streams=2, wide_from=64)) as (workers, outcomes):
        for length in (63, 64, 300):
            push(workers, length)
            outcomes.get(timeout=60)

    assert engine.wide == [64, 300]


@pytest.mark.parametrize(
    ("wide_from", "wide_alone", "here", "through_a_worker"),
    [
        (64, 16, [16, 64], [64]),
        (64, None, [64], [64]),
        (None, 16, [16, 64], []),
        (None, None, [], []),
    ],
)
def test_a_row_of_a_client_that_is_alone_gets_all_cores_from_a_length_of_its_own(
    wide_from: int | None, wide_alone: int | None, here: list[int], through_a_worker: list[int]
) -> None:
    engine = EchoEngine(streams=2)
    with working(engine, plan(streams=2, wide_from=wide_from, wide_alone=wide_alone)) as (workers, outcomes):
        workers.warmed(1_000_000, 1.0)
        for length in (15, 16, 64):
            assert workers.run_here(row(length)) is not None
        assert engine.wide == here
        engine.wide.clear()
        for length in (15, 16, 64):
            push(workers, length)
            outcomes.get(timeout=60)

    assert engine.wide == through_a_worker


@pytest.mark.parametrize("routed", [False, True])
def test_a_long_row_beside_others_keeps_to_its_stream_until_those_are_gone(routed: bool) -> None:
    engine = EchoEngine(streams=2)
    engine.gate.clear()
    served = plan(Batching.EQUAL_LENGTH, streams=2, wide_from=64)
    if routed:  # the engine of the long rows does not see those that the other one runs
        served = served.model_copy(update={"short": route(16)})
    with working(engine, served) as (workers, outcomes):
        for length in (63, 64):
            push(workers, length)
            assert engine.began.acquire(timeout=60)
        engine.gate.set()
        for _ in range(2):
            outcomes.get(timeout=60)

    assert engine.wide == []
    assert engine.widening == ([] if routed else [64])


def test_a_failed_batch_is_run_again_row_by_row_and_only_the_culprit_fails() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan(Batching.EQUAL_LENGTH)) as (workers, outcomes):
        push(workers, 1)
        assert engine.began.acquire(timeout=60)
        for token in (7, POISON, 9):
            workers.push([row(4, token)], token, arrived=perf_counter(), deadline=math.inf)
        engine.gate.set()
        outcomes.get(timeout=60)
        outcome = outcomes.get(timeout=60)

    assert [entry.owner for entry in outcome.rows] == [7, POISON, 9]
    assert [outcome.values[0], outcome.values[2]] == [28.0, 36.0]
    assert isinstance(outcome.values[1], InferenceFailed)
    assert engine.batches == [[1], [4, 4, 4], [4], [4], [4]]


def test_a_crash_in_reduce_fails_one_row_and_the_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def reduce(one: Row, outputs: Outputs) -> float:
        if one.length == 3:
            raise ZeroDivisionError
        return total(one, outputs)

    with working(EchoEngine(), plan(), reduce=reduce) as (workers, outcomes):
        push(workers, 3, 4)
        values = [outcomes.get(timeout=60).values[0] for _ in range(2)]

    assert isinstance(values[0], InferenceFailed)
    assert "ZeroDivisionError" in values[0].message
    assert values[1] == 28.0
    assert "ZeroDivisionError" in caplog.text


def test_expired_rows_are_told_so_and_never_run() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan()) as (workers, outcomes):
        push(workers, 1)
        assert engine.began.acquire(timeout=60)
        push(workers, 2, owner="late", deadline=perf_counter() - 1)
        push(workers, 3)
        engine.gate.set()
        found = [outcomes.get(timeout=60) for _ in range(3)]

    assert [type(outcome.values[0]) for outcome in found] == [float, DeadlineExceeded, float]
    assert found[1].rows[0].owner == "late"
    assert engine.batches == [[1], [3]]


def test_discarded_rows_never_run() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan()) as (workers, outcomes):
        push(workers, 1)
        assert engine.began.acquire(timeout=60)
        gone = push(workers, 2, 3)
        push(workers, 4)
        workers.discard(gone)
        assert workers.depth == (1, 4)
        engine.gate.set()
        for _ in range(2):
            outcomes.get(timeout=60)

    assert engine.batches == [[1], [4]]


def test_a_full_queue_refuses_and_leaves_what_waits() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan(), bounds=QueueBounds(2, 100)) as (workers, outcomes):
        push(workers, 1)
        assert engine.began.acquire(timeout=60)
        push(workers, 2, 3)
        for lengths in ((4,), (4, 5)):
            with pytest.raises(Overloaded):
                push(workers, *lengths)
        engine.gate.set()
        for _ in range(3):
            outcomes.get(timeout=60)

    assert engine.batches == [[1], [2], [3]]


def test_stopping_runs_what_waits_first() -> None:
    engine = EchoEngine(streams=2)
    before = threading.active_count()
    with working(engine, plan(streams=2)) as (workers, outcomes):
        assert threading.active_count() == before + 2
        push(workers, *range(1, 200))
        workers.stop()
        got = [value for _ in range(199) for value in outcomes.get_nowait().values]

    assert sorted(got) == [7.0 * length for length in range(1, 200)]
    assert threading.active_count() == before


@pytest.mark.parametrize(("grid", "padded"), [(None, 12 * 2), (ShapeGrid(), 16 * 2)])
def test_the_observer_hears_of_real_and_padded_tokens(grid: ShapeGrid | None, padded: int) -> None:
    engine, seen = EchoEngine(grid=grid), Seen()
    engine.gate.clear()
    with working(engine, plan(Batching.PADDED, padding=0.2), observer=seen) as (workers, _):
        push(workers, 1)
        assert engine.began.acquire(timeout=60)
        push(workers, 12, 11)
        engine.gate.set()
        first, second = seen.batches.get(timeout=60), seen.batches.get(timeout=60)

    assert first == (1, 1, 1 if grid is None else 8)
    assert second == (2, 23, padded)


def test_the_rate_is_measured_from_the_runs() -> None:
    with working(EchoEngine(), plan()) as (workers, outcomes):
        workers.warmed(1_000_000, 1.0)
        assert workers.tokens_per_second == 1_000_000
        push(workers, 100)
        outcomes.get(timeout=60)
        push(workers, 100)
        outcomes.get(timeout=60)
        assert workers.tokens_per_second != 1_000_000


def test_short_rows_run_on_their_own_engine_wide_from_their_own_length_and_count_as_padded_there() -> None:
    long, short = EchoEngine(streams=2, grid=ShapeGrid()), EchoEngine(streams=2)
    served = plan(Batching.EQUAL_LENGTH, streams=2, wide_from=20).model_copy(update={"short": route(16, wide_from=10)})
    observer = Seen()
    with working(RoutedEngine(long, short, 16), served, observer=observer) as (workers, outcomes):
        for length in (9, 10, 16, 17, 20):
            push(workers, length)
            outcomes.get(timeout=60)

    assert (short.batches, short.wide) == ([[9], [10], [16]], [10, 16])
    assert (long.batches, long.wide) == ([[17], [20]], [20])
    assert [observer.batches.get(timeout=60) for _ in range(5)] == [
        (1, 9, 9), (1, 10, 10), (1, 16, 16), (1, 17, 24), (1, 20, 24),
    ]  # fmt: skip
