"""What the optimisation does with candidates, as an interface: processes in earnest (`processes`), cost models in
tests. Every call may raise WorkerFailed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from penstock.manifest import GraphIO, Verdict
from penstock.recipe import Plan, Precision, Recipe
from penstock_optimizer.search.goal import Sample
from penstock_optimizer.search.space import WideFrom


class Value(BaseModel):
    """Goes between processes as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ExportedFacts(Value):
    """The fp32 graph on disk."""

    graph: str
    """Path."""
    io: GraphIO
    fused_nodes: dict[str, int]
    how: str
    parameters: int
    seconds: float


class BuiltFacts(Value):
    """A candidate's graph on disk, in its folder."""

    graph: str
    """File name."""
    io: GraphIO
    fused_nodes: dict[str, int]
    notes: tuple[str, ...] = ()
    size_bytes: int
    seconds: float


class GraphFile(Value):
    """A graph that can be loaded."""

    path: str
    io: GraphIO


class Session(Protocol):
    """One candidate in a process of its own. Times are hard limits: beyond them the process is killed."""

    def build(self, *, timeout_seconds: float) -> BuiltFacts:
        """Make the graph in the candidate's folder."""
        ...

    def judge(self, *, timeout_seconds: float) -> Verdict:
        """Ask the guard."""
        ...

    def time(self, lengths: Sequence[int], *, seconds: float, timeout_seconds: float) -> dict[int, list[float]]:
        """Milliseconds of single runs at batch 1 on all cores, by tokens; about `seconds` for each length."""
        ...

    def wide_from(self, lengths: Sequence[int], *, timeout_seconds: float) -> WideFrom:
        """The shortest of these lengths from which all cores answer a lone row sooner than one core, by so much that
        it pays among others, and for a client that is alone; None: none."""
        ...

    def lone(self, lengths: Sequence[int], *, wide: bool, timeout_seconds: float) -> dict[int, float]:
        """Median milliseconds of a lone row by tokens, on one core or on all, of an engine with a stream for each."""
        ...

    def sample(self, plan: Plan, *, timeout_seconds: float) -> Sample:
        """Measure a plan over the workload's length mix. The graph of its short rows, if it has one, is on disk."""
        ...

    def judge_plan(self, plan: Plan, *, timeout_seconds: float) -> Verdict:
        """Ask the guard about the answers of a plan with two graphs, each of which it let pass already."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


class Lab(Protocol):
    """Where candidates are made and measured."""

    def open(self, recipe: Recipe, *, built: BuiltFacts | None = None) -> Session:
        """A process for a candidate; `built` when its graph is there already."""
        ...

    def ceiling(self, precision: Precision, *, timeout_seconds: float) -> float:
        """The machine's matrix-product ceiling, 10^9 operations a second."""
        ...
