"""The comparison with other servers: requests, answers, verdicts, written files."""

from __future__ import annotations

import pytest

from benchmarks.peers.answers import Agreement, Cosines, agreement
from benchmarks.peers.cells import MIXED, TRAFFIC, Cell, aims
from benchmarks.peers.outcome import Outcome, Standing, to_markdown
from benchmarks.peers.servers import (
    EMBED,
)
from penstock_bench.cell import CellResult
from penstock_bench.results import Figures
from tests.bench.conftest import StartStub


def figures(rate: float, p95: float = 10.0) -> Figures:
    cell = CellResult(seconds=1, completed_per_second=rate, latencies_milliseconds=(p95,) * 20, groups=(8,) * 20)
    return Figures.of([cell])


@pytest.mark.parametrize(
    ("cell", "ours", "theirs", "passed"),
    [
        (Cell(32, MIXED), figures(100, 30), figures(40, 80), [True]),
        (Cell(32, MIXED), figures(100, 40), figures(40, 80), [False]),
        (Cell(32, MIXED), figures(90, 30), figures(40, 80), [False]),
        (Cell(16, 32), figures(41), figures(40), [True]),
        (Cell(16, 32), figures(39), figures(40), [False]),
        (Cell(1, 8), figures(52), figures(40), [True]),
        (Cell(1, 8), figures(51), figures(40), [False]),
        (Cell(1, 128), figures(40), figures(40), [True]),
        (Cell(1, 128), figures(39), figures(40), [False]),
    ],
)
def test_aims(cell: Cell, ours: Figures, theirs: Figures, passed: list[bool]) -> None:
    found = aims(cell, {"penstock": ours, "tei": theirs}, ours="penstock", same_graph=("tei",), cores=2)

    assert [aim.passed for aim in found] == passed


def test_nothing_is_judged_on_a_busy_machine() -> None:
    busy = figures(100).model_copy(update={"foreign_cores": 1.0})

    (aim,) = aims(Cell(16, 32), {"penstock": busy, "tei": figures(10)}, ours="penstock", same_graph=(), cores=2)

    assert aim.passed is None
    assert aim.text == "10.00x the rate (ahead asked); others took 50% of the CPUs"


def test_one_odd_text_among_many_is_not_p1_but_the_minimum() -> None:
    reference = [[1.0, 0.0]] * 400
    odd = [[0.0, 1.0], *([[1.0, 0.0]] * 399)]

    found = Cosines.of(odd, reference)

    assert (found.minimum, found.p1) == (0, 1)
    assert not found.right


def test_a_server_that_answers_something_else_is_marked_not_raised(start_stub: StartStub) -> None:
    server = start_stub()

    found = agreement(server.url, EMBED, ["a"], [[1.0]])

    assert "KeyError" in found.error
    assert not found.right


def outcome() -> Outcome:
    return Outcome(
        cpu="Some CPU (AVX2, no VNNI)",
        cores=2,
        seconds=2.0,
        rounds=3,
        servers={"penstock": "chosen plan", "fast": "another", "broken": "a third"},
        agreements={
            "penstock": Agreement(Cosines(0.998, 0.991, 0.975), Cosines(0.998, 0.991, 0.975), 1.0),
            "fast": Agreement(Cosines(0.995, 0.99, 0.98), Cosines(0.98, 0.95, 0.85), 0.93),
            "broken": Agreement(None, None, 0, error="ValueError: status 500"),
        },
        standings=[
            Standing(TRAFFIC[0], "penstock", figures(100, 20)),
            Standing(TRAFFIC[0], "fast", figures(120, 20)),
            Standing(
                TRAFFIC[0], "broken", Figures.of([CellResult(seconds=1, failures={"500": 3}, first_failure="500")])
            ),
        ],
        aims=aims(
            TRAFFIC[0],
            {"penstock": figures(100, 20), "fast": figures(120, 20)},
            ours="penstock",
            same_graph=(),
            cores=2,
        ),
    )


def test_a_fast_server_with_wrong_answers_is_marked() -> None:
    text = to_markdown(outcome())

    alone, together = "0.9950 / 0.9900 / 0.9800", "0.9800 / 0.9500 / 0.8500"
    assert f"| fast | another | {alone} | {together} | 0.93000 | WRONG: 0.985 / 0.95 / 0.9 are asked |" in text
    assert "| fast (wrong answers) | 120.0 (20.0 / 20.0) |" in text
    assert "| penstock | 100.0 (20.0 / 20.0) |" in text
    assert "failed: 500" in text
    assert "| mixed lengths, 32 clients | fast | FAIL |" in text
