"""Optimises an encoder for this machine's CPUs: screening of recipes, plan search, capacity by arrival rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.capacity import CapacityCurve
from penstock.errors import OptimizationError
from penstock.manifest import (
    CandidateFacts,
    Manifest,
    Outcome,
    PlanTrial,
    ReasonCode,
    ServedGraph,
    ServedModel,
    served_latency,
)
from penstock.recipe import Batching, Plan, Recipe
from penstock.resources.endpoint import OptimizationMode
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from penstock_optimizer.candidate.measure import EncoderShape, gemm_shares
from penstock_optimizer.candidate.runner import ProcessRunner
from penstock_optimizer.candidate.work_folder import ExportedFacts
from penstock_optimizer.capacity.curve import ReplicaBroken, ReplicaServer, measure_capacity
from penstock_optimizer.job.job import Job, graph_path
from penstock_optimizer.job.progress import OnProgressEvent, ProgressReporter, Stage, export_message
from penstock_optimizer.load.workload import measured_lengths, workload_bodies
from penstock_optimizer.report.view import why_fp32
from penstock_optimizer.search.climb import SearchResult, SearchStep, Trials
from penstock_optimizer.search.goal import Goal
from penstock_optimizer.search.recipes import REFERENCE, by_gain, candidate_recipes
from penstock_optimizer.search.space import PlanLimits, WideFrom, expected_milliseconds, first_plan
from penstock_optimizer.targets.plan_search import PlanSearch, is_exhaustive
from penstock_optimizer.targets.screening import LEAST_SECONDS, ROUNDS, CandidateRun, Screening, max_open_processes
from penstock_optimizer.targets.target import (
    EXPORT_SECONDS,
    RAISE_BUDGET,
    Budget,
    ChosenModel,
    MeasuredCapacity,
    Target,
    export_failed,
    measured_noise,
    of_company,
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
NEAR = 1.05
"""Within this factor of the chosen recipe's latency, the plan search decided."""
WORTH_CACHING = 0.1
"""From this share of repeated texts on, the cache of answers is recommended."""
EXPECTED_PLANS = 12
EXPECTED_POINTS = 10


def baseline_plan(cores: int, batching: Batching = Batching.EQUAL_LENGTH) -> Plan:
    """The fp32 plan, not measured. It batches equal lengths only, until the guard has proved that padding changes
    nothing."""
    return first_plan(REFERENCE, PlanLimits(cores, batching, ()), wide_from=WIDE_FROM)


class EncoderTarget(Target):
    """See `Target`."""

    reference = REFERENCE
    judges_live = True

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

    def unmeasured(self) -> ChosenModel:
        """See `Target`."""
        exported = self._export
        graph = Path(exported.graph)
        plan = baseline_plan(self._job.grant.cores)
        return ChosenModel.unmeasured(
            ServedModel(path=graph_path(REFERENCE, graph), io=exported.io, plan=plan),
            graph,
            exported.parameters,
            notes=exported.notes,
            fields={"vector_space": self._job.vector_space(exported.weights)},
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

    def choose(self) -> ChosenModel:
        """See `Target`."""
        self._result = self._find_plan()
        self._screening.close()
        return self._choice()

    def capacity(self, server: ReplicaServer) -> MeasuredCapacity:
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
        return MeasuredCapacity(
            {"capacity": measured.curve, "serving_rss_bytes": measured.resident_bytes},
            missed=tuple(of_missed_rate(measured.curve, wanted)),
        )

    def instead(self, choice: ChosenModel, failure: ReplicaBroken) -> ChosenModel | None:
        """See `Target`."""
        plan = choice.chosen.plan
        if plan.short is not None:
            # The second graph may be the cause: try without it first.
            self._result = replace(self._result, plan=plan.unrouted, sample=None)
            return self._choice()
        if plan.recipe == REFERENCE:
            return None
        self._screening.run_of(plan.recipe).settle(Outcome.FAILED, failure.outcome)
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

    def _choice(self) -> ChosenModel:
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
        noise = measured_noise(result.noise, candidates)
        chosen = self._served(self._screening.run_of(result.plan.recipe), result.plan)
        reference = self._screening.reference
        baseline = self._served(reference, baseline_plan(job.grant.cores, reference.batching))
        return ChosenModel(
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
                of_plan(
                    result.plan,
                    candidates,
                    REFERENCE,
                    noise=noise,
                    contention=self._runner.contention,
                    search_finished=result.finished,
                    second_graph_bytes=result.second_graph_bytes,
                )
            ),
            (*of_repeated_texts(job.spec.workload.texts), *self._export.notes),
            cut_short=not is_exhaustive(result, self.budget),
            fields={
                "vector_space": job.vector_space(self._export.weights),
                "speed_up": speed_up(by_recipe[REFERENCE], result.plan, by_recipe),
                "noise": noise,
                "contention": self._runner.contention,
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


def conclude(
    candidates: Sequence[CandidateFacts],
    *,
    chosen: Plan,
    reference: Recipe,
    expected: Sequence[int],
    steps: Sequence[SearchStep],
    search_finished: bool = True,
) -> tuple[CandidateFacts, ...]:
    """The candidates with their final outcomes and reasons. `expected`: lengths to weigh the latency over."""
    if not search_finished:
        candidates = _without_turn(candidates, chosen=chosen, expected=expected, steps=steps)
    by_recipe = {one.recipe: one for one in candidates}
    return tuple(
        _concluded(one, by_recipe, chosen=chosen, reference=reference, expected=expected, steps=steps)
        for one in candidates
    )


def _is_open(facts: CandidateFacts) -> bool:
    """True for a candidate that passed the guard and was not ruled out before the plan search."""
    return facts.outcome is Outcome.SLOWER and facts.reason_code is ReasonCode.WITHIN_BUDGET


def _without_turn(
    candidates: Sequence[CandidateFacts], *, chosen: Plan, expected: Sequence[int], steps: Sequence[SearchStep]
) -> list[CandidateFacts]:
    """Mark as skipped the candidates that are faster than the chosen one as measured, but of which the plan search had
    no time to try a plan."""
    tried = {plan.recipe for step in steps for plan in (step.challenger, step.incumbent)}.union(chosen.recipes)
    served = next((one for one in candidates if one.recipe == chosen.recipe), None)

    def is_left(one: CandidateFacts) -> bool:
        if one.recipe in tried or not _is_open(one):
            return False
        faster = _ratio(served, one, expected)
        return faster is not None and faster > NEAR

    return [one.settled(Outcome.SKIPPED, ReasonCode.NO_PLAN_TRIED) if is_left(one) else one for one in candidates]


def _concluded(
    facts: CandidateFacts,
    by_recipe: Mapping[Recipe, CandidateFacts],
    *,
    chosen: Plan,
    reference: Recipe,
    expected: Sequence[int],
    steps: Sequence[SearchStep],
) -> CandidateFacts:
    if facts.recipe == chosen.recipe:
        gain = _ratio(by_recipe.get(reference), facts, expected)
        if facts.recipe == reference:
            reason = why_fp32([one for one in by_recipe.values() if one.recipe != reference])
        elif gain is None:
            reason = "best for the objective within the accuracy budget"
        else:
            reason = (
                f"best for the objective within the accuracy budget: {gain:.1f} times as fast as fp32 over the workload"
            )
        return facts.settled(Outcome.CHOSEN, reason)
    if chosen.short is not None and facts.recipe == chosen.short.recipe:
        reason = f"serves rows of up to {chosen.short.longest_tokens} tokens next to {chosen.recipe.name}"
        return facts.settled(facts.outcome, f"{reason}, which it is faster than there")
    if not _is_open(facts):
        return facts
    slower = _ratio(facts, by_recipe.get(chosen.recipe), expected)
    lost = next(
        (step for step in reversed(steps) if step.challenger.recipe == facts.recipe and not step.promoted), None
    )
    won = (step for step in reversed(steps) if step.promoted and step.challenger.recipe != facts.recipe)
    beaten = next((step for step in won if step.incumbent.recipe == facts.recipe), None)
    if lost is not None and (slower is None or slower <= NEAR):
        reason = f"{lost.reason}, against {lost.incumbent.recipe.name}"
    elif beaten is not None and (slower is None or slower <= NEAR):
        reason = f"{beaten.challenger.recipe.name} was {beaten.reason}"
    elif slower is not None and slower > 1.0:
        reason = f"{slower:.2f} times the latency of the chosen recipe over the workload"
    else:
        times = f"{1 / slower:.2f} times " if slower is not None and slower < 1 / NEAR else ""
        reason = f"{times}as fast as the chosen recipe over the workload; no plan of it was tried"
    return facts.settled(facts.outcome, reason)


def _ratio(slow: CandidateFacts | None, fast: CandidateFacts | None, expected: Sequence[int]) -> float | None:
    """Expected latency of `slow` over the expected latency of `fast`; None when either was not measured."""
    if slow is None or fast is None or not slow.latency or not fast.latency:
        return None
    return expected_milliseconds(slow.milliseconds, expected) / expected_milliseconds(fast.milliseconds, expected)


def speed_up(reference: CandidateFacts, plan: Plan, by_recipe: Mapping[Recipe, CandidateFacts]) -> dict[int, float]:
    """fp32 time over the time of the chosen plan, by tokens."""
    slow = reference.milliseconds
    fast = {point.tokens: point.p50_milliseconds for point in served_latency(plan, by_recipe.values())}
    return {tokens: slow[tokens] / fast[tokens] for tokens in sorted(slow.keys() & fast.keys()) if fast[tokens] > 0}


def plan_trials(steps: Sequence[SearchStep]) -> tuple[PlanTrial, ...]:
    """The plan search as the manifest stores it."""
    return tuple(
        PlanTrial(plan=step.challenger, against=step.incumbent, promoted=step.promoted, reason=step.reason)
        for step in steps
    )


def of_plan(
    plan: Plan,
    candidates: Sequence[CandidateFacts],
    reference: Recipe,
    *,
    noise: float,
    contention: float = 0.0,
    search_finished: bool = True,
    second_graph_bytes: int | None = None,
) -> Iterator[str]:
    """Findings about an encoder's plan and the search for it."""
    if not search_finished:
        yield "The time budget ended the plan search before all neighbours of the plan were tried."
    yield from of_company(noise, contention)
    first = next((one for one in candidates if one.recipe == reference), None)
    if first is not None and not first.fused_nodes:
        yield "Nothing was fused in the fp32 graph: this architecture runs node by node, slower than it could."
    if plan.recipe == reference and any(one.outcome is Outcome.REJECTED for one in candidates):
        yield (
            "Faster candidates were rejected for their answers: see the accuracy budget "
            "(docs/reference/accuracy-budgets.md)."
        )
    if plan.short is not None:
        size = next((one.size_bytes for one in candidates if one.recipe == plan.short.recipe), 0)
        memory = f"{second_graph_bytes / 1e6:.0f} MB of memory" if second_graph_bytes else "its memory was not measured"
        yield (
            f"Rows of up to {plan.short.longest_tokens} tokens have a graph of their own ({plan.short.recipe.name}): "
            f"{memory}, {size / 1e6:.0f} MB of the artefact."
        )


def of_repeated_texts(texts: Sequence[str]) -> Iterator[str]:
    """The workload repeats texts, so that the cache of answers pays."""
    if (repeated := repeated_share(texts)) >= WORTH_CACHING:
        yield (
            f"{repeated:.0%} of the workload's texts repeat an earlier one: serving.caches.answersMebibytes answers "
            "such requests from memory."
        )


def repeated_share(texts: Sequence[str]) -> float:
    """The share of texts that repeat an earlier one; 0 without texts."""
    return 1 - len(set(texts)) / len(texts) if texts else 0.0


def of_missed_rate(capacity: CapacityCurve, wanted: float | None) -> Iterator[str]:
    """The rate that the endpoint wants (requests/s) is not reached within its p95. `wanted` None: it states no rate, or
    the curve is incomplete."""
    limit, rate = capacity.p95_objective_milliseconds, capacity.requests_per_second
    if wanted is None or limit is None or (rate or 0.0) >= wanted:
        return
    reached = f"takes {rate:,.4g} of them" if rate is not None else "is over that p95 at any rate that was measured"
    yield (
        f"The {wanted:,.4g} requests/s within a p95 of {limit:,.4g} ms are not reached: one replica {reached}. "
        "Give it more cores, or ask for less."
    )
