"""Runs an optimisation from end to end: export, candidates, plan, capacity, artefact.

    prepare   makes the fp32 artefact within seconds, or finds the finished one
    optimise  makes the finished artefact within a time budget

Results are found by key. An interrupted run continues from its work folder. Of two runs of one key the second waits and
then finds the first one's result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.capacity import CapacityCurve, CapacityPoint
from penstock.errors import NoCandidateWithinBudget, OptimizationError
from penstock.manifest import CandidateFacts, Manifest, Outcome, ReasonCode, ServedGraph, ServedModel
from penstock.recipe import Batching, Plan, Recipe
from penstock.resources.endpoint import ModelEndpoint, NoCandidate, OptimizationMode
from penstock.tasks import TaskName
from penstock_optimizer.candidate.gemm import EncoderShape, gemm_shares
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from penstock_optimizer.candidate.runner import ProcessRunner
from penstock_optimizer.candidate.work_folder import ExportedFacts, locked
from penstock_optimizer.capacity.curve import (
    CapacityFailed,
    CapacityMeasurement,
    ReplicaBroken,
    measure_capacity,
    serve_replica,
)
from penstock_optimizer.job.artefact import (
    conclude,
    findings,
    graph_path,
    measured_noise,
    plan_trials,
    speed_up,
    write_artefact,
)
from penstock_optimizer.job.generation import GenerationOptimisation, prepare_generation
from penstock_optimizer.job.job import Job
from penstock_optimizer.job.plan_search import PlanSearch, is_exhaustive
from penstock_optimizer.job.progress import OnProgressEvent, ProgressEvent, ProgressReporter, Stage, ignore_progress
from penstock_optimizer.job.screening import (
    LEAST_SECONDS,
    RAISE_BUDGET,
    ROUNDS,
    Budget,
    CandidateRun,
    Screening,
    max_open_processes,
)
from penstock_optimizer.load.workload import measured_lengths, workload_bodies
from penstock_optimizer.search.climb import SearchResult, Trials
from penstock_optimizer.search.goal import Goal
from penstock_optimizer.search.recipes import REFERENCE, by_gain, candidate_recipes
from penstock_optimizer.search.space import PlanLimits, WideFrom, first_plan
from penstock_runtime.host.disk import translate_full_disk
from penstock_runtime.models.sources.transfer import OnProgress as OnTransfer
from penstock_runtime.models.sources.transfer import ignore_progress as no_transfer
from penstock_runtime.tasks.factory import head_of

if TYPE_CHECKING:
    from penstock_optimizer.job.neuron import NeuronOptimisation
    from penstock_optimizer.neuron.session import NeuronToolchain

__all__ = ["PreparedArtefact", "optimise", "prepare"]

STORE = "the store"
"""Name of the folder in errors of a full disk."""
CEILING_SECONDS = 30.0
WRITING_SECONDS = 1.5
"""Reserved for copying the artefact and making the report."""
WIDE_FROM = WideFrom(64, 64)
"""Not measured: from about this length on, a lone row gains from all cores with every engine and model that was tried.
"""
EXPORT_SECONDS = 600.0
"""A large model through torch takes minutes; an export that takes longer hangs."""
CAPACITY_BODIES = 400
"""Number of different requests: none is repeated often enough for a cache to matter."""


@dataclass(frozen=True)
class PreparedArtefact:
    """An artefact that can be served at once."""

    artefact: Path
    finished: bool
    """True: the optimised artefact was there. False: the fp32 one."""


def prepare(
    endpoint: ModelEndpoint,
    *,
    store: Path,
    models: Path,
    cores: int | None = None,
    token: str | None = None,
    on_transfer: OnTransfer = no_transfer,
) -> PreparedArtefact:
    """Return what can be served at once: the finished artefact, or else the fp32 one, which is made in seconds.

    `on_transfer` receives the progress of the model's download, from several threads. PenstockError of all kinds: the
    model, the machine, the endpoint, a full disk.
    """
    job = Job.of(endpoint, store=store, models=models, cores=cores, token=token, on_transfer=on_transfer)
    found = job.finished(whole=False)
    if found is not None:
        _tidy(job, found)
        return PreparedArtefact(job.artefact, finished=True)
    if job.prepared() is None:
        job.check()
        with translate_full_disk(store, what=STORE):
            if job.spec.task is TaskName.TEXT_GENERATION:
                prepare_generation(job)
            else:
                prepare_baseline(job)
    return PreparedArtefact(job.baseline, finished=False)


def optimise(
    endpoint: ModelEndpoint,
    *,
    store: Path,
    models: Path,
    cores: int | None = None,
    budget_seconds: float | None = None,
    token: str | None = None,
    neuron: NeuronToolchain | None = None,
    on_progress: OnProgressEvent = ignore_progress,
    on_transfer: OnTransfer = no_transfer,
) -> Path:
    """Make the artefact of an endpoint on this machine, or find it; returns its folder `store/<key>`.

    `cores` and `budget_seconds` override the endpoint's. `neuron`: what compiles for AWS Inferentia, for an endpoint of
    such a class; None: for this machine's CPUs. OptimizationError when no result may be served; other
    PenstockErrors, and `on_transfer`, as for `prepare`.
    """
    begin = time.monotonic()
    job = Job.of(endpoint, store=store, models=models, cores=cores, token=token, neuron=neuron, on_transfer=on_transfer)
    seconds = budget_seconds or endpoint.spec.optimization.seconds(compiles=neuron is not None)
    found = job.finished(more_than_seconds=seconds)
    if found is None:

        def waiting() -> None:
            on_progress(ProgressEvent(Stage.EXPORT, 0, 1, "another process makes this artefact: waiting for it"))

        job.check()
        with translate_full_disk(store, what=STORE), locked(job.lock(""), waiting=waiting):
            found = job.finished(more_than_seconds=seconds)
            if found is None:
                _stages(job)(job, seconds, on_progress).run()
                return job.artefact
    _tidy(job, found)
    facts = {"artefact": str(job.artefact), "found": True, "seconds": time.monotonic() - begin}
    on_progress(ProgressEvent(Stage.DONE, 1, 1, "found, made before for this model and machine", facts, 1, 1))
    return job.artefact


def _stages(job: Job) -> type[GenerationOptimisation | NeuronOptimisation | Optimisation]:
    if job.neuron is not None:
        from penstock_optimizer.job.neuron import NeuronOptimisation

        return NeuronOptimisation
    return GenerationOptimisation if job.spec.task is TaskName.TEXT_GENERATION else Optimisation


def _tidy(job: Job, found: Manifest) -> None:
    """Delete what the finished artefact makes useless."""
    job.remove_baseline()
    if not found.cut_short:
        job.remove_leftovers()


def baseline_plan(cores: int, batching: Batching = Batching.EQUAL_LENGTH) -> Plan:
    """The fp32 plan, not measured. It batches equal lengths only, until the guard has proved that padding changes
    nothing."""
    return first_plan(REFERENCE, PlanLimits(cores, batching, ()), wide_from=WIDE_FROM)


def prepare_baseline(
    job: Job, *, seconds_left: Callable[[], float] = lambda: EXPORT_SECONDS
) -> tuple[Manifest, ExportedFacts]:
    """Export the fp32 graph and write its artefact, unless it exists. Errors of the model as for `export`.

    `seconds_left`: what a time budget has left when the export begins; OptimizationError when the export takes longer.
    """
    with locked(job.lock("baseline."), waiting=lambda: None):
        runner = ProcessRunner(job.context, job.work, job.cpus)
        limit = max(seconds_left(), 0.0)
        try:
            exported = runner.exported("fused", timeout_seconds=min(limit, EXPORT_SECONDS))
        except WorkerFailed as failure:
            if failure.failure is CallFailure.TIMED_OUT and limit < EXPORT_SECONDS:
                raise OptimizationError(
                    f"the time budget ended before the fp32 graph was written: {failure.reason}", remedy=RAISE_BUDGET
                ) from failure
            raise failure.as_error("the model could not be exported") from failure
        manifest = job.prepared()
        if manifest is None:
            manifest = _write_baseline(job, exported)
    return manifest, exported


def _write_baseline(job: Job, exported: ExportedFacts) -> Manifest:
    graph = Path(exported.graph)
    served = ServedModel(path=graph_path(REFERENCE, graph), io=exported.io, plan=baseline_plan(job.grant.cores))
    facts = CandidateFacts(
        recipe=REFERENCE,
        outcome=Outcome.CHOSEN,
        reason="the fp32 graph as it was exported",
        fused_nodes=exported.fused_nodes,
        build_seconds=exported.seconds,
        size_bytes=graph.stat().st_size,
    )
    manifest = job.manifest(
        exported.parameters,
        chosen=served,
        baseline=served,
        candidates=[facts],
        findings=[
            "Nothing was measured yet: this is the fp32 graph as it was exported.",
            *(f"{note}." for note in exported.notes),
        ],
    )
    return write_artefact(job.baseline, manifest, folder=job.folder, graphs={REFERENCE: graph})


def endpoint_capacity(
    job: Job, artefact: Path, *, seconds_left: Callable[[], float], on_point: Callable[[CapacityPoint], None]
) -> CapacityMeasurement:
    """Serve `artefact` with the real server and measure its capacity curve with the endpoint's workload. CapacityFailed
    and ReplicaBroken as in `capacity.curve`."""
    spec, tokenizer = job.spec, job.tokenizer
    bodies = workload_bodies(
        spec.task,
        tokenizer.backend,
        spec.workload,
        job.mix,
        count=CAPACITY_BODIES,
        mask_token=tokenizer.mask_token,
        side=tokenizer.side,
    )
    with serve_replica(
        artefact,
        cores=job.grant.cores,
        cpus=job.cpus,
        log=job.work.log("capacity"),
        max_tokens=spec.serving.max_input_tokens,
        start_seconds=seconds_left(),
    ) as server:
        return measure_capacity(
            server,
            bodies,
            p95_objective=spec.objective.latency.p95_milliseconds if spec.objective.latency else None,
            load_cpus=job.load_cpus or job.host.allowed,
            seconds_left=seconds_left,
            on_point=on_point,
        )


class Optimisation:
    """One run of the stages."""

    def __init__(self, job: Job, seconds: float, on_progress: OnProgressEvent) -> None:
        self._job = job
        self._budget = Budget(seconds)
        self._runner = ProcessRunner(job.context, job.work, job.cpus)
        self._goal = Goal.of(job.spec.objective)
        self._lengths = measured_lengths(job.max_tokens, job.mix)
        self._expected = job.mix.sample(200, seed=0)
        self._searches = job.spec.optimization.mode is OptimizationMode.AUTO
        optimization = job.spec.optimization
        self._candidates = candidate_recipes(job.host.cpu.isa, optimization.engines, optimization.precisions)
        count = len(self._candidates.recipes) + len(self._candidates.skipped) if self._searches else 1
        self._events = ProgressReporter(on_progress, candidates=count, rounds=ROUNDS, searches=self._searches)
        self._screening = Screening(
            self._runner,
            job.work,
            self._budget,
            lengths=self._lengths,
            expected=self._expected,
            on_settled=self._events.settled,
        )

    def run(self) -> Manifest:
        """Run all stages and write the artefact."""
        exported = self._export()
        try:
            self._try_candidates()
            self._require_candidate([run.facts for run in self._screening.runs])
            result = self._find_plan()
        finally:
            self._screening.close()
        manifest = self._prove(exported, result)
        gemm = self._gemm(
            exported,
            next(one for one in manifest.candidates if one.recipe == manifest.chosen.plan.recipe),
            manifest.chosen.plan,
        )
        manifest = manifest.model_copy(update={"gemm": gemm, "seconds": self._budget.spent})
        self._write(self._job.artefact, manifest)
        if not manifest.cut_short:
            self._job.work.remove()
        self._events.done(self._job.artefact, manifest.chosen.plan, self._budget.spent)
        return manifest

    # the stages

    def _export(self) -> ExportedFacts:
        self._events.exporting(self._budget.seconds)
        _, exported = prepare_baseline(self._job, seconds_left=self._budget.left_for_capacity)
        self._events.exported(exported)
        if self._budget.left_for_capacity() < LEAST_SECONDS:
            raise self._no_time(f"it ended after {self._budget.spent:.1f} s")
        size = sum(file.stat().st_size for file in Path(exported.graph).parent.iterdir())
        self._screening.max_open = max_open_processes(self._job.host.memory.available, size)
        return exported

    def _try_candidates(self) -> None:
        try:
            self._screening.enter(REFERENCE, reference=True)
            if self._searches:
                for recipe in by_gain(self._candidates.recipes[1:], self._job.host.cpu.isa):
                    self._events.trying(recipe)
                    self._screening.enter(recipe)
                for skipped in self._candidates.skipped:
                    self._screening.skip(skipped.recipe, skipped.reason)
            self._screening.measure(on_round=self._events.round)
        except WorkerFailed as failure:
            if failure.failure is CallFailure.TIMED_OUT:
                # The reference may use all the time that is left: running out of it does not make the graph a bad one.
                raise self._no_time(failure.reason) from failure
            raise failure.as_error("the fp32 graph does not run") from failure

    def _find_plan(self) -> SearchResult:
        reference = self._screening.reference
        if not self._searches:
            plan = baseline_plan(self._job.grant.cores, reference.batching)
            return SearchResult(plan, None, (), finished=True, noise=0.0)
        planner = PlanSearch(
            self._screening,
            self._runner,
            self._budget,
            self._goal,
            cores=self._job.grant.cores,
            lengths=self._lengths,
            expected=self._expected,
            may_serve=self._may_serve,
            on_step=self._events.step,
        )
        return planner.search(Trials(self._job.work.trials))

    def _prove(self, exported: ExportedFacts, result: SearchResult) -> Manifest:
        """Serve the plan with the real server and measure its capacity. A plan whose server breaks is replaced, at last
        by fp32. Without time to measure, the artefact is still complete."""
        draft = self._manifest(exported, result)
        self._events.planned(draft)
        folder = self._job.work.path / "draft"
        self._write(folder, draft)
        try:
            measured = endpoint_capacity(
                self._job, folder, seconds_left=self._budget.left_for_capacity, on_point=self._events.point
            )
        except ReplicaBroken as failure:
            if result.plan.short is not None:
                # The second graph may be the cause: try without it first.
                return self._prove(exported, replace(result, plan=result.plan.unrouted, sample=None))
            if result.plan.recipe == REFERENCE:
                self._events.no_capacity(failure.message)
                return self._manifest(exported, result, doubts=(f"The capacity was not measured: {failure.message}.",))
            broken = self._screening.run_of(result.plan.recipe)
            broken.settle(Outcome.FAILED, f"{failure.message} while it served")
            plan = baseline_plan(self._job.grant.cores, self._screening.reference.batching)
            return self._prove(exported, replace(result, plan=plan, sample=None))
        except CapacityFailed as failure:
            self._events.no_capacity(failure.message)
            return self._manifest(exported, result, doubts=(f"The capacity was not measured: {failure.message}.",))
        self._events.capacity(measured)
        return self._manifest(exported, result, measured)

    def _gemm(self, exported: ExportedFacts, chosen: CandidateFacts, plan: Plan) -> Any:
        shape = EncoderShape.of(
            self._job.folder.config, head=head_of(self._job.spec.task, self._job.folder), how=exported.how
        )
        left = self._budget.left() - WRITING_SECONDS
        if shape is None or not chosen.latency or left < 1.0:
            return ()
        try:
            ceiling = self._runner.ceiling(chosen.recipe.precision, timeout_seconds=min(CEILING_SECONDS, left))
        except WorkerFailed:
            # The report does without this figure.
            return ()
        own = {tokens: ms for tokens, ms in chosen.milliseconds.items() if plan.serves(tokens)}
        return gemm_shares(shape, own, ceiling)

    # what the stages need

    def _no_time(self, why: str) -> OptimizationError:
        return OptimizationError(
            f"the time budget of {self._budget.seconds:g} s leaves too little after the export to judge and measure "
            f"the fp32 graph: {why}",
            remedy=f"{RAISE_BUDGET}: the next run goes on from here",
        )

    def _may_serve(self, recipe: Recipe) -> bool:
        allowed = self._job.spec.optimization
        return recipe.engine in allowed.engines and recipe.precision in allowed.precisions

    def _require_candidate(self, candidates: Sequence[CandidateFacts]) -> None:
        """With `whenNoCandidate: Fail`, raise an error that lists each candidate, unless one may be served. Candidates
        that the endpoint excludes do not count; those that the time budget excluded do: they may be the better ones."""
        optimization = self._job.spec.optimization
        others = [
            one
            for one in candidates
            if one.recipe != REFERENCE and (one.outcome is not Outcome.SKIPPED or one.reason_code.is_out_of_time)
        ]
        if optimization.when_no_candidate is not NoCandidate.FAIL or not self._searches or not others:
            return
        if any(one.outcome in {Outcome.CHOSEN, Outcome.SLOWER} for one in others):
            return
        listed = "; ".join(f"{one.recipe.name}: {one.reason}" for one in others)
        longer = any(one.reason_code.is_out_of_time for one in others)
        raise NoCandidateWithinBudget(
            f"no candidate is within the accuracy budget, and whenNoCandidate is Fail ({listed})",
            remedy=("Raise spec.optimization.budgetSeconds, widen" if longer else "Widen")
            + " spec.optimization.accuracy, allow more precisions, or set whenNoCandidate: ServeFP32",
        )

    def _manifest(
        self,
        exported: ExportedFacts,
        result: SearchResult,
        measured: CapacityMeasurement | None = None,
        doubts: Sequence[str] = (),
    ) -> Manifest:
        job = self._job
        candidates = conclude(
            [run.facts for run in self._screening.runs],
            chosen=result.plan,
            reference=REFERENCE,
            expected=self._expected,
            steps=result.steps,
            search_finished=result.finished,
        )
        by_recipe = {one.recipe: one for one in candidates}
        # A plan that was not tried does not count: a larger budget need not give the plan search more time.
        skipped = sum(
            one.reason_code.is_out_of_time and one.reason_code is not ReasonCode.NO_PLAN_TRIED for one in candidates
        )
        late = sum(one.reason_code is ReasonCode.TIMED_OUT for one in candidates)
        noise = measured_noise(result.noise, candidates)
        reference_plan = baseline_plan(job.grant.cores, self._screening.reference.batching)
        capacity = measured.curve if measured else CapacityCurve()
        # An incomplete curve does not show the highest rate.
        asked = job.context.requests_per_second if measured and measured.finished else None
        return job.manifest(
            exported.parameters,
            chosen=self._served(self._screening.run_of(result.plan.recipe), result.plan),
            baseline=self._served(self._screening.reference, reference_plan),
            candidates=candidates,
            capacity=capacity,
            speed_up=speed_up(by_recipe[REFERENCE], result.plan, by_recipe),
            noise=noise,
            trials=plan_trials(result.steps),
            findings=findings(
                candidates=candidates,
                reference=REFERENCE,
                plan=result.plan,
                second_graph_bytes=result.second_graph_bytes,
                noise=noise,
                skipped_for_time=skipped + late,
                search_finished=result.finished,
                shared_cpus=not job.load_cpus,
                capacity=capacity,
                asked_requests_per_second=asked,
                texts=job.spec.workload.texts,
                host=(*exported.notes, *doubts, *job.findings()),
            ),
            serving_rss_bytes=measured.resident_bytes if measured else None,
            seconds=self._budget.spent,
            budget_seconds=self._budget.seconds,
            cut_short=bool(skipped or late or not is_exhaustive(result, self._budget)),
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

    def _write(self, target: Path, manifest: Manifest) -> None:
        recipes = {
            recipe: graph
            for served in (manifest.chosen, manifest.baseline)
            for recipe, graph in zip(served.plan.recipes, served.graphs, strict=True)
        }
        graphs = {recipe: self._job.work.candidate(recipe) / Path(graph.path).name for recipe, graph in recipes.items()}
        write_artefact(target, manifest, folder=self._job.folder, graphs=graphs)
