"""Optimises an encoder for this machine's CPUs: screening of recipes, plan search, capacity by arrival rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.errors import OptimizationError
from penstock.manifest import CandidateFacts, Manifest, Outcome, ServedGraph, ServedModel
from penstock.recipe import Batching, Plan, Recipe
from penstock.resources.endpoint import OptimizationMode
from penstock_optimizer.candidate.gemm import EncoderShape, gemm_shares
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from penstock_optimizer.candidate.runner import ProcessRunner
from penstock_optimizer.candidate.work_folder import ExportedFacts
from penstock_optimizer.capacity.curve import measure_capacity
from penstock_optimizer.capacity.server import ReplicaBroken, ReplicaServer
from penstock_optimizer.job import conclusions
from penstock_optimizer.job.artefact import graph_path
from penstock_optimizer.job.conclusions import conclude, plan_trials, speed_up
from penstock_optimizer.job.job import Job
from penstock_optimizer.job.progress import OnProgressEvent, ProgressReporter, Stage, export_message
from penstock_optimizer.load.workload import measured_lengths, workload_bodies
from penstock_optimizer.search.climb import SearchResult, Trials
from penstock_optimizer.search.goal import Goal
from penstock_optimizer.search.recipes import REFERENCE, by_gain, candidate_recipes
from penstock_optimizer.search.space import PlanLimits, WideFrom, first_plan
from penstock_optimizer.targets.plan_search import PlanSearch, is_exhaustive
from penstock_optimizer.targets.screening import (
    LEAST_SECONDS,
    ROUNDS,
    CandidateRun,
    Screening,
    max_open_processes,
)
from penstock_optimizer.targets.target import (
    EXPORT_SECONDS,
    RAISE_BUDGET,
    Budget,
    Capacity,
    Choice,
    Target,
    export_failed,
)
from penstock_runtime.tasks.factory import head_of

CEILING_SECONDS = 30.0
WRITING_SECONDS = 1.5
"""Reserved for copying the artefact and making the report."""
WIDE_FROM = WideFrom(64, 64)
"""Not measured: from about this length on, a lone row gains from all cores with every engine and model that was tried.
"""
CAPACITY_BODIES = 400
"""Number of different requests: none is repeated often enough for a cache to matter."""
EXPECTED_PLANS = 12
EXPECTED_POINTS = 10


def baseline_plan(cores: int, batching: Batching = Batching.EQUAL_LENGTH) -> Plan:
    """The fp32 plan, not measured. It batches equal lengths only, until the guard has proved that padding changes
    nothing."""
    return first_plan(REFERENCE, PlanLimits(cores, batching, ()), wide_from=WIDE_FROM)


class EncoderTarget(Target):
    """See `Target`."""

    reference = REFERENCE

    def __init__(self, job: Job, seconds: float, on_progress: OnProgressEvent) -> None:
        self._job = job
        self.budget = Budget(seconds)
        self._runner = ProcessRunner(job.context, job.work, job.cpus)
        self._exported: ExportedFacts | None = None
        optimization = job.spec.optimization
        self._searches = optimization.mode is OptimizationMode.AUTO
        self._recipes = candidate_recipes(job.host.cpu.isa, optimization.engines, optimization.precisions)
        self.events = ProgressReporter(
            on_progress,
            {
                Stage.EXPORT: 1,
                Stage.CANDIDATES: len(self._recipes.recipes) + len(self._recipes.skipped) if self._searches else 1,
                Stage.MEASURE: ROUNDS,
                Stage.PLANS: EXPECTED_PLANS if self._searches else 0,
                Stage.CAPACITY: EXPECTED_POINTS,
                Stage.REPORT: 1,
            },
        )

    def export(self, seconds: float) -> tuple[str, Mapping[str, Any]]:
        """See `Target`."""
        try:
            found = self._runner.exported("fused", timeout_seconds=min(max(seconds, 0.0), EXPORT_SECONDS))
        except WorkerFailed as failure:
            raise export_failed(failure, seconds) from failure
        self._exported = found
        facts = {"seconds": found.seconds, "fused_nodes": found.fused_nodes, "parameters": found.parameters}
        return export_message(found), facts

    def unmeasured(self) -> Choice:
        """See `Target`."""
        exported = self._export
        graph = Path(exported.graph)
        plan = baseline_plan(self._job.grant.cores)
        return Choice.unmeasured(
            ServedModel(path=graph_path(REFERENCE, graph), io=exported.io, plan=plan),
            graph,
            exported.parameters,
            notes=exported.notes,
            fused_nodes=exported.fused_nodes,
            build_seconds=exported.seconds,
            size_bytes=graph.stat().st_size,
        )

    def try_candidates(self) -> None:
        """See `Target`."""
        budget = self.budget
        if budget.left_for_capacity() < LEAST_SECONDS:
            raise self._no_time(f"it ended after {budget.spent:.1f} s")
        screening = self._screening
        try:
            screening.enter(REFERENCE, reference=True)
            if self._searches:
                for recipe in by_gain(self._recipes.recipes[1:], self._job.host.cpu.isa):
                    self.events.trying(recipe)
                    screening.enter(recipe)
                for skipped in self._recipes.skipped:
                    screening.skip(skipped.recipe, skipped.reason)
            screening.measure(on_round=lambda number: self.events.round(number, ROUNDS))
        except WorkerFailed as failure:
            if failure.failure is CallFailure.TIMED_OUT:
                # The reference may use all the time that is left: running out of it does not make the graph a bad one.
                raise self._no_time(failure.reason) from failure
            raise failure.as_error("the fp32 graph does not run") from failure

    @property
    def candidates(self) -> list[CandidateFacts]:
        """See `Target`."""
        return [run.facts for run in self._screening.runs]

    def choose(self) -> Choice:
        """See `Target`."""
        self._result = self._find_plan()
        self._screening.close()
        return self._choice()

    def capacity(self, server: ReplicaServer) -> Capacity:
        """See `Target`."""
        job = self._job
        spec, tokenizer = job.spec, job.tokenizer
        measured = measure_capacity(
            server,
            workload_bodies(
                spec.task,
                tokenizer.backend,
                spec.workload,
                job.mix,
                count=CAPACITY_BODIES,
                mask_token=tokenizer.mask_token,
                side=tokenizer.side,
            ),
            p95_objective=spec.objective.latency.p95_milliseconds if spec.objective.latency else None,
            load_cpus=job.load_cpus or job.host.allowed,
            seconds_left=self.budget.left_for_capacity,
            on_point=self.events.point,
        )
        self.events.capacity(measured.curve, measured.saturation_per_second)
        # An incomplete curve does not show the highest rate.
        wanted = job.context.requests_per_second if measured.finished else None
        return Capacity(
            {"capacity": measured.curve, "serving_rss_bytes": measured.resident_bytes},
            missed=tuple(conclusions.of_missed_rate(measured.curve, wanted)),
        )

    def instead(self, choice: Choice, failure: ReplicaBroken) -> Choice | None:
        """See `Target`."""
        plan = choice.chosen.plan
        if plan.short is not None:
            # The second graph may be the cause: try without it first.
            self._result = replace(self._result, plan=plan.unrouted, sample=None)
            return self._choice()
        if plan.recipe == REFERENCE:
            return None
        self._screening.run_of(plan.recipe).settle(Outcome.FAILED, f"{failure.message} while it served")
        fp32 = baseline_plan(self._job.grant.cores, self._screening.reference.batching)
        self._result = replace(self._result, plan=fp32, sample=None)
        return self._choice()

    def finish(self, manifest: Manifest) -> Manifest:
        """See `Target`: add the share of the machine's ceiling for matrix products."""
        job, plan = self._job, manifest.chosen.plan
        shape = EncoderShape.of(job.folder.config, head=head_of(job.spec.task, job.folder), how=self._export.how)
        chosen = next(one for one in manifest.candidates if one.recipe == plan.recipe)
        left = self.budget.left() - WRITING_SECONDS
        if shape is None or not chosen.latency or left < 1.0:
            return manifest
        try:
            ceiling = self._runner.ceiling(plan.recipe.precision, timeout_seconds=min(CEILING_SECONDS, left))
        except WorkerFailed:
            # The report does without this figure.
            return manifest
        own = {tokens: ms for tokens, ms in chosen.milliseconds.items() if plan.serves(tokens)}
        return manifest.model_copy(update={"gemm": gemm_shares(shape, own, ceiling)})

    def close(self) -> None:
        """See `Target`."""
        super().close()
        if "_screening" in vars(self):
            self._screening.close()

    # parts

    @property
    def _export(self) -> ExportedFacts:
        assert self._exported is not None  # noqa: S101 - `export` is called first
        return self._exported

    @cached_property
    def _screening(self) -> Screening:
        """Made when the graph is exported. The lengths need the tokenizer, which the fp32 artefact does without."""
        size = sum(file.stat().st_size for file in Path(self._export.graph).parent.iterdir())
        return Screening(
            self._runner,
            self._job.work,
            self.budget,
            lengths=measured_lengths(self._job.max_tokens, self._job.mix),
            expected=self._expected,
            on_settled=lambda run: self.events.settled(run.facts),
            max_open=max_open_processes(self._job.host.memory.available, size),
        )

    @cached_property
    def _expected(self) -> list[int]:
        """A sample of the workload's lengths."""
        return self._job.mix.sample(200, seed=0)

    def _no_time(self, why: str) -> OptimizationError:
        return OptimizationError(
            f"the time budget of {self.budget.seconds:g} s leaves too little after the export to judge and measure "
            f"the fp32 graph: {why}",
            remedy=f"{RAISE_BUDGET}: the next run goes on from here",
        )

    def _find_plan(self) -> SearchResult:
        if not self._searches:
            plan = baseline_plan(self._job.grant.cores, self._screening.reference.batching)
            return SearchResult(plan, None, (), finished=True, noise=0.0)
        planner = PlanSearch(
            self._screening,
            self._runner,
            self.budget,
            Goal.of(self._job.spec.objective),
            cores=self._job.grant.cores,
            lengths=measured_lengths(self._job.max_tokens, self._job.mix),
            expected=self._expected,
            may_serve=self._may_serve,
            on_step=self.events.step,
        )
        return planner.search(Trials(self._job.work.trials))

    def _may_serve(self, recipe: Recipe) -> bool:
        allowed = self._job.spec.optimization
        return recipe.engine in allowed.engines and recipe.precision in allowed.precisions

    def _choice(self) -> Choice:
        job, result = self._job, self._result
        candidates = conclude(
            self.candidates,
            chosen=result.plan,
            reference=REFERENCE,
            expected=self._expected,
            steps=result.steps,
            search_finished=result.finished,
        )
        self.events.planned(result.plan, candidates)
        by_recipe = {one.recipe: one for one in candidates}
        noise = conclusions.measured_noise(result.noise, candidates)
        chosen = self._served(self._screening.run_of(result.plan.recipe), result.plan)
        reference = self._screening.reference
        baseline = self._served(reference, baseline_plan(job.grant.cores, reference.batching))
        return Choice(
            chosen,
            baseline,
            {
                recipe: job.work.candidate(recipe) / Path(graph.path).name
                for served in (chosen, baseline)
                for recipe, graph in zip(served.plan.recipes, served.graphs, strict=True)
            },
            self._export.parameters,
            candidates,
            tuple(
                conclusions.of_plan(
                    result.plan,
                    candidates,
                    REFERENCE,
                    noise=noise,
                    search_finished=result.finished,
                    second_graph_bytes=result.second_graph_bytes,
                )
            ),
            (*conclusions.of_repeated_texts(job.spec.workload.texts), *self._export.notes),
            cut_short=not is_exhaustive(result, self.budget),
            fields={
                "speed_up": speed_up(by_recipe[REFERENCE], result.plan, by_recipe),
                "noise": noise,
                "trials": plan_trials(result.steps),
            },
        )

    def _served(self, run: CandidateRun, plan: Plan) -> ServedModel:
        assert run.built is not None  # noqa: S101 - only a built graph may serve
        path = graph_path(run.recipe, Path(run.built.graph))
        return ServedModel(path=path, io=run.built.io, plan=plan, short=self._short(plan))

    def _short(self, plan: Plan) -> ServedGraph | None:
        if plan.short is None:
            return None
        run = self._screening.run_of(plan.short.recipe)
        assert run.built is not None  # noqa: S101 - only a built graph may serve
        return ServedGraph(path=graph_path(run.recipe, Path(run.built.graph)), io=run.built.io)
