"""Rows that run in the caller's thread, on an engine that has a single-row run."""

from __future__ import annotations

from math import inf
from time import perf_counter

import pytest

from penstock.recipe import Batching
from penstock_runtime.batching.batcher import BatchResult
from penstock_runtime.engines.base import Parallelism
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Outputs, Row
from tests.runtime.batching.echo import POISON, EchoEngine, RowEchoEngine, plan, row
from tests.runtime.batching.test_batcher import Seen, working

FAST = 5_000
"""Tokens a second of each stream: 16 tokens take 3.2 ms."""


def run_inline(engine: EchoEngine, wanted: Row) -> BatchResult:
    with working(engine, plan(), tokens_per_second=FAST) as bench:
        outcome = bench.batcher.run_inline(wanted)
    assert outcome is not None
    return outcome


def test_a_single_row_run_uses_the_threads_of_a_batch_of_it() -> None:
    engine, observer = RowEchoEngine(streams=2), Seen()
    with working(engine, plan(streams=2, wide_alone=16), tokens_per_second=FAST, observer=observer) as bench:
        outcomes = [bench.batcher.run_inline(row(length)) for length in (15, 16)]

    assert [outcome.values for outcome in outcomes if outcome is not None] == [[7.0 * 15], [7.0 * 16]]
    assert engine.alone == [(15, Parallelism.NARROW), (16, Parallelism.WIDE)]
    assert engine.batches == []
    assert [observer.batches.get(timeout=60) for _ in range(2)] == [(1, 15, 15), (1, 16, 16)]


def test_a_row_without_a_single_row_run_runs_as_a_batch() -> None:
    engine = RowEchoEngine(longest_alone=2)

    assert run_inline(engine, row(3)).values == [21.0]
    assert (engine.alone, engine.batches) == ([], [[3]])


def test_brief_rows_use_the_single_row_run_if_they_are_alone() -> None:
    engine = RowEchoEngine()
    with working(engine, plan(Batching.EQUAL_LENGTH), tokens_per_second=FAST, one_core=True) as bench:
        for lengths in ((3, 3), (4,), (5, 6)):
            bench.push(*lengths)
        values = [value for outcome in bench.ready for value in outcome.values]

    assert values == [21.0, 21.0, 28.0, 35.0, 42.0]
    assert engine.alone == [(length, Parallelism.NARROW) for length in (4, 5, 6)]
    assert engine.batches == [[3, 3]]


def test_rows_of_the_streams_do_not_use_the_single_row_run() -> None:
    engine = RowEchoEngine()
    with working(engine, plan()) as bench:
        bench.push(5)
        assert bench.get().values == [35.0]

    assert (engine.alone, engine.batches) == ([], [[5]])


def test_a_failure_of_a_single_row_run_is_that_of_a_batch_and_is_not_retried() -> None:
    engine = RowEchoEngine()
    ((error,), (expected,)) = (run_inline(one, row(4, POISON)).values for one in (engine, EchoEngine()))

    assert isinstance(error, InferenceFailed)
    assert (error.message, error.remedy) == (expected.message, expected.remedy)
    assert engine.alone == [(4, Parallelism.NARROW)]
    assert engine.batches == []


def test_a_brief_row_that_fails_in_a_single_row_run_fails_alone() -> None:
    engine = RowEchoEngine()
    with working(engine, plan(), tokens_per_second=FAST) as bench:
        (failed,) = bench.push_rows([row(4, POISON)], owner="me")
        (fine,) = bench.push(4)
        outcomes = [bench.get(), bench.get()]

    assert [outcome.rows for outcome in outcomes] == [[failed], [fine]]
    assert isinstance(outcomes[0].values[0], InferenceFailed)
    assert outcomes[1].values == [28.0]
    assert engine.batches == []


def test_a_crash_of_a_single_row_run_fails_the_row_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(row: Row, parallelism: Parallelism) -> Outputs | None:
        raise ZeroDivisionError

    engine = RowEchoEngine()
    monkeypatch.setattr(engine, "run_row", crash)

    (error,) = run_inline(engine, row(4)).values

    assert isinstance(error, InferenceFailed)
    assert "ZeroDivisionError" in error.message
    assert engine.batches == []


@pytest.mark.parametrize(
    ("next_to_streams", "running", "lengths", "overtakes"),
    [
        (True, 32, (8,), True),
        (True, 31, (8,), False),  # may share a batch
        (True, 32, (4, 4), True),
        (True, 100, (21,), False),  # over two milliseconds
        (False, 32, (8,), False),
    ],
)
def test_a_brief_request_of_another_client_does_not_wait_for_the_end_of_a_long_row(
    next_to_streams: bool, running: int, lengths: tuple[int, ...], overtakes: bool
) -> None:
    engine = RowEchoEngine(next_to_streams=next_to_streams)
    engine.gate.clear()
    with working(engine, plan(), tokens_per_second=10_000) as bench:
        for client, wanted in (("long", (running,)), ("long", (running,)), ("brief", lengths)):
            bench.batcher.push(
                [row(one) for one in wanted], client, arrived=perf_counter(), deadline=inf, client=client
            )
            bench.dispatch()
        found = [outcome.rows[0].owner for outcome in bench.ready]

    assert found == ["brief"] * (len(lengths) if overtakes else 0)
    assert engine.alone == [(length, Parallelism.NARROW) for length in (lengths if overtakes else ())]
