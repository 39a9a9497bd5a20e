"""Runs candidates: the interface that the optimisation uses, and its implementation with worker processes.

`ProcessRunner` starts one worker process for each candidate (`candidate`), pinned to the cores that will serve. Tests
use an implementation with a cost model. Every call may raise WorkerFailed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.manifest import Frozen, Verdict
from penstock.recipe import EngineName, Plan, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget, Workload
from penstock.tasks import TaskName
from penstock_optimizer.candidate.isolation import CallFailure, CpuTime, Worker, WorkerFailed
from penstock_optimizer.candidate.work_folder import BuiltFacts, ExportedFacts, GraphFile, WorkFolder
from penstock_optimizer.search.goal import PlanSample
from penstock_optimizer.search.recipes import REFERENCE
from penstock_optimizer.search.space import WideFrom


class CandidateContext(Frozen):
    """What all candidates of an optimisation have in common."""

    model: str
    """The model's folder."""
    task: TaskName
    max_tokens: int
    """The longest row: the model's limit, or the endpoint's."""
    workload: Workload = Workload()
    accuracy: AccuracyBudget = AccuracyBudget()
    cores: int
    requests_per_second: float | None = None
    """The rate for p95, where the objective has both."""


class CandidateSession(Protocol):
    """One candidate in a separate process. Time limits are hard: beyond them the process is killed."""

    def build(self, *, timeout_seconds: float) -> BuiltFacts:
        """Make the graph in the candidate's folder."""

    def judge(self, *, timeout_seconds: float) -> Verdict:
        """Get the guard's verdict."""

    def time(self, lengths: Sequence[int], *, seconds: float, timeout_seconds: float) -> dict[int, list[float]]:
        """Milliseconds of single runs at batch 1 on all cores, by tokens; about `seconds` for each length."""

    def wide_from(self, lengths: Sequence[int], *, timeout_seconds: float) -> WideFrom:
        """The shortest of these lengths from which all cores answer a lone row sooner than one core: by enough to pay
        among other clients, and for a client that is alone. None: at no length."""

    def lone(self, lengths: Sequence[int], *, wide: bool, timeout_seconds: float) -> dict[int, float]:
        """Median milliseconds of a lone row by tokens, on one core or on all, of an engine with one stream for each
        core."""

    def sample(self, plan: Plan, *, timeout_seconds: float) -> PlanSample:
        """Measure a plan over the workload's length mix. The graph of its short rows, if it has one, is on disk."""

    def judge_plan(self, plan: Plan, *, timeout_seconds: float) -> Verdict:
        """Get the guard's verdict on a plan with two graphs, each of which it has accepted."""

    def close(self) -> None:
        """End the process."""


class CandidateRunner(Protocol):
    """Makes and measures candidates."""

    def open(self, recipe: Recipe, *, built: BuiltFacts | None = None) -> CandidateSession:
        """Start the process of a candidate; `built` when its graph exists."""

    def ceiling(self, precision: Precision, *, timeout_seconds: float) -> float:
        """The machine's matrix-product ceiling, 10^9 operations a second."""


TARGET = "penstock_optimizer.candidate.encoder:Candidate"
FLAVOURS = {EngineName.ONNXRUNTIME: "fused", EngineName.OPENVINO: "plain", EngineName.NATIVE: "fused"}
"""The form of the fp32 graph that an engine's candidates are made from."""


class ProcessSession:
    """A CandidateSession in a worker process."""

    def __init__(self, runner: ProcessRunner, recipe: Recipe, built: BuiltFacts | None) -> None:
        self._runner = runner
        self._recipe = recipe
        self._folder = runner.work.candidate(recipe)
        log = runner.work.log(recipe.slug)
        self._worker = runner.worker(log, self._configuration)
        self._built = built

    def build(self, *, timeout_seconds: float) -> BuiltFacts:
        """See `CandidateSession`."""
        self._built = self._runner.copy_of_the_same(self._recipe)
        if self._built is not None:
            return self._built
        exported = self._runner.exported(FLAVOURS[self._recipe.engine], timeout_seconds=timeout_seconds)
        value = self._call(
            "build",
            timeout_seconds,
            exported={"path": exported.graph, "io": exported.io.model_dump(mode="json")},
            out=str(self._folder),
        )
        self._built = BuiltFacts.model_validate(value)
        if not self._built.fused_nodes and self._recipe == REFERENCE:
            # The quantiser copies the reference as it is: only the export has the counts of fused nodes.
            self._built = self._built.model_copy(update={"fused_nodes": exported.fused_nodes})
        return self._built

    def judge(self, *, timeout_seconds: float) -> Verdict:
        """See `CandidateSession`."""
        method = "observe_reference" if self._recipe == REFERENCE else "judge"
        return Verdict.model_validate(self._call(method, timeout_seconds, file=str(self._runner.work.reference)))

    def time(self, lengths: Sequence[int], *, seconds: float, timeout_seconds: float) -> dict[int, list[float]]:
        """See `CandidateSession`."""
        value = self._call("time", timeout_seconds, lengths=list(lengths), seconds=seconds)
        return {int(tokens): times for tokens, times in value.items()}

    def wide_from(self, lengths: Sequence[int], *, timeout_seconds: float) -> WideFrom:
        """See `CandidateSession`."""
        return WideFrom(*self._call("wide_from", timeout_seconds, lengths=list(lengths)))

    def lone(self, lengths: Sequence[int], *, wide: bool, timeout_seconds: float) -> dict[int, float]:
        """See `CandidateSession`."""
        value = self._call("lone", timeout_seconds, lengths=list(lengths), wide=wide)
        return {int(tokens): milliseconds for tokens, milliseconds in value.items()}

    def sample(self, plan: Plan, *, timeout_seconds: float) -> PlanSample:
        """See `CandidateSession`."""
        return PlanSample.model_validate(self._call("sample", timeout_seconds, **self._planned(plan)))

    def judge_plan(self, plan: Plan, *, timeout_seconds: float) -> Verdict:
        """See `CandidateSession`."""
        file = str(self._runner.work.reference)
        return Verdict.model_validate(self._call("judge_plan", timeout_seconds, file=file, **self._planned(plan)))

    def close(self) -> None:
        """See `CandidateSession`."""
        self._worker.close()

    def _planned(self, plan: Plan) -> dict[str, Any]:
        """The plan as arguments of a call, with the graph of its short rows. WorkerFailed when that is missing."""
        arguments: dict[str, Any] = {"plan": plan.model_dump(mode="json")}
        if plan.short is not None:
            recipe = plan.short.recipe
            known = self._runner.work.load(recipe)
            built = known.built if known is not None else None
            if built is None:
                raise WorkerFailed(CallFailure.RAISED, f"the graph of {recipe.name} is not in the work folder any more")
            graph = GraphFile(path=str(self._runner.work.candidate(recipe) / built.graph), io=built.io)
            arguments["short"] = graph.model_dump(mode="json")
        return arguments

    def _configuration(self) -> dict[str, Any]:
        """The arguments of `Candidate.configure`, with the graph if there is one."""
        built = self._built
        graph = None if built is None else GraphFile(path=str(self._folder / built.graph), io=built.io)
        return {"context": self._runner.context, "recipe": self._recipe, "graph": graph}

    def _call(self, method: str, timeout_seconds: float, **arguments: Any) -> Any:
        return self._worker.call(method, timeout_seconds=timeout_seconds, **arguments)


class ProcessRunner:
    """A CandidateRunner with worker processes."""

    def __init__(self, context: CandidateContext, work: WorkFolder, cpus: Sequence[int]) -> None:
        self.context = context
        self.work = work
        self.cpus = tuple(cpus)
        self._workers: list[Worker] = []
        self._exported: dict[str, ExportedFacts] = {}
        self._failed: dict[str, WorkerFailed] = {}

    def open(self, recipe: Recipe, *, built: BuiltFacts | None = None) -> ProcessSession:
        """See `CandidateRunner`."""
        return ProcessSession(self, recipe, built)

    def copy_of_the_same(self, recipe: Recipe) -> BuiltFacts | None:
        """Copy the graph of another recipe that has the same one; None when there is none, or it is incomplete."""
        begin = time.perf_counter()
        for other in {recipe.as_built, recipe.with_bf16_rest} - {recipe}:
            known = self.work.load(other)
            built = known.built if known is not None else None
            if built is not None:
                shutil.copytree(self.work.candidate(other), self.work.candidate(recipe), dirs_exist_ok=True)
                return built.model_copy(update={"seconds": time.perf_counter() - begin})
        return None

    def exported(self, flavour: str, *, timeout_seconds: float) -> ExportedFacts:
        """The fp32 graph of a flavour, written once. A failure is final: each candidate of the flavour gets it."""
        if flavour in self._failed:
            raise self._failed[flavour]
        if flavour not in self._exported:
            try:
                self._exported[flavour] = self._export(flavour, timeout_seconds)
            except WorkerFailed as failure:
                if failure.failure is not CallFailure.TIMED_OUT:
                    self._failed[flavour] = failure
                raise
        return self._exported[flavour]

    def ceiling(self, precision: Precision, *, timeout_seconds: float) -> float:
        """See `CandidateRunner`."""
        folder = self.work.path / "gemm"
        with self._worker("gemm") as worker:
            value = worker.call(
                "ceiling", timeout_seconds=timeout_seconds, precision=precision.value, folder=str(folder)
            )
        return float(value)

    def _export(self, flavour: str, timeout_seconds: float) -> ExportedFacts:
        known = self.work.load_export(flavour)
        if known is not None:
            return known
        folder = self.work.export(flavour)
        # Leftovers of a killed run, a damaged disk or an earlier version are no part of this export.
        shutil.rmtree(folder, ignore_errors=True)
        with self._worker(f"export-{flavour}") as worker:
            value = worker.call("export", timeout_seconds=timeout_seconds, out=str(folder), flavour=flavour)
        facts = ExportedFacts.model_validate(value)
        self.work.save_export(flavour, facts)
        return facts

    @property
    def contention(self) -> float:
        """The share of the measured time in which the threads of the candidates waited for a CPU, 0 to 1."""
        return sum((worker.contention for worker in self._workers), CpuTime()).share

    def worker(self, log: Path, configuration: Callable[[], Mapping[str, Any]]) -> Worker:
        """A process for candidates."""
        self._workers.append(Worker(TARGET, log=log, cpus=self.cpus, configuration=configuration))
        return self._workers[-1]

    def _worker(self, name: str) -> Worker:
        return self.worker(self.work.log(name), lambda: {"context": self.context})
