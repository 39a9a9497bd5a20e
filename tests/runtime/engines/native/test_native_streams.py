"""Streams of both kinds, each around the same native model: Python's threads, and the library's own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import pytest

from penstock_runtime.engines.base import Ended, Parallelism, Streams, Threads
from penstock_runtime.engines.native import NativeEngine
from penstock_runtime.engines.native import runs as native_runs
from penstock_runtime.engines.native.runs import NativeStreams
from penstock_runtime.engines.routed import RoutedEngine
from penstock_runtime.engines.thread_streams import ThreadStreams
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Batch, Float
from tests.runtime.engines.native.programs import needs_library
from tests.runtime.engines.native.test_native_engine import WORDS, encoder, opened, rows
from tests.runtime.http.serving import until

pytestmark = needs_library
MANY = rows(*[40] * 300)
"""Takes some ten milliseconds."""
both = pytest.mark.parametrize("start", [NativeEngine.start_streams, ThreadStreams], ids=["native", "threads"])


@contextmanager
def started(start: Callable[[NativeEngine], Streams], streams: int = 2) -> Iterator[tuple[NativeEngine, Streams]]:
    engine = opened(encoder(), Threads(streams, 1))
    made = start(engine)
    try:
        yield engine, made
    finally:
        made.leave()
        made.stop()
        engine.close()


def values(ended: Ended) -> Float:
    assert not isinstance(ended.result, Exception)
    return ended.result["last_hidden_state"]


@both
def test_batches_end_with_the_outputs_of_the_engine_and_notify_the_loop(
    start: Callable[[NativeEngine], Streams],
) -> None:
    batches = [rows(*[1 + number % 40] * (1 + number % 3), seed=number) for number in range(300)]

    async def main(streams: Streams) -> dict[int, Ended]:
        found: dict[int, Ended] = {}
        notified = asyncio.Event()
        streams.attend(asyncio.get_running_loop(), notified.set)
        breadths = itertools.cycle(Parallelism)
        tickets = [streams.submit(batch, next(breadths)) for batch in batches]
        while len(found) < len(batches):
            await asyncio.wait_for(notified.wait(), 60)
            notified.clear()
            found |= {one.ticket: one for one in streams.collect()}
        streams.leave()
        return {number: found[ticket] for number, ticket in enumerate(tickets)}

    with started(start) as (engine, streams):
        before = perf_counter()
        found = asyncio.run(main(streams))
        for number, ended in found.items():
            assert before <= ended.started <= ended.ended <= perf_counter()
            np.testing.assert_array_equal(values(ended), engine.run(batches[number])["last_hidden_state"])


@both
def test_a_batch_that_has_not_begun_can_be_cancelled(start: Callable[[NativeEngine], Streams]) -> None:
    with started(start, streams=1) as (_, streams):
        first, second, third = (streams.submit(batch, Parallelism.NARROW) for batch in (MANY, rows(3), rows(4)))
        assert streams.retract(second)
        found = collected(streams, 2)
        assert [one.ticket for one in found] == [first, third]
        last = streams.submit(MANY, Parallelism.NARROW)
        assert [one.ticket for one in collected(streams, 1)] == [last]


def test_two_graphs_of_ours_share_the_librarys_streams() -> None:
    """Those of short rows and of the others: each row is answered by its own."""
    long, short = opened(encoder(), Threads(2, 1)), opened(encoder(first=True), Threads(2, 1))
    routed = RoutedEngine(long, short, longest_tokens=8)
    streams = routed.start_streams()
    assert isinstance(streams, NativeStreams)
    batches = [rows(length) for length in range(4, 14)]
    tickets = [streams.submit(batch, breadth) for batch in batches for breadth in Parallelism]
    found = {one.ticket: one.result for one in collected(streams, len(tickets))}
    streams.stop()
    for ticket, batch in zip(tickets, [batch for batch in batches for _ in Parallelism], strict=True):
        result = found[ticket]
        assert not isinstance(result, Exception)
        own = (short if batch.input_ids.shape[1] <= 8 else long).run(batch)
        assert result.keys() == own.keys()
        for name in own:
            np.testing.assert_array_equal(result[name], own[name])
    routed.close()


def collected(streams: Streams, count: int) -> list[Ended]:
    found: list[Ended] = []
    end = perf_counter() + 60
    while len(found) < count:
        assert perf_counter() < end
        found += streams.collect()
        sleep(0.001)
    return found


@both
def test_a_batch_that_the_model_refuses_ends_with_its_error(start: Callable[[NativeEngine], Streams]) -> None:
    bad = rows(5)
    with started(start) as (engine, streams):
        streams.submit(Batch(bad.input_ids + WORDS, bad.attention_mask, bad.token_type_ids), Parallelism.NARROW)
        (ended,) = collected(streams, 1)
        assert isinstance(ended.result, InferenceFailed)
        streams.submit(bad, Parallelism.WIDE)
        (ended,) = collected(streams, 1)
        np.testing.assert_array_equal(values(ended), engine.run(bad)["last_hidden_state"])


@both
def test_stopping_runs_submitted_batches_and_ends_the_threads(start: Callable[[NativeEngine], Streams]) -> None:
    engine = opened(encoder(), Threads(2, 1), helpers=False)
    before = set(Path("/proc/self/task").iterdir())
    streams = start(engine)
    assert len(set(Path("/proc/self/task").iterdir()) - before) == 2
    for _ in range(20):
        streams.submit(MANY, Parallelism.NARROW)
    streams.stop()
    if isinstance(streams, ThreadStreams):
        assert len(streams.collect()) == 20
    else:  # the library's list of batches ends with its threads; the outputs belong to the caller
        assert isinstance(streams, NativeStreams)
        assert [job.record.ended > 0 for job in streams._runs.values()] == [True] * 20
    # The kernel removes a thread from its list a moment after the join has returned.
    until(lambda: not set(Path("/proc/self/task").iterdir()) - before, seconds=10)
    assert not set(Path("/proc/self/task").iterdir()) - before
    engine.close()


def test_the_first_sleeping_stream_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: dict[int, int] = {}

    def placed(thread: int, stream: int, streams: int) -> None:
        assert streams == 3
        numbers[stream] = thread

    monkeypatch.setattr(native_runs, "place_stream", placed)
    with started(NativeEngine.start_streams, streams=3) as (_, streams):
        assert sorted(numbers) == [0, 1, 2]
        for _ in range(20):
            sleep(0.005)  # until it sleeps
            streams.submit(rows(8), Parallelism.NARROW)
            collected(streams, 1)
        # Voluntary switches: how often each has gone to sleep.
        slept = {stream: switches(thread) for stream, thread in numbers.items()}

    assert slept[0] >= 20
    assert slept[1] < 20
    assert slept[2] < 20


def switches(thread: int) -> int:
    lines = Path(f"/proc/self/task/{thread}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_streams_of_several_threads_each_are_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    monkeypatch.setattr(native_runs, "place_stream", lambda thread, stream, streams: placed.append(thread))
    for per_stream, count in ((2, 0), (1, 2)):
        engine = opened(encoder(), Threads(2, per_stream))
        engine.start_streams().stop()
        engine.close()
        assert len(placed) == count
