"""The optimisation from end to end: export, candidates, plan, capacity, artefact.

    prepare   the fp32 artefact within seconds (or the finished one, when it is there)
    optimise  the finished artefact, within a time budget

Results are found by key; an interrupted run goes on from its work folder; of two runs of one key the second waits and
then finds the first one's result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.capacity import CapacityCurve
from penstock.errors import NoCandidateWithinBudget, OptimizationError
from penstock.manifest import CandidateFacts, Manifest, Outcome, ServedGraph, ServedModel
from penstock.recipe import Plan, Recipe
from penstock.resources.endpoint import ModelEndpoint, NoCandidate, OptimizationMode
from penstock.tasks import HEAD_OF_TASK
from penstock_optimizer.candidate.gemm import gemm_shares
from penstock_optimizer.candidate.isolation import Failure, WorkerFailed
from penstock_optimizer.candidate.lab import ExportedFacts
from penstock_optimizer.candidate.operations import EncoderShape
from penstock_optimizer.candidate.processes import ProcessLab
from penstock_optimizer.capacity.curve import CapacityFailed, Measured, ReplicaBroken
from penstock_optimizer.capacity.endpoint import endpoint_capacity
from penstock_optimizer.job import conclusion
from penstock_optimizer.job.artefact import graph_path, write_artefact
from penstock_optimizer.job.baseline import Prepared, baseline_plan, prepare_baseline
from penstock_optimizer.job.budget import RAISE_BUDGET, Budget
from penstock_optimizer.job.build_order import by_gain
from penstock_optimizer.job.events import Events
from penstock_optimizer.job.job import Job
from penstock_optimizer.job.planning import Planner, had_its_time
from penstock_optimizer.job.progress import OnProgress, Progress, Stage, ignore
from penstock_optimizer.job.screening import LEAST_SECONDS, Entrant, TryOut, most_open
from penstock_optimizer.job.work_folder import locked
from penstock_optimizer.load.lengths import measured_lengths
from penstock_optimizer.search.climb import Climbed
from penstock_optimizer.search.goal import Goal
from penstock_optimizer.search.recipes import TEACHER, candidate_recipes
from penstock_optimizer.search.survivors import NO_PLAN_TRIED, OUT_OF_TIME
from penstock_optimizer.search.trials import Trials
from penstock_runtime.host.disk import full_disk_said
from penstock_runtime.models.progress import OnProgress as OnTransfer
from penstock_runtime.models.progress import ignore as no_transfer

__all__ = ["Prepared", "optimise", "prepare"]

STORE = "the store"
"""In errors of a full disk."""
CEILING_SECONDS = 30.0
WRITING_SECONDS = 1.5
"""Kept for copying the artefact and making the report."""


def prepare(
    endpoint: ModelEndpoint,
    *,
    store: Path,
    models: Path,
    cores: int | None = None,
    token: str | None = None,
    on_transfer: OnTransfer = no_transfer,
) -> Prepared:
    """What can be served at once: the finished artefact, or else the fp32 one, which is made in seconds.

    `on_transfer` hears of the model's fetch, from several threads.
    PenstockError of all kinds: the model, the machine, the endpoint, a full disk.
    """
    job = Job.of(endpoint, store=store, models=models, cores=cores, token=token, on_transfer=on_transfer)
    found = job.finished(whole=False)
    if found is not None:
        _tidy(job, found)
        return Prepared(job.artefact, finished=True)
    if job.prepared() is None:
        job.check()
        with full_disk_said(store, what=STORE):
            prepare_baseline(job)
    return Prepared(job.baseline, finished=False)


def optimise(
    endpoint: ModelEndpoint,
    *,
    store: Path,
    models: Path,
    cores: int | None = None,
    budget_seconds: float | None = None,
    token: str | None = None,
    on_progress: OnProgress = ignore,
    on_transfer: OnTransfer = no_transfer,
) -> Path:
    """Make the artefact of an endpoint on this machine, or find it; returns its folder `store/<key>`.

    `cores` and `budget_seconds` stand in for the endpoint's own. OptimizationError when nothing may be served; other
    PenstockErrors, and `on_transfer`, as `prepare`.
    """
    begin = time.monotonic()
    job = Job.of(endpoint, store=store, models=models, cores=cores, token=token, on_transfer=on_transfer)
    seconds = budget_seconds or endpoint.spec.optimization.budget_seconds
    found = job.finished(more_than_seconds=seconds)
    if found is None:

        def waiting() -> None:
            on_progress(Progress(Stage.EXPORT, 0, 1, "another process makes this artefact: waiting for it"))

        job.check()
        with full_disk_said(store, what=STORE), locked(job.lock(""), waiting=waiting):
            found = job.finished(more_than_seconds=seconds)
            if found is None:
                Optimisation(job, seconds, on_progress).run()
                return job.artefact
    _tidy(job, found)
    facts = {"artefact": str(job.artefact), "found": True, "seconds": time.monotonic() - begin}
    on_progress(Progress(Stage.DONE, 1, 1, "found, made before for this model and machine", facts, 1, 1))
    return job.artefact


def _tidy(job: Job, found: Manifest) -> None:
    """Delete what nobody needs any more beside the finished artefact."""
    job.remove_baseline()
    if not found.cut_short:
        job.remove_leftovers()


class Optimisation:
    """One run."""

    def __init__(self, job: Job, seconds: float, on_progress: OnProgress) -> None:
        self._job = job
        self._budget = Budget(seconds)
        self._lab = ProcessLab(job.subject, job.work, job.cpus)
        self._goal = Goal.of(job.spec.objective)
        self._lengths = measured_lengths(job.max_tokens, job.mix)
        self._expected = job.mix.sample(200, seed=0)
        self._searches = job.spec.optimization.mode is OptimizationMode.AUTO
        optimization = job.spec.optimization
        self._candidates = candidate_recipes(job.host.cpu.isa, optimization.engines, optimization.precisions)
        count = len(self._candidates.recipes) + len(self._candidates.skipped) if self._searches else 1
        self._events = Events(on_progress, candidates=count, searches=self._searches)
        self._tryout = TryOut(
            self._lab,
            job.work,
            self._budget,
            lengths=self._lengths,
            expected=self._expected,
            on_settled=self._events.settled,
        )

    def run(self) -> Manifest:
        """All of it."""
        exported = self._export()
        try:
            self._try_candidates()
            self._refuse_if_told_to([entrant.facts for entrant in self._tryout.entrants])
            climbed = self._find_plan()
        finally:
            self._tryout.close()
        manifest = self._prove(exported, climbed)
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
        self._tryout.most_open = most_open(self._job.host.memory.available, size)
        return exported

    def _try_candidates(self) -> None:
        try:
            self._tryout.enter(TEACHER, teacher=True)
            if self._searches:
                for recipe in by_gain(self._candidates.recipes[1:], self._job.host.cpu.isa):
                    self._events.trying(recipe)
                    self._tryout.enter(recipe)
                for skipped in self._candidates.skipped:
                    self._tryout.skip(skipped.recipe, skipped.reason)
            self._tryout.measure(on_round=self._events.round)
        except WorkerFailed as failure:
            if failure.failure is Failure.TIMED_OUT:
                # It may take all that the budget has left, so that nothing is said against the graph.
                raise self._no_time(failure.reason) from failure
            raise failure.as_error("the fp32 graph does not run") from failure

    def _find_plan(self) -> Climbed:
        teacher = self._tryout.teacher
        if not self._searches:
            plan = baseline_plan(self._job.grant.cores, teacher.batching)
            return Climbed(plan, None, (), finished=True, noise=0.0)
        planner = Planner(
            self._tryout,
            self._lab,
            self._budget,
            self._goal,
            cores=self._job.grant.cores,
            lengths=self._lengths,
            expected=self._expected,
            may_serve=self._may_serve,
            on_step=self._events.step,
        )
        return planner.search(Trials(self._job.work.trials))

    def _prove(self, exported: ExportedFacts, climbed: Climbed) -> Manifest:
        """Serve the plan with the real server and measure what it takes. A plan whose server breaks is not served:
        then it is fp32. Without the time to measure, the artefact is still worth having."""
        draft = self._manifest(exported, climbed)
        self._events.planned(draft)
        folder = self._job.work.path / "draft"
        self._write(folder, draft)
        try:
            measured = endpoint_capacity(
                self._job, folder, seconds_left=self._budget.left_for_capacity, on_point=self._events.point
            )
        except ReplicaBroken as failure:
            if climbed.plan.short is not None:
                # The second graph may be what breaks it: without that first.
                return self._prove(exported, replace(climbed, plan=climbed.plan.unrouted, sample=None))
            if climbed.plan.recipe == TEACHER:
                self._events.no_capacity(failure.message)
                return self._manifest(exported, climbed, doubts=(f"The capacity was not measured: {failure.message}.",))
            broken = next(one for one in self._tryout.entrants if one.recipe == climbed.plan.recipe)
            broken.settle(Outcome.FAILED, f"{failure.message} while it served")
            plan = baseline_plan(self._job.grant.cores, self._tryout.teacher.batching)
            return self._prove(exported, replace(climbed, plan=plan, sample=None))
        except CapacityFailed as failure:
            self._events.no_capacity(failure.message)
            return self._manifest(exported, climbed, doubts=(f"The capacity was not measured: {failure.message}.",))
        self._events.capacity(measured)
        return self._manifest(exported, climbed, measured)

    def _gemm(self, exported: ExportedFacts, chosen: CandidateFacts, plan: Plan) -> Any:
        shape = EncoderShape.of(self._job.folder.config, head=HEAD_OF_TASK[self._job.spec.task], how=exported.how)
        left = self._budget.left() - WRITING_SECONDS
        if shape is None or not chosen.latency or left < 1.0:
            return ()
        try:
            ceiling = self._lab.ceiling(chosen.recipe.precision, timeout_seconds=min(CEILING_SECONDS, left))
        except WorkerFailed:
            # A figure for the report, and no reason to lose the rest of it.
            return ()
        own = {tokens: ms for tokens, ms in conclusion.milliseconds(chosen).items() if plan.serves(tokens)}
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

    def _refuse_if_told_to(self, candidates: Sequence[CandidateFacts]) -> None:
        """`whenNoCandidate: Fail`: an error that lists each candidate, unless one of them may be served. Those that
        the endpoint leaves out do not count; those that the time budget left no turn do: nothing says fp32 would do."""
        optimization = self._job.spec.optimization
        others = [
            one
            for one in candidates
            if one.recipe != TEACHER and (one.outcome is not Outcome.SKIPPED or one.reason in OUT_OF_TIME)
        ]
        if optimization.when_no_candidate is not NoCandidate.FAIL or not self._searches or not others:
            return
        if any(one.outcome in {Outcome.CHOSEN, Outcome.SLOWER} for one in others):
            return
        listed = "; ".join(f"{one.recipe.name}: {one.reason}" for one in others)
        longer = any(one.reason in OUT_OF_TIME for one in others)
        raise NoCandidateWithinBudget(
            f"no candidate is within the accuracy budget, and whenNoCandidate is Fail ({listed})",
            remedy=("Raise spec.optimization.budgetSeconds, widen" if longer else "Widen")
            + " spec.optimization.accuracy, allow more precisions, or set whenNoCandidate: ServeFP32",
        )

    def _manifest(
        self,
        exported: ExportedFacts,
        climbed: Climbed,
        measured: Measured | None = None,
        doubts: Sequence[str] = (),
    ) -> Manifest:
        job = self._job
        candidates = conclusion.conclude(
            [entrant.facts for entrant in self._tryout.entrants],
            chosen=climbed.plan,
            teacher=TEACHER,
            expected=self._expected,
            steps=climbed.steps,
            search_finished=climbed.finished,
        )
        entrants = {entrant.recipe: entrant for entrant in self._tryout.entrants}
        by_recipe = {one.recipe: one for one in candidates}
        # What the plan search did not come to is another question: a larger budget need not give it more time.
        before_plans = set(OUT_OF_TIME) - {NO_PLAN_TRIED}
        skipped = sum(one.outcome is Outcome.SKIPPED and one.reason in before_plans for one in candidates)
        late = sum(one.outcome is Outcome.FAILED and "did not end within" in one.reason for one in candidates)
        noise = conclusion.measured_noise(climbed.noise, candidates)
        teacher_plan = baseline_plan(job.grant.cores, entrants[TEACHER].batching)
        capacity = measured.curve if measured else CapacityCurve()
        # Of a curve that time cut short nobody knows how far it would have gone.
        asked = job.subject.requests_per_second if measured and measured.finished else None
        return Manifest(
            key=job.key,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            toolchain=job.tools,
            model=job.model_facts(exported.parameters),
            task=job.spec.task,
            cpu=job.host.cpu,
            cores=job.grant.cores,
            pinned=job.grant.pinned,
            objective=job.spec.objective.summary,
            chosen=self._served(entrants[climbed.plan.recipe], climbed.plan),
            baseline=self._served(entrants[TEACHER], teacher_plan),
            candidates=candidates,
            capacity=capacity,
            speed_up=conclusion.speed_up(by_recipe[TEACHER], climbed.plan, by_recipe),
            noise=noise,
            workload=job.mix.summary,
            trials=conclusion.plan_trials(climbed.steps),
            findings=conclusion.findings(
                candidates=candidates,
                teacher=TEACHER,
                plan=climbed.plan,
                second_graph_bytes=climbed.second_graph_bytes,
                noise=noise,
                skipped_for_time=skipped + late,
                search_finished=climbed.finished,
                shared_cpus=not job.load_cpus,
                capacity=capacity,
                asked_requests_per_second=asked,
                host=(*doubts, *job.findings()),
            ),
            serving_rss_bytes=measured.resident_bytes if measured else None,
            seconds=self._budget.spent,
            budget_seconds=self._budget.seconds,
            cut_short=bool(skipped or late or not had_its_time(climbed, self._budget)),
            files={},
        )

    def _served(self, entrant: Entrant, plan: Plan) -> ServedModel:
        assert entrant.built is not None  # noqa: S101 - what may serve was built
        path = graph_path(entrant.recipe, Path(entrant.built.graph))
        return ServedModel(path=path, io=entrant.built.io, plan=plan, short=self._short(plan))

    def _short(self, plan: Plan) -> ServedGraph | None:
        if plan.short is None:
            return None
        entrant = next(one for one in self._tryout.entrants if one.recipe == plan.short.recipe)
        assert entrant.built is not None  # noqa: S101 - what may serve was built
        return ServedGraph(path=graph_path(entrant.recipe, Path(entrant.built.graph)), io=entrant.built.io)

    def _write(self, target: Path, manifest: Manifest) -> None:
        recipes = {
            recipe: graph
            for served in (manifest.chosen, manifest.baseline)
            for recipe, graph in zip(served.plan.recipes, served.graphs, strict=True)
        }
        graphs = {recipe: self._job.work.candidate(recipe) / Path(graph.path).name for recipe, graph in recipes.items()}
        write_artefact(
            target,
            folder=self._job.folder,
            graphs=graphs,
            describe=lambda files: manifest.model_copy(update={"files": files}),
        )
