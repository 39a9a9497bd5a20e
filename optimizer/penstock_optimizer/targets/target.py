"""The interface of a target, which optimises one kind of model, with the time budget and the results of its stages."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from penstock.errors import OptimizationError
from penstock.manifest import CandidateFacts, Manifest, Outcome, ReasonCode, ServedModel
from penstock.recipe import Recipe
from penstock_optimizer.candidate.isolation import NOT_QUIET, CallFailure, WorkerFailed
from penstock_optimizer.capacity.curve import ReplicaBroken, ReplicaServer
from penstock_optimizer.job.progress import ProgressReporter, Stage

EXPORT_SECONDS = 600.0
"""A large model through torch takes minutes; an export that takes longer hangs."""
CAPACITY_SHARE = 0.18
MOST_CAPACITY_SECONDS = 75.0
PLANS_SHARE = 0.25
MOST_PLANS_SECONDS = 90.0
FINISH_SHARE = 0.05
"""For the GEMM ceiling, the report and writing the artefact."""
MOST_FINISH_SECONDS = 20.0
MAX_REMAINING_SHARE = 0.6
"""The largest share of the remaining time that one candidate may use: one that hangs must leave time for the next."""
NOISY = 0.15
"""Above this scatter of repeated measurements, small differences mean nothing."""
RAISE_BUDGET = "Raise spec.optimization.budgetSeconds, or --budget"
"""The remedy where too little time was left."""


UNMEASURED = "Nothing was measured yet: this is the fp32 graph as it was exported."


@dataclass
class Budget:
    """Counts down from `seconds`, and reserves a share for each stage."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    plans_share: float = PLANS_SHARE
    """The share of the plan search; 0 for targets without one."""
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    @property
    def finish_seconds(self) -> float:
        """Seconds reserved for the work after measuring."""
        return min(self.seconds * FINISH_SHARE, MOST_FINISH_SECONDS)

    @property
    def capacity_seconds(self) -> float:
        """Seconds reserved for the capacity curve."""
        return min(self.seconds * CAPACITY_SHARE, MOST_CAPACITY_SECONDS)

    @property
    def plans_seconds(self) -> float:
        """Seconds reserved for the plan search."""
        return min(self.seconds * self.plans_share, MOST_PLANS_SECONDS)

    def left_for_candidates(self) -> float:
        """Seconds until building and judging must end; may be negative."""
        return self.left_for_plans() - self.plans_seconds

    def left_for_plans(self) -> float:
        """Seconds until the plan search must end; may be negative."""
        return self.left_for_capacity() - self.capacity_seconds

    def left_for_capacity(self) -> float:
        """Seconds until the capacity curve must end; may be negative."""
        return self.seconds - self.finish_seconds - self.spent

    def left(self) -> float:
        """Seconds until the whole must end; may be negative."""
        return self.seconds - self.spent

    def plans_deadline(self) -> Callable[[], bool]:
        """A function that is true while the plan search, which begins now, may go on: until its own limit or the end of
        the time left."""
        end = self.spent + min(self.plans_seconds, self.left_for_plans())
        return lambda: self.spent < end


@dataclass(frozen=True)
class ChosenModel:
    """The models to serve, and the evidence for them."""

    chosen: ServedModel
    baseline: ServedModel
    graphs: Mapping[Recipe, Path]
    """The graph files of both."""
    parameters: int
    """Weights of the model."""
    candidates: Sequence[CandidateFacts]
    findings: Sequence[str] = ()
    notes: Sequence[str] = ()
    """Clauses for the end of the findings, such as those about the export."""
    caveat: str = ""
    """A clause about the plan, for the last line of the progress."""
    cut_short: bool = False
    """A larger time budget may find something better, besides trying the late candidates."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the manifest, by name."""

    @classmethod
    def unmeasured(cls, served: ServedModel, graph: Path, parameters: int, **about: Any) -> ChosenModel:
        """The fp32 graph as it was exported. `about`: fields of CandidateFacts, and `notes` and `fields`."""
        of_choice = {name: about.pop(name) for name in ("notes", "fields") if name in about}
        recipe = served.plan.recipe
        facts = CandidateFacts(
            recipe=recipe, outcome=Outcome.CHOSEN, reason="the fp32 graph as it was exported", **about
        )
        return cls(served, served, {recipe: graph}, parameters, [facts], [UNMEASURED], **of_choice)


@dataclass(frozen=True)
class MeasuredCapacity:
    """The capacity of one replica."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the manifest."""
    missed: Sequence[str] = ()
    """Findings: the objective is not reached."""
    doubts: Sequence[str] = ()
    """Findings: it was measured in part."""


class Target(ABC):
    """One kind of model: encoder, decoder, or compiled for Inferentia. The methods are called in the order listed."""

    reference: ClassVar[Recipe]
    """The recipe that all candidates are compared with."""
    measures_capacity: ClassVar[bool] = True
    judges_live: ClassVar[bool] = False
    """The guard of live traffic can compare answers of such a model."""
    budget: Budget
    events: ProgressReporter

    @property
    @abstractmethod
    def candidates(self) -> Sequence[CandidateFacts]:
        """All candidates that have an outcome, the reference first."""

    @abstractmethod
    def export(self, seconds: float) -> tuple[str, Mapping[str, Any]]:
        """Write the fp32 graph within `seconds`, unless it exists. Returns a line for people and facts about it."""

    def unmeasured(self) -> ChosenModel | None:
        """The exported fp32 graph; None for targets without an fp32 artefact."""
        return None

    @abstractmethod
    def try_candidates(self) -> None:
        """Build, judge and time the candidates within the time budget."""

    @abstractmethod
    def choose(self) -> ChosenModel:
        """Choose the recipe and the plan to serve."""

    def close(self) -> None:
        """End the stage of the candidates and their processes. Also called after an error."""
        self.events.finish(Stage.CANDIDATES)

    def capacity(self, server: ReplicaServer) -> MeasuredCapacity:
        """Measure the capacity of a replica. CapacityFailed and ReplicaBroken as in `capacity.curve`."""
        raise RuntimeError(f"{type(self).__name__} measures no capacity of {server}")

    def instead(self, choice: ChosenModel, failure: ReplicaBroken) -> ChosenModel | None:
        """Choose something else than a choice with which a replica breaks; None where there is nothing else."""
        raise RuntimeError(f"{type(self).__name__} measures no capacity: {choice}, {failure}")

    def finish(self, manifest: Manifest) -> Manifest:
        """Complete the manifest with measurements that nothing depends on."""
        return manifest


def export_failed(failure: WorkerFailed, seconds: float) -> Exception:
    """The error of an export that had `seconds` of a time budget."""
    if failure.failure is CallFailure.TIMED_OUT and seconds < EXPORT_SECONDS:
        return OptimizationError(
            f"the time budget ended before the fp32 graph was written: {failure.reason}", remedy=RAISE_BUDGET
        )
    return failure.as_error("the model could not be exported")


def sentences(clauses: Iterable[str]) -> Iterator[str]:
    """Clauses as sentences."""
    return (f"{one[:1].upper()}{one[1:].rstrip('.')}." for one in clauses)


def measured_noise(search: float, candidates: Sequence[CandidateFacts]) -> float:
    """Relative scatter of repeated measurements: the larger one of the plan search and of the single runs."""
    spreads = [point.spread for one in candidates for point in one.latency]
    return max(search, median(spreads) if spreads else 0.0)


def of_company(noise: float, contention: float) -> Iterator[str]:
    """Other programs, or other machines of the same host, changed the figures of the search."""
    if contention > NOT_QUIET:
        yield (
            f"This machine was not quiet: what was measured waited {contention:.0%} of its time for a CPU. The figures "
            "and the choice are of a busy machine. When the other work has ended, delete the artefact (on a cluster: "
            "its OptimizedModel) and run the optimisation again."
        )
    if noise > NOISY:
        cause = "" if contention > NOT_QUIET else ": something else ran on this machine, or its clock moved"
        yield f"Repeated measurements differed by {noise:.0%}{cause}. Differences below that are not to be trusted."


def late(candidates: Sequence[CandidateFacts]) -> int:
    """How many candidates a larger time budget would try, or try again. A plan that was not tried does not count: a
    larger budget need not give the plan search more time."""
    codes = [one.reason_code for one in candidates]
    return sum(
        (code.is_out_of_time and code is not ReasonCode.NO_PLAN_TRIED) or code is ReasonCode.TIMED_OUT for code in codes
    )


def of_late_candidates(candidates: Sequence[CandidateFacts]) -> Iterator[str]:
    """The time budget was too small for all candidates."""
    if count := late(candidates):
        yield (
            f"The time budget ended before {count} candidate{'s' if count > 1 else ''} "
            "had a turn: a larger one goes on from here."
        )
