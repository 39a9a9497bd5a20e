"""The lab in earnest: each candidate in a worker process (`candidate`), kept on the cores that will serve."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from typing import Any

from penstock.manifest import Verdict
from penstock.recipe import EngineName, Plan, Precision, Recipe
from penstock_optimizer.candidate.candidate import Subject
from penstock_optimizer.candidate.isolation import Failure, Worker, WorkerFailed
from penstock_optimizer.candidate.lab import BuiltFacts, ExportedFacts, GraphFile
from penstock_optimizer.job.work_folder import WorkFolder
from penstock_optimizer.search.goal import Sample
from penstock_optimizer.search.recipes import TEACHER
from penstock_optimizer.search.space import WideFrom

TARGET = "penstock_optimizer.candidate.candidate:Candidate"
FLAVOURS = {EngineName.ONNXRUNTIME: "fused", EngineName.OPENVINO: "plain", EngineName.NATIVE: "fused"}
"""Which form of the fp32 graph an engine's candidates are made from."""
CONFIGURE_SECONDS = 60.0
"""Starting Python and importing, on a busy machine."""


class ProcessSession:
    """See `Session`."""

    def __init__(self, lab: ProcessLab, recipe: Recipe, built: BuiltFacts | None) -> None:
        self._lab = lab
        self._recipe = recipe
        self._folder = lab.work.candidate(recipe)
        self._worker = Worker(TARGET, log=lab.work.log(recipe.slug), cpus=lab.cpus)
        self._built = built
        self._configured = False

    def build(self, *, timeout_seconds: float) -> BuiltFacts:
        """See `Session`."""
        self._built = self._lab.copy_of_the_same(self._recipe)
        if self._built is not None:
            return self._built
        exported = self._lab.exported(FLAVOURS[self._recipe.engine], timeout_seconds=timeout_seconds)
        value = self._call(
            "build",
            timeout_seconds,
            exported={"path": exported.graph, "io": exported.io.model_dump(mode="json")},
            out=str(self._folder),
        )
        self._built = BuiltFacts.model_validate(value)
        if not self._built.fused_nodes and self._recipe == TEACHER:
            # The quantiser copies the teacher as it is: what was fused, the export knows.
            self._built = self._built.model_copy(update={"fused_nodes": exported.fused_nodes})
        return self._built

    def judge(self, *, timeout_seconds: float) -> Verdict:
        """See `Session`."""
        method = "teach" if self._recipe == TEACHER else "judge"
        return Verdict.model_validate(self._call(method, timeout_seconds, file=str(self._lab.work.teacher)))

    def time(self, lengths: Sequence[int], *, seconds: float, timeout_seconds: float) -> dict[int, list[float]]:
        """See `Session`."""
        value = self._call("time", timeout_seconds, lengths=list(lengths), seconds=seconds)
        return {int(tokens): times for tokens, times in value.items()}

    def wide_from(self, lengths: Sequence[int], *, timeout_seconds: float) -> WideFrom:
        """See `Session`."""
        return WideFrom(*self._call("wide_from", timeout_seconds, lengths=list(lengths)))

    def lone(self, lengths: Sequence[int], *, wide: bool, timeout_seconds: float) -> dict[int, float]:
        """See `Session`."""
        value = self._call("lone", timeout_seconds, lengths=list(lengths), wide=wide)
        return {int(tokens): milliseconds for tokens, milliseconds in value.items()}

    def sample(self, plan: Plan, *, timeout_seconds: float) -> Sample:
        """See `Session`."""
        return Sample.model_validate(self._call("sample", timeout_seconds, **self._planned(plan)))

    def judge_plan(self, plan: Plan, *, timeout_seconds: float) -> Verdict:
        """See `Session`."""
        file = str(self._lab.work.teacher)
        return Verdict.model_validate(self._call("judge_plan", timeout_seconds, file=file, **self._planned(plan)))

    def close(self) -> None:
        """See `Session`."""
        self._worker.close()

    def _planned(self, plan: Plan) -> dict[str, Any]:
        """The plan as a call's arguments, with the graph of its short rows. WorkerFailed when that is not there."""
        arguments: dict[str, Any] = {"plan": plan.model_dump(mode="json")}
        if plan.short is not None:
            recipe = plan.short.recipe
            known = self._lab.work.load(recipe)
            if known is None or known.io is None or not known.graph:
                raise WorkerFailed(Failure.RAISED, f"the graph of {recipe.name} is not in the work folder any more")
            graph = GraphFile(path=str(self._lab.work.candidate(recipe) / known.graph), io=known.io)
            arguments["short"] = graph.model_dump(mode="json")
        return arguments

    def _call(self, method: str, timeout_seconds: float, **arguments: Any) -> Any:
        if not self._configured:
            limit = max(timeout_seconds, CONFIGURE_SECONDS)
            self._worker.call(
                "configure",
                timeout_seconds=limit,
                subject=self._lab.subject.model_dump(mode="json"),
                recipe=self._recipe.model_dump(mode="json"),
            )
            self._configured = True
            if self._built is not None and method != "build":
                graph = GraphFile(path=str(self._folder / self._built.graph), io=self._built.io)
                self._worker.call("use", timeout_seconds=limit, graph=graph.model_dump(mode="json"))
        return self._worker.call(method, timeout_seconds=timeout_seconds, **arguments)


class ProcessLab:
    """See `Lab`."""

    def __init__(self, subject: Subject, work: WorkFolder, cpus: Sequence[int]) -> None:
        self.subject = subject
        self.work = work
        self.cpus = tuple(cpus)
        self._exported: dict[str, ExportedFacts] = {}
        self._failed: dict[str, WorkerFailed] = {}

    def open(self, recipe: Recipe, *, built: BuiltFacts | None = None) -> ProcessSession:
        """See `Lab`."""
        return ProcessSession(self, recipe, built)

    def copy_of_the_same(self, recipe: Recipe) -> BuiltFacts | None:
        """Another recipe's graph that is also this one's, copied; None when none was made yet, or not whole."""
        begin = time.perf_counter()
        for other in {recipe.as_built, recipe.with_bf16_rest} - {recipe}:
            known = self.work.load(other)
            if known is not None and known.graph and known.io is not None:
                shutil.copytree(self.work.candidate(other), self.work.candidate(recipe), dirs_exist_ok=True)
                return BuiltFacts(
                    graph=known.graph,
                    io=known.io,
                    fused_nodes=known.facts.fused_nodes,
                    size_bytes=known.facts.size_bytes,
                    seconds=time.perf_counter() - begin,
                )
        return None

    def exported(self, flavour: str, *, timeout_seconds: float) -> ExportedFacts:
        """The fp32 graph of a flavour, written once. A failure is final: each candidate of the flavour gets it."""
        if flavour in self._failed:
            raise self._failed[flavour]
        if flavour not in self._exported:
            try:
                self._exported[flavour] = self._export(flavour, timeout_seconds)
            except WorkerFailed as failure:
                if failure.failure is not Failure.TIMED_OUT:
                    self._failed[flavour] = failure
                raise
        return self._exported[flavour]

    def ceiling(self, precision: Precision, *, timeout_seconds: float) -> float:
        """See `Lab`."""
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
        # What a killed run, a damaged disk or an earlier version left there is no part of this export.
        shutil.rmtree(folder, ignore_errors=True)
        with self._worker(f"export-{flavour}") as worker:
            value = worker.call("export", timeout_seconds=timeout_seconds, out=str(folder), flavour=flavour)
        facts = ExportedFacts.model_validate(value)
        self.work.save_export(flavour, facts)
        return facts

    def _worker(self, name: str) -> Worker:
        worker = Worker(TARGET, log=self.work.log(name), cpus=self.cpus)
        try:
            worker.call("configure", timeout_seconds=CONFIGURE_SECONDS, subject=self.subject.model_dump(mode="json"))
        except BaseException:
            worker.close()
            raise
        return worker
