"""Measures servers in turn: short cells, one server at a time, the others stopped, several rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock_bench.measuring.cell import CellResult, CellSpec

FOREIGN_SHARE = 0.08
"""A cell in which others took more than this of the server's CPUs is measured again, once: the quieter one counts."""


class Measured(Protocol):
    """What `Server` is to this module."""

    @property
    def name(self) -> str:
        """In results."""
        ...

    @property
    def cpus(self) -> tuple[int, ...]:
        """Its CPUs."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes."""
        ...

    def pause(self) -> None:
        """Stop it."""
        ...

    def resume(self) -> None:
        """Let it go on."""
        ...

    def confine(self) -> None:
        """Keep its threads on its CPUs."""
        ...


@dataclass(frozen=True)
class Turn:
    """A server and what to send it."""

    server: Measured
    spec: CellSpec
    """Without `pids` and `cpus`: they are the server's."""


def measure_in_turn(
    turns: Sequence[Turn],
    measure: Callable[[CellSpec], CellResult],
    *,
    rounds: int,
    patience_seconds: float = 120.0,
    clock: Callable[[], float] = time.monotonic,
) -> Mapping[str, tuple[CellResult, ...]]:
    """The cells of each server by name, in the order of the rounds. Servers are paused before and after.

    Every round measures every server, the even ones in reverse order, so that a drift of the machine meets all alike.
    No round is begun after `patience_seconds`. A server that answers nothing in a round is left out of the next ones.
    """
    results: dict[str, list[CellResult]] = {turn.server.name: [] for turn in turns}
    for turn in turns:
        turn.server.pause()
    begun = clock()
    for number in range(rounds):
        if number and clock() - begun > patience_seconds:
            break
        for turn in turns if number % 2 == 0 else reversed(turns):
            cells = results[turn.server.name]
            if cells and not cells[-1].latencies_milliseconds:
                continue
            cells.append(_measure(turn, measure))
    return {name: tuple(cells) for name, cells in results.items()}


def _measure(turn: Turn, measure: Callable[[CellSpec], CellResult]) -> CellResult:
    server = turn.server
    server.resume()
    try:
        server.confine()
        spec = turn.spec.model_copy(update={"pids": server.pids, "cpus": server.cpus})
        cell = measure(spec)
        if is_disturbed(cell, spec):
            again = measure(spec)
            if (again.foreign_cores or 0.0) < (cell.foreign_cores or 0.0):
                return again
        return cell
    finally:
        server.pause()


def is_disturbed(cell: CellResult, spec: CellSpec) -> bool:
    """Whether others took a noticeable part of the server's CPUs. False where that is not known."""
    if cell.foreign_cores is None or not spec.cpus:
        return False
    return cell.foreign_cores > FOREIGN_SHARE * len(spec.cpus)
