"""The optimisation from end to end: export, candidates, plan, capacity, artefact.

    prepare   the fp32 artefact within seconds (or the finished one, when it is there)
    optimise  the finished artefact, within a time budget

Results are found by key; an interrupted run goes on from its work folder; of two runs of one key the second waits and
then finds the first one's result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.capacity import CapacityCurve
from penstock.endpoint import ModelEndpoint, NoCandidate, OptimizationMode
from penstock.errors import OptimizationError
from penstock.manifest import CandidateFacts, Manifest, Outcome, ServedModel
from penstock.recipe import Plan, Precision, Recipe
from penstock_optimizer import conclusion
from penstock_optimizer.artefact import graph_path, write_artefact
from penstock_optimizer.baseline import Prepared, baseline_plan, prepare_baseline
from penstock_optimizer.budget import MOST_PLANS_SECONDS, Budget
from penstock_optimizer.capacity import CapacityFailed, Measured, measure_capacity, replica
from penstock_optimizer.gemm import gemm_shares
from penstock_optimizer.isolation import WorkerFailed
from penstock_optimizer.job import Job
from penstock_optimizer.lab import ExportedFacts
from penstock_optimizer.load.bodies import workload_bodies
from penstock_optimizer.load.lengths import measured_lengths
from penstock_optimizer.load.process import LoadFailed
from penstock_optimizer.operations import EncoderShape
from penstock_optimizer.planning import Planner
from penstock_optimizer.processes import ProcessLab
from penstock_optimizer.progress import OnProgress, Progress, Reporter, Stage, ignore
from penstock_optimizer.recipes import TEACHER, candidate_recipes
from penstock_optimizer.search.climb import Climbed, Step
from penstock_optimizer.search.goal import Goal
from penstock_optimizer.search.trials import Trials
from penstock_optimizer.tryout import OUT_OF_TIME, ROUNDS, Entrant, TryOut
from penstock_optimizer.workfolder import locked
from penstock_runtime.models.json_files import read_optional
from penstock_runtime.tokens import Tokenizer
from penstock_runtime.tokens.backend import open_backend

__all__ = ["Prepared", "optimise", "prepare"]

EXPECTED_STEPS = {Stage.EXPORT: 1, Stage.MEASURE: ROUNDS, Stage.PLANS: 12, Stage.CAPACITY: 10, Stage.REPORT: 1}
BODIES = 400
"""Different requests of the capacity curve."""
CALIBRATION_IS_CHEAP_SECONDS = 150.0
CEILING_SECONDS = 30.0
WRITING_SECONDS = 1.5
"""Kept for copying the artefact and making the report."""


def prepare(
    endpoint: ModelEndpoint, *, store: Path, models: Path, cores: int | None = None, token: str | None = None
) -> Prepared:
    """What can be served at once: the finished artefact, or else the fp32 one, which is made in seconds.

    PenstockError of all kinds: the model, the machine, the endpoint.
    """
    job = Job.of(endpoint, store=store, models=models, cores=cores, token=token)
    if job.finished() is not None:
        job.remove_baseline()
        return Prepared(job.artefact, finished=True)
    if job.prepared() is None:
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
) -> Path:
    """Make the artefact of an endpoint on this machine, or find it; returns its folder `store/<key>`.

    `cores` and `budget_seconds` stand in for the endpoint's own. OptimizationError when nothing may be served; other
    PenstockErrors as `prepare`.
    """
    begin = time.monotonic()
    job = Job.of(endpoint, store=store, models=models, cores=cores, token=token)
    seconds = budget_seconds or endpoint.spec.optimization.budget_seconds
    found = job.finished(more_than_seconds=seconds)
    if found is None:

        def waiting() -> None:
            on_progress(Progress(Stage.EXPORT, 0, 1, "another process makes this artefact: waiting for it"))

        with locked(job.lock(""), waiting=waiting):
            found = job.finished(more_than_seconds=seconds)
            if found is None:
                Optimisation(job, seconds, on_progress).run()
                return job.artefact
    job.remove_baseline()
    facts = {"artefact": str(job.artefact), "found": True, "seconds": time.monotonic() - begin}
    on_progress(Progress(Stage.DONE, 1, 1, "found, made before for this model and machine", facts, 1, 1))
    return job.artefact


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
        steps = {**EXPECTED_STEPS, Stage.CANDIDATES: len(self._candidates.recipes) + len(self._candidates.skipped)}
        if not self._searches:
            steps |= {Stage.CANDIDATES: 1, Stage.PLANS: 0}
        self._reporter = Reporter(on_progress, steps)
        self._tryout = TryOut(self._lab, job.work, self._budget, lengths=self._lengths, on_settled=self._on_settled)

    def run(self) -> Manifest:
        """All of it."""
        exported = self._export()
        try:
            self._try_candidates()
            self._refuse_if_told_to([entrant.facts for entrant in self._tryout.entrants])
            climbed = self._find_plan()
        finally:
            self._tryout.close()
        candidates = conclusion.conclude(
            [entrant.facts for entrant in self._tryout.entrants],
            chosen=climbed.plan.recipe,
            teacher=TEACHER,
            expected=self._expected,
            steps=climbed.steps,
        )
        self._reporter.advance(
            Stage.PLANS,
            climbed.plan.summary,
            by=0,
            facts={"candidates": [one.model_dump(mode="json") for one in candidates]},
        )
        measured = self._measure_capacity(self._manifest(exported, candidates, climbed))
        manifest = self._manifest(exported, candidates, climbed, measured)
        gemm = self._gemm(next(one for one in candidates if one.recipe == climbed.plan.recipe))
        manifest = manifest.model_copy(update={"gemm": gemm, "seconds": self._budget.spent})
        self._write(self._job.artefact, manifest)
        if not manifest.cut_short:
            self._job.work.remove()
        self._reporter.advance(Stage.REPORT, str(self._job.artefact / "report.html"))
        facts = {"artefact": str(self._job.artefact), "found": False, "seconds": self._budget.spent}
        self._reporter.advance(Stage.DONE, climbed.plan.summary, facts=facts, by=0)
        return manifest

    # the stages

    def _export(self) -> ExportedFacts:
        self._reporter.advance(Stage.EXPORT, "writing the fp32 graph", by=0)
        _, exported = prepare_baseline(self._job)
        self._reporter.advance(
            Stage.EXPORT,
            export_message(exported),
            facts={
                "seconds": exported.seconds,
                "fused_nodes": exported.fused_nodes,
                "parameters": exported.parameters,
            },
        )
        return exported

    def _try_candidates(self) -> None:
        try:
            self._tryout.enter(TEACHER, teacher=True)
            if self._searches:
                for recipe in by_time(self._candidates.recipes[1:], self._budget.left_for_candidates()):
                    self._reporter.advance(Stage.CANDIDATES, recipe.name, by=0)
                    self._tryout.enter(recipe)
                for skipped in self._candidates.skipped:
                    self._tryout.skip(skipped.recipe, skipped.reason)
            self._tryout.measure(on_round=self._on_round)
        except WorkerFailed as failure:
            raise failure.as_error("the fp32 graph does not run") from failure
        self._reporter.finish(Stage.CANDIDATES)

    def _find_plan(self) -> Climbed:
        teacher = self._tryout.teacher
        if not self._searches:
            plan = baseline_plan(self._job.grant.cores, teacher.batching)
            noise = max((point.spread for point in teacher.facts.latency), default=0.0)
            return Climbed(plan, None, (), finished=True, noise=noise)
        planner = Planner(
            self._tryout,
            self._lab,
            self._budget,
            self._goal,
            cores=self._job.grant.cores,
            lengths=self._lengths,
            expected=self._expected,
            may_serve=self._may_serve,
            on_step=self._on_step,
        )
        climbed = planner.search(Trials(self._job.work.trials))
        self._reporter.finish(Stage.PLANS)
        return climbed

    def _measure_capacity(self, draft: Manifest) -> Measured | None:
        """The curve, or None with the reason in the progress: an artefact without it is still worth having."""
        job = self._job
        folder = job.work.path / "draft"
        self._write(folder, draft)
        latency = job.spec.objective.latency
        backend = open_backend(
            job.folder.tokenizer,
            read_optional(job.folder.path, "tokenizer_config.json"),
            lower_case=job.folder.lower_case,
        )
        bodies = workload_bodies(
            job.spec.task,
            backend,
            job.spec.workload,
            job.mix,
            count=BODIES,
            mask_token=Tokenizer.load(job.folder).mask_token,
        )
        try:
            with replica(
                folder,
                cores=job.grant.cores,
                cpus=job.cpus,
                log=job.work.log("capacity"),
                max_tokens=job.spec.serving.max_input_tokens,
                truncate=job.spec.serving.truncate,
                start_seconds=self._budget.left_for_capacity(),
            ) as server:
                measured = measure_capacity(
                    server,
                    bodies,
                    p95_objective=latency.p95_milliseconds if latency else None,
                    load_cpus=job.load_cpus or job.host.allowed,
                    seconds_left=self._budget.left_for_capacity,
                    on_point=lambda point: self._reporter.advance(
                        Stage.CAPACITY,
                        f"p95 {point.p95_milliseconds:.1f} ms at {point.arrivals_per_second:.0f} requests/s",
                        facts={
                            "arrivals_per_second": point.arrivals_per_second,
                            "p95_milliseconds": point.p95_milliseconds,
                        },
                    ),
                )
        except (CapacityFailed, LoadFailed) as failure:
            self._reporter.finish(Stage.CAPACITY)
            self._reporter.advance(Stage.CAPACITY, f"not measured: {failure.message}", by=0)
            return None
        self._reporter.finish(Stage.CAPACITY)
        rate = measured.curve.requests_per_second
        limit = measured.curve.p95_objective_milliseconds or 0.0
        self._reporter.advance(
            Stage.CAPACITY,
            f"p95 stays within {limit:.3g} ms up to {rate:.0f} requests/s"
            if rate
            else f"p95 is over {limit:.3g} ms at any rate",
            by=0,
            facts={"requests_per_second": rate, "saturation_per_second": measured.saturation_per_second},
        )
        return measured

    def _gemm(self, chosen: CandidateFacts) -> Any:
        shape = EncoderShape.of(self._job.folder.config)
        left = self._budget.left() - WRITING_SECONDS
        if shape is None or not chosen.latency or left < 1.0:
            return ()
        try:
            ceiling = self._lab.ceiling(chosen.recipe.precision, timeout_seconds=min(CEILING_SECONDS, left))
        except WorkerFailed:
            # A figure for the report, and no reason to lose the rest of it.
            return ()
        return gemm_shares(shape, conclusion.milliseconds(chosen), ceiling)

    # what the stages need

    def _may_serve(self, recipe: Recipe) -> bool:
        allowed = self._job.spec.optimization
        return recipe.engine in allowed.engines and recipe.precision in allowed.precisions

    def _refuse_if_told_to(self, candidates: Sequence[CandidateFacts]) -> None:
        """`whenNoCandidate: Fail`: an error that lists each candidate, unless one of them may be served."""
        optimization = self._job.spec.optimization
        others = [one for one in candidates if one.recipe != TEACHER and one.outcome is not Outcome.SKIPPED]
        if optimization.when_no_candidate is not NoCandidate.FAIL or not self._searches or not others:
            return
        if any(one.outcome in {Outcome.CHOSEN, Outcome.SLOWER} for one in others):
            return
        listed = "; ".join(f"{one.recipe.name}: {one.reason}" for one in others)
        raise OptimizationError(
            f"no candidate is within the accuracy budget, and whenNoCandidate is Fail ({listed})",
            remedy="Widen spec.optimization.accuracy, allow more precisions, or set whenNoCandidate: ServeFP32",
        )

    def _manifest(
        self,
        exported: ExportedFacts,
        candidates: tuple[CandidateFacts, ...],
        climbed: Climbed,
        measured: Measured | None = None,
    ) -> Manifest:
        job = self._job
        entrants = {entrant.recipe: entrant for entrant in self._tryout.entrants}
        by_recipe = {one.recipe: one for one in candidates}
        skipped = sum(one.outcome is Outcome.SKIPPED and one.reason == OUT_OF_TIME for one in candidates)
        late = sum(one.outcome is Outcome.FAILED and "did not end within" in one.reason for one in candidates)
        finished = climbed.finished or self._budget.plans_seconds >= MOST_PLANS_SECONDS
        teacher_plan = baseline_plan(job.grant.cores, entrants[TEACHER].batching)
        return Manifest(
            key=job.key,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            toolchain=job.tools,
            model=job.model_facts(exported.parameters),
            task=job.spec.task,
            cpu=job.host.cpu,
            cores=job.grant.cores,
            objective=job.spec.objective.summary,
            chosen=self._served(entrants[climbed.plan.recipe], climbed.plan),
            baseline=self._served(entrants[TEACHER], teacher_plan),
            candidates=candidates,
            capacity=measured.curve if measured else CapacityCurve(),
            speed_up=conclusion.speed_up(by_recipe[TEACHER], by_recipe[climbed.plan.recipe]),
            noise=climbed.noise,
            workload=job.mix.summary,
            trials=conclusion.plan_trials(climbed.steps),
            findings=conclusion.findings(
                candidates=candidates,
                teacher=TEACHER,
                plan=climbed.plan,
                noise=climbed.noise,
                skipped_for_time=skipped + late,
                search_finished=climbed.finished,
                shared_cpus=not job.load_cpus,
                host=job.findings(),
            ),
            serving_rss_bytes=measured.resident_bytes if measured else None,
            seconds=self._budget.spent,
            budget_seconds=self._budget.seconds,
            cut_short=bool(skipped or late or not finished),
            files={},
        )

    def _served(self, entrant: Entrant, plan: Plan) -> ServedModel:
        assert entrant.built is not None  # noqa: S101 - what may serve was built
        return ServedModel(path=graph_path(entrant.recipe, Path(entrant.built.graph)), io=entrant.built.io, plan=plan)

    def _write(self, target: Path, manifest: Manifest) -> None:
        graphs = {
            served.plan.recipe: self._job.work.candidate(served.plan.recipe) / Path(served.path).name
            for served in (manifest.chosen, manifest.baseline)
        }
        write_artefact(
            target,
            folder=self._job.folder,
            graphs=graphs,
            describe=lambda files: manifest.model_copy(update={"files": files}),
        )

    # events

    def _on_settled(self, entrant: Entrant) -> None:
        self._reporter.advance(
            Stage.CANDIDATES,
            f"{entrant.recipe.name}: {entrant.facts.outcome.value}, {entrant.facts.reason}",
            facts={"candidate": entrant.facts.model_dump(mode="json")},
        )

    def _on_round(self, number: int) -> None:
        self._reporter.advance(Stage.MEASURE, f"round {number} of {ROUNDS}")

    def _on_step(self, step: Step) -> None:
        self._reporter.advance(
            Stage.PLANS,
            f"{step.challenger.summary}: {step.reason}",
            facts={
                "plan": step.challenger.model_dump(mode="json"),
                "promoted": step.promoted,
                "reason": step.reason,
            },
        )


def by_time(recipes: Sequence[Recipe], seconds: float) -> list[Recipe]:
    """The order to try recipes in: by promise, but with little time those last that must be calibrated, since making
    one of them takes as long as all the others."""
    if seconds >= CALIBRATION_IS_CHEAP_SECONDS:
        return list(recipes)
    return sorted(recipes, key=lambda recipe: recipe.precision is Precision.INT8_STATIC)


def export_message(exported: ExportedFacts) -> str:
    """One line: where the graph came from, what is fused, how long it took."""
    made = {"builder": "built from the weights", "own-onnx": "the model's own file", "torch": "through torch"}
    fused = " / ".join(f"{count} {name}" for name, count in sorted(exported.fused_nodes.items()))
    graph = f"fused ONNX graph, {fused}" if fused else "ONNX graph, nothing fused"
    how = made.get(exported.how, exported.how)
    return f"{graph}, {how}, {exported.parameters / 1e6:.1f} M weights, {exported.seconds:.1f} s"
