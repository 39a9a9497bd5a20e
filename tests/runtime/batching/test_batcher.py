from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, cast

import pytest

from penstock.recipe import Batching, Plan
from penstock_runtime.batching.batcher import Batcher, BatchResult
from penstock_runtime.batching.queue import QueuedRow
from penstock_runtime.engines.base import Parallelism
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.engines.routed import RoutedEngine
from penstock_runtime.errors import DeadlineExceeded, InferenceFailed
from penstock_runtime.rows import Batch, Outputs, Row
from tests.runtime.batching.echo import IO, POISON, EchoEngine, plan, route, row, rows, total


class Seen:
    """An observer."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()

    def batch(self, rows: int, real_tokens: int, padded_tokens: int) -> None:
        self.batches.put((rows, real_tokens, padded_tokens))

    def cache(self, name: str, *, hit: bool) -> None:
        raise AssertionError((name, hit))


class Bench:
    """A batcher and its surroundings in a server: the loop is the caller of `get`."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.ready: deque[BatchResult] = deque()
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        batcher.streams.attend(cast("asyncio.AbstractEventLoop", self), self._collect)

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        """As a loop has it."""
        self._calls.put(callback)

    def push(self, *lengths: int, owner: Any = None, deadline: float = math.inf) -> list[QueuedRow]:
        return self.push_rows(rows(lengths), owner=owner, deadline=deadline)

    def push_rows(self, wanted: list[Row], *, owner: Any = None, deadline: float = math.inf) -> list[QueuedRow]:
        entries = self.batcher.push(wanted, owner, arrived=perf_counter(), deadline=deadline)
        self.dispatch()
        return entries

    def dispatch(self) -> None:
        self.ready += self.batcher.dispatch()

    def get(self) -> BatchResult:
        while not self.ready:
            self._calls.get(timeout=60)()
        return self.ready.popleft()

    def _collect(self) -> None:
        self.ready += self.batcher.collect()


@contextmanager
def working(
    engine: EchoEngine | RoutedEngine,
    served: Plan,
    *,
    reduce: Any = total,
    observer: Seen | None = None,
    tokens_per_second: float = 100.0,
    one_core: bool = False,
) -> Iterator[Bench]:
    """`tokens_per_second`: of each stream, as the warm-up has measured; so slow that no row is brief."""
    batcher = Batcher(engine, IO, served, reduce, observer=observer or Seen(), one_core=one_core)
    batcher.add_measurement(int(tokens_per_second), 1.0)
    try:
        yield Bench(batcher)
    finally:
        if isinstance(engine, EchoEngine):
            engine.gate.set()
        batcher.streams.leave()
        batcher.streams.stop()


def test_rows_are_returned_reduced_with_their_times() -> None:
    with working(EchoEngine(), plan()) as bench:
        before = perf_counter()
        bench.push_rows([Row([1, 2, 3])], owner="me")
        outcome = bench.get()

    assert [entry.owner for entry in outcome.rows] == ["me"]
    assert outcome.values == [6.0]
    assert before <= outcome.started <= outcome.ended <= perf_counter()


def test_rows_that_arrive_while_a_stream_is_busy_are_its_next_batch() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan(Batching.EQUAL_LENGTH)) as bench:
        bench.push(5)
        assert engine.began.acquire(timeout=60)
        for length in (8, 8, 9, 8):
            bench.batcher.push(rows([length]), None, arrived=perf_counter(), deadline=math.inf)
        bench.dispatch()
        engine.gate.set()
        for _ in range(3):
            bench.get()

    assert engine.batches == [[5], [8, 8, 8], [9]]


def test_streams_run_concurrently_and_share_the_rows_of_one_request() -> None:
    engine = EchoEngine(streams=3)
    engine.gate.clear()
    with working(engine, plan(streams=3)) as bench:
        bench.push(5, 6, 7, 8)
        for _ in range(3):
            assert engine.began.acquire(timeout=60)
        assert bench.batcher.depth == (1, 8)
        engine.gate.set()
        for _ in range(4):
            bench.get()

    assert engine.most_at_once == 3


@pytest.mark.parametrize(
    ("tokens_per_second", "lengths", "batches"),
    [
        pytest.param(1e6, [8] * 4, [[8] * 4], id="32 tokens are done in a moment"),
        pytest.param(1e6, [8] * 6, [[8] * 2, [8] * 4], id="more are not"),
        pytest.param(1e3, [8] * 4, [[8] * 2, [8] * 2], id="nor are that many where the engine is slow"),
        pytest.param(1e6, [8, 9], [[8], [9]], id="what cannot run together is run at once all the same"),
    ],
)
def test_few_short_rows_run_on_one_stream(
    tokens_per_second: float, lengths: list[int], batches: list[list[int]]
) -> None:
    engine = EchoEngine(streams=2)
    engine.gate.clear()
    served = plan(Batching.EQUAL_LENGTH, streams=2)
    with working(engine, served, tokens_per_second=tokens_per_second) as bench:
        bench.push(*lengths)
        for _ in batches:
            assert engine.began.acquire(timeout=60)
        assert sorted(engine.batches) == batches
        engine.gate.set()
        for _ in batches:
            bench.get()


@pytest.mark.parametrize(
    ("lengths", "batches", "wide"),
    [
        pytest.param([64, 64], [[64, 64]], [128], id="a few long ones together, on all cores"),
        pytest.param([63, 63], [[63], [63]], [], id="short ones together"),
        pytest.param([64] * 3, [[64]] * 3, [], id="as many as there are cores, or nearly, too"),
        pytest.param([64, 100], [[64], [100]], [], id="and what cannot run together"),
    ],
)
def test_a_few_long_rows_of_an_idle_server_get_all_cores_together(
    lengths: list[int], batches: list[list[int]], wide: list[int]
) -> None:
    engine = EchoEngine(streams=4, divides_batches=True)
    engine.gate.clear()
    with working(engine, plan(Batching.EQUAL_LENGTH, streams=4, wide_from=64)) as bench:
        bench.push(*lengths)
        for _ in batches:
            assert engine.began.acquire(timeout=60)
        assert sorted(engine.batches) == batches
        assert engine.wide == wide
        if wide:  # during it, rows are shared as usual
            bench.push(*lengths)
            for _ in lengths:
                assert engine.began.acquire(timeout=60)
            assert sorted(engine.batches) == [[length] for length in lengths] + batches
            assert engine.wide == wide
        engine.gate.set()
        for _ in engine.batches:
            bench.get()


def test_a_lone_long_row_gets_all_cores() -> None:
    engine = EchoEngine(streams=2)
    with working(engine, plan(Batching.EQUAL_LENGTH, streams=2, wide_from=64)) as bench:
        for length in (63, 64, 300):
            bench.push(length)
            bench.get()

    assert engine.wide == [64, 300]


@pytest.mark.parametrize(
    ("wide_from", "wide_alone", "here", "through_a_worker"),
    [(64, 16, [16, 64], [64]), (64, None, [64], [64]), (None, 16, [16, 64], []), (None, None, [], [])],
)
def test_a_row_of_a_client_that_is_alone_gets_all_cores_from_a_length_of_its_own(
    wide_from: int | None, wide_alone: int | None, here: list[int], through_a_worker: list[int]
) -> None:
    engine = EchoEngine(streams=2)
    served = plan(streams=2, wide_from=wide_from, wide_alone=wide_alone)
    with working(engine, served, tokens_per_second=5_000) as bench:  # of each: 1.5 to 6.4 ms
        for length in (15, 16, 64):
            assert bench.batcher.run_inline(row(length)) is not None
        assert engine.wide == here
        engine.wide.clear()
        for length in (15, 16, 64):
            bench.push(length)
            bench.get()

    assert engine.wide == through_a_worker


@pytest.mark.parametrize("routed", [False, True])
def test_a_long_row_among_others_keeps_to_its_stream_until_those_have_ended(routed: bool) -> None:
    engine = EchoEngine(streams=2)
    engine.gate.clear()
    served = plan(Batching.EQUAL_LENGTH, streams=2, wide_from=64)
    if routed:  # the engine of the long rows does not see those that the other one runs
        served = served.model_copy(update={"short": route(16)})
    with working(engine, served) as bench:
        for length in (63, 64):
            bench.push(length)
            assert engine.began.acquire(timeout=60)
        engine.gate.set()
        for _ in range(2):
            bench.get()

    assert engine.wide == []
    assert engine.widening == ([] if routed else [64])


def test_a_failed_batch_is_run_again_row_by_row_and_only_the_culprit_fails() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan(Batching.EQUAL_LENGTH)) as bench:
        bench.push(1)
        assert engine.began.acquire(timeout=60)
        for token in (7, POISON, 9):
            bench.batcher.push([row(4, token)], token, arrived=perf_counter(), deadline=math.inf)
        bench.dispatch()
        engine.gate.set()
        bench.get()
        found = {one.rows[0].owner: one.values[0] for one in (bench.get() for _ in range(3))}

    assert (found[7], found[9]) == (28.0, 36.0)
    assert isinstance(found[POISON], InferenceFailed)
    assert engine.batches == [[1], [4, 4, 4], [4], [4], [4]]


def test_a_crash_in_reduce_fails_one_row_and_the_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def reduce(one: Row, outputs: Outputs) -> float:
        if one.length == 3:
            raise ZeroDivisionError
        return total(one, outputs)

    with working(EchoEngine(), plan(), reduce=reduce) as bench:
        bench.push(3, 4)
        values = [bench.get().values[0] for _ in range(2)]

    assert isinstance(values[0], InferenceFailed)
    assert "ZeroDivisionError" in values[0].message
    assert values[1] == 28.0
    assert "ZeroDivisionError" in caplog.text


def test_expired_rows_get_an_error_and_never_run() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan()) as bench:
        bench.push(1)
        assert engine.began.acquire(timeout=60)
        bench.push(2, owner="late", deadline=perf_counter() - 1)
        bench.push(3)
        engine.gate.set()
        found = [bench.get() for _ in range(3)]

    assert [type(outcome.values[0]) for outcome in found] == [DeadlineExceeded, float, float]
    assert found[0].rows[0].owner == "late"
    assert engine.batches == [[1], [3]]


def test_discarded_rows_never_run() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan()) as bench:
        bench.push(1)
        assert engine.began.acquire(timeout=60)
        gone = bench.push(2, 3)
        bench.push(4)
        bench.batcher.discard(gone)
        assert bench.batcher.depth == (1, 4)
        engine.gate.set()
        for _ in range(2):
            bench.get()

    assert engine.batches == [[1], [4]]


@pytest.mark.parametrize(("grid", "padded"), [(None, 12 * 2), (ShapeGrid(), 16 * 2)])
def test_the_observer_gets_real_and_padded_tokens(grid: ShapeGrid | None, padded: int) -> None:
    engine, seen = EchoEngine(grid=grid), Seen()
    engine.gate.clear()
    with working(engine, plan(Batching.PADDED, padding=0.2), observer=seen) as bench:
        bench.push(1)
        assert engine.began.acquire(timeout=60)
        bench.push(12, 11)
        engine.gate.set()
        for _ in range(2):
            bench.get()
        first, second = seen.batches.get(timeout=60), seen.batches.get(timeout=60)

    assert first == (1, 1, 1 if grid is None else 8)
    assert second == (2, 23, padded)


def test_the_rate_is_measured_from_the_runs() -> None:
    with working(EchoEngine(), plan(), tokens_per_second=1_000_000) as bench:
        assert bench.batcher.tokens_per_second == 1_000_000
        bench.push(100)
        bench.get()
        bench.push(100)
        bench.get()
        assert bench.batcher.tokens_per_second != 1_000_000


def test_short_rows_run_on_their_own_engine_wide_from_their_own_length_and_count_as_padded_there() -> None:
    long, short = EchoEngine(streams=2, grid=ShapeGrid()), EchoEngine(streams=2)
    served = plan(Batching.EQUAL_LENGTH, streams=2, wide_from=20).model_copy(update={"short": route(16, wide_from=10)})
    observer = Seen()
    with working(RoutedEngine(long, short, 16), served, observer=observer) as bench:
        for length in (9, 10, 16, 17, 20):
            bench.push(length)
            bench.get()

    assert (short.batches, short.wide) == ([[9], [10], [16]], [10, 16])
    assert (long.batches, long.wide) == ([[17], [20]], [20])
    assert [observer.batches.get(timeout=60) for _ in range(5)] == [
        (1, 9, 9), (1, 10, 10), (1, 16, 16), (1, 17, 24), (1, 20, 24),
    ]  # fmt: skip


def test_a_brief_row_without_others_runs_in_the_thread_of_any_caller() -> None:
    engine, here = EchoEngine(streams=2), threading.current_thread().name
    with working(engine, plan(Batching.EQUAL_LENGTH, streams=2, wide_alone=5), tokens_per_second=2_500) as bench:
        bench.push(5, owner="me")
        assert bench.ready.popleft().rows[0].owner == "me"
        assert (engine.threads, engine.wide) == ({here}, [5])
        engine.threads.clear()
        for lengths in ((6,), (2, 3)):  # 1.2 ms; two at once
            bench.push(*lengths)
            assert not bench.ready
            for _ in lengths:
                bench.get()
        assert here not in engine.threads
        engine.gate.clear()
        bench.push(30)
        bench.push(2)  # together with another
        assert engine.began.acquire(timeout=60)
        engine.gate.set()
        bench.get()
        bench.get()
        assert here not in engine.threads


def test_a_brief_row_whose_deadline_has_passed_does_not_run() -> None:
    engine = EchoEngine()
    with working(engine, plan(), tokens_per_second=1_000_000) as bench:
        bench.push(5, deadline=perf_counter() - 1)
        assert isinstance(bench.get().values[0], DeadlineExceeded)
    assert engine.batches == []


def test_on_one_core_a_short_queue_runs_in_the_callers_thread() -> None:
    engine, here = EchoEngine(), threading.current_thread().name
    with working(engine, plan(Batching.EQUAL_LENGTH), tokens_per_second=2_500, one_core=True) as bench:
        bench.push(3, 3, 2)  # 3.2 ms
        assert [len(bench.ready.popleft().rows) for _ in range(2)] == [2, 1]
        assert engine.batches == [[3, 3], [2]]
        assert engine.threads == {here}
        engine.threads.clear()
        bench.push(6, 5)  # 4.4 ms
        assert not bench.ready
        for _ in range(2):
            bench.get()
        for _ in range(4):
            assert engine.began.acquire(timeout=60)
        engine.gate.clear()
        bench.push(30)
        assert engine.began.acquire(timeout=60)
        bench.push(1)  # together with another
        assert not bench.ready
        engine.gate.set()
        for _ in range(2):
            bench.get()
        assert here not in engine.threads


def test_with_several_streams_on_one_core_rows_run_in_the_streams() -> None:
    engine = EchoEngine(streams=2)
    with working(
        engine, plan(Batching.EQUAL_LENGTH, streams=2), tokens_per_second=1_000_000, one_core=True
    ) as bench:  # fmt: skip
        bench.push(3, 3)
        assert not bench.ready
        bench.get()
    assert threading.current_thread().name not in engine.threads


def test_a_batch_that_fails_in_the_callers_thread_is_run_again_row_by_row() -> None:
    engine = EchoEngine()
    with working(engine, plan(Batching.EQUAL_LENGTH), tokens_per_second=1_000_000, one_core=True) as bench:
        bench.push_rows([row(4, token) for token in (7, POISON, 9)])
        values = [bench.get().values[0] for _ in range(3)]
        bench.push_rows([row(4, POISON)])
        alone = bench.ready.popleft().values[0]

    assert (values[0], values[2]) == (28.0, 36.0)
    assert isinstance(values[1], InferenceFailed)
    assert isinstance(alone, InferenceFailed)
    assert engine.batches == [[4, 4, 4], [4], [4], [4], [4]]


def test_one_batch_is_prepared_while_all_streams_are_busy_and_starts_without_the_loop() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan()) as bench:
        for length in (1, 2, 3):
            bench.push(length)
        assert bench.batcher.depth == (2, 5)
        engine.gate.set()
        for _ in range(2):
            assert engine.began.acquire(timeout=60)
        assert not engine.began.acquire(timeout=0.05)  # the ended batch was not collected yet
        for _ in range(3):
            bench.get()

    assert engine.batches == [[1], [2], [3]]


def test_a_row_that_is_discarded_leaves_a_batch_that_has_not_begun() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan(Batching.EQUAL_LENGTH)) as bench:
        running = bench.push(1)
        assert engine.began.acquire(timeout=60)
        _, gone, _ = bench.push(4, 4, 4, owner="three")
        bench.batcher.discard([gone])
        bench.batcher.discard(running)  # too late
        assert bench.batcher.depth == (2, 8)
        engine.gate.set()
        first, second = bench.get(), bench.get()

    assert first.rows == running
    assert [entry.index for entry in second.rows] == [0, 2]
    assert engine.batches == [[1], [4, 4]]


def test_expired_rows_leave_a_batch_that_has_not_begun_and_expire_returns_the_next_deadline() -> None:
    engine = EchoEngine()
    engine.gate.clear()
    with working(engine, plan(Batching.EQUAL_LENGTH)) as bench:
        now = perf_counter()
        bench.push(1, deadline=now + 100)
        assert engine.began.acquire(timeout=60)
        for deadline in (200, 300):
            bench.batcher.push(rows([4]), deadline, arrived=now, deadline=now + deadline)
        bench.dispatch()
        bench.push(9, owner=400, deadline=now + 400)
        assert bench.batcher.expire(now) == ([], now + 100)  # its start is not known yet
        late, next_deadline = bench.batcher.expire(now + 250)
        assert ([entry.owner for entry in late], next_deadline) == ([200], now + 300)
        late, next_deadline = bench.batcher.expire(now + 500)
        assert (sorted(entry.owner for entry in late), next_deadline) == ([300, 400], math.inf)
        engine.gate.set()
        assert bench.get().values == [7.0]

    assert engine.batches == [[1]]


def test_a_batch_that_cannot_even_be_begun_is_tried_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with working(EchoEngine(), plan(Batching.EQUAL_LENGTH)) as bench:
        submit = bench.batcher.streams.submit

        def refuse(batch: Batch, parallelism: Parallelism) -> int:
            if len(batch.input_ids) > 1 or 9 in batch.input_ids:
                raise MemoryError
            return submit(batch, parallelism)

        monkeypatch.setattr(bench.batcher.streams, "submit", refuse)
        bench.push_rows([row(4, 7), row(4, 9)])
        failed, ran = bench.get(), bench.get()

    assert isinstance(failed.values[0], InferenceFailed)
    assert "MemoryError" in failed.values[0].message
    assert ran.values == [28.0]


def test_a_device_gets_as_many_runs_at_once_as_it_takes_and_one_is_prepared() -> None:
    engine = EchoEngine(streams=2, in_flight=4)
    engine.gate.clear()
    with working(engine, plan(streams=2)) as bench:
        bench.push(*range(3, 10))
        for _ in range(4):
            assert engine.began.acquire(timeout=60)
        waiting = bench.batcher.depth
        engine.gate.set()
        ended = [bench.get() for _ in range(7)]

    assert waiting == (3, 7 + 8 + 9)
    assert engine.most_at_once == 4
    assert sorted(result.values[0] for result in ended) == sorted(float(sum(one.ids)) for one in rows(range(3, 10)))


def test_rows_for_a_device_never_run_in_the_callers_thread() -> None:
    engine = EchoEngine(in_flight=2)
    with working(engine, plan(), tokens_per_second=1e9) as bench:
        inline = bench.batcher.run_inline(row(3))
        bench.push(3)
        bench.get()

    assert inline is None
    assert threading.current_thread().name not in engine.threads
