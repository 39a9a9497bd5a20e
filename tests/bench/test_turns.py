"""Servers measured in turn: order, pauses, repetition of disturbed cells."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock_bench.cell import CellResult, CellSpec, Turn, measure_in_turn
from penstock_optimizer.load.client import RequestBody

NUMBERS = {"a": 1, "b": 2, "c": 3}


class FakeServer:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.cpus = (0, 1)
        self._log = log

    @property
    def pids(self) -> tuple[int, ...]:
        return (NUMBERS[self.name],)

    def pause(self) -> None:
        self._log.append(f"pause {self.name}")

    def resume(self) -> None:
        self._log.append(f"resume {self.name}")

    def confine(self) -> None:
        self._log.append(f"confine {self.name}")


def turn(name: str, log: list[str]) -> Turn:
    spec = CellSpec(url="http://127.0.0.1:1/predict", bodies=(RequestBody(body="{}"),))
    return Turn(FakeServer(name, log), spec)


def result(*milliseconds: float, foreign: float = 0.0) -> CellResult:
    return CellResult(seconds=1, latencies_milliseconds=milliseconds, completed_per_second=1, foreign_cores=foreign)


def test_each_round_measures_every_server_alone_and_every_second_round_is_reversed() -> None:
    log: list[str] = []
    seen: list[int] = []

    def measure(spec: CellSpec) -> CellResult:
        seen.extend(spec.pids)
        log.append(f"measure {spec.pids[0]}")
        return result(1)

    found = measure_in_turn([turn("a", log), turn("b", log), turn("c", log)], measure, rounds=2)

    assert seen == [1, 2, 3, 3, 2, 1]
    assert log[:3] == ["pause a", "pause b", "pause c"]
    assert log[3:7] == ["resume a", "confine a", "measure 1", "pause a"]
    assert {name: len(cells) for name, cells in found.items()} == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("first", "again", "counts"), [((5, 1.0), (3, 0.1), 3), ((5, 0.5), (3, 0.9), 5)], ids=["quieter", "noisier"]
)
def test_a_disturbed_cell_is_measured_again_and_the_quieter_one_counts(
    first: tuple[float, float], again: tuple[float, float], counts: float
) -> None:
    answers = iter([result(milliseconds, foreign=foreign) for milliseconds, foreign in (first, again)])

    found = measure_in_turn([turn("a", [])], lambda _: next(answers), rounds=1)

    assert found["a"][0].latencies_milliseconds == (counts,)


def test_a_server_that_answers_nothing_is_not_asked_again() -> None:
    asked: list[int] = []

    def measure(spec: CellSpec) -> CellResult:
        asked.append(spec.pids[0])
        return result() if spec.pids == (1,) else result(1)

    measure_in_turn([turn("a", []), turn("b", [])], measure, rounds=3)

    assert asked == [1, 2, 2, 2]


def test_no_round_begins_after_the_time_limit() -> None:
    times: Sequence[float] = (0.0, 50.0, 130.0)
    clock = iter(times)

    found = measure_in_turn(
        [turn("a", [])], lambda _: result(1), rounds=9, patience_seconds=120, clock=lambda: next(clock)
    )

    assert len(found["a"]) == 2


def test_a_server_is_paused_even_when_measuring_fails() -> None:
    log: list[str] = []

    def fail(_: CellSpec) -> CellResult:
        raise RuntimeError("the client is gone")

    with pytest.raises(RuntimeError):
        measure_in_turn([turn("a", log)], fail, rounds=1)

    assert log[-1] == "pause a"
