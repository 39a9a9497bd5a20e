"""Optimises an endpoint for text generation: the fp32 artefact, candidates with their verdicts and times, the artefact.

Each candidate runs in a process of its own. What is measured is kept in the work folder, from which the next run goes
on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from penstock.capacity import TokenCurve, TokenPoint
from penstock.errors import NoCandidateWithinBudget
from penstock.manifest import (
    GRAPH_OUTPUTS,
    CandidateFacts,
    GraphIO,
    Manifest,
    Outcome,
    ReasonCode,
    ServedModel,
)
from penstock.recipe import EngineName, Recipe
from penstock.resources.endpoint import NoCandidate, OptimizationMode
from penstock.tasks import Head
from penstock_optimizer.candidate.isolation import WorkerFailed
from penstock_optimizer.candidate.work_folder import CandidateRecord, locked
from penstock_optimizer.export.families import read_decoder
from penstock_optimizer.export.transformer import Decoder
from penstock_optimizer.generation import plans
from penstock_optimizer.generation.agreement_of_logits import GenerationBudget
from penstock_optimizer.generation.candidate_process import (
    CandidateProcess,
    GenerationContext,
    graph_bytes,
    write_recipe,
)
from penstock_optimizer.generation.prompts import judging_prompts
from penstock_optimizer.generation.token_capacity import (
    capacity_findings,
    lengths_text,
    measure_tokens,
    request_lengths,
)
from penstock_optimizer.guard.judge import unused_budgets
from penstock_optimizer.job.artefact import graph_path, write_artefact
from penstock_optimizer.job.job import Job
from penstock_optimizer.job.progress import OnProgressEvent, Stage, StepCounter, settled_message
from penstock_optimizer.job.screening import (
    CAPACITY_SHARE,
    MAX_REMAINING_SHARE,
    MOST_CAPACITY_SECONDS,
    failed_facts,
    raise_full_disk,
)
from penstock_optimizer.quantise.decoder.native_file import why_not_native
from penstock_optimizer.quantise.decoder.openvino_graph import decoder_facts
from penstock_runtime.engines.native.library import library_path

PROMPTS, CONTINUATION = 64, 16
"""Prompts of the guard, and the tokens after each of them that are compared."""
LEAST_PROMPTS = 16
LONGEST_PROMPT = 192
"""Tokens of a prompt of the guard; the rest is cut off."""
JUDGING_SHARE = 0.15
"""Of the time budget, for the continuations of the fp32 model. Slower models are judged on fewer prompts."""
OUTPUT = 32
"""Most tokens of the answer that is timed."""
PROMPT_LENGTHS = (32, 128, 512)
COMPARED_SHARE = 0.02
"""Of the time budget, for each candidate. At least one group of requests is compared."""
MOST_TRIES = 2
"""Times that a candidate may end the process of the search before it is left out."""
REFERENCE_SECONDS = 600.0
"""The fp32 model may take this long whatever the time budget: without it there is no result."""
ENDING_SECONDS = 60.0
"""A point of the capacity may take this much longer than asked for: loading the graph, and the steps that run."""
WRITING_SECONDS = 5.0
"""Reserved for the artefact and the report."""


def prepare_generation(job: Job) -> Manifest:
    """Write the fp32 artefact, unless it exists."""
    with locked(job.lock("baseline."), waiting=lambda: None):
        return job.prepared() or GenerationOptimisation(job, 0.0, lambda _: None).write_baseline()


class GenerationOptimisation:
    """One run."""

    def __init__(self, job: Job, seconds: float, on_progress: OnProgressEvent) -> None:
        self._job = job
        self._seconds = seconds
        self._begin = time.monotonic()
        self._searches = job.spec.optimization.mode is OptimizationMode.AUTO
        self._tried, self._skipped = plans.candidates(job.host.cpu.isa, job.spec.optimization)
        count = 1 + (len(self._tried) if self._searches else 0)
        self._events = StepCounter(
            on_progress, {Stage.EXPORT: 1, Stage.CANDIDATES: count, Stage.CAPACITY: 1, Stage.REPORT: 1}
        )

    @cached_property
    def _decoder(self) -> Decoder:
        return read_decoder(self._job.folder)

    @cached_property
    def _candidate_context(self) -> GenerationContext:
        longest = max(min(LONGEST_PROMPT, self._context - CONTINUATION - 1), 1)
        prompts = judging_prompts(self._job.folder, self._job.spec.workload.texts, PROMPTS)
        return GenerationContext(
            model=str(self._job.folder.path),
            decoder=decoder_facts(self._decoder),
            cores=self._job.grant.cores,
            prompts=tuple(tuple(prompt[:longest]) for prompt in prompts),
            continuation=CONTINUATION,
            timed_prompts=tuple(sorted({min(one, self._context) for one in (*PROMPT_LENGTHS, self._prompt_tokens)})),
            prompt_tokens=self._prompt_tokens,
            output_tokens=max(min(OUTPUT, self._context - self._prompt_tokens), 2),
            requests=self._requests,
            reference=str(self._job.work.path / "reference"),
        )

    def _process(self, recipe: Recipe) -> CandidateProcess:
        log = self._job.work.log(recipe.slug)
        return CandidateProcess(self._candidate_context, recipe, self._graph(recipe), log=log, cpus=self._job.cpus)

    @property
    def _context(self) -> int:
        return min(self._decoder.context, self._job.max_tokens)

    @property
    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._begin)

    def write_baseline(self) -> Manifest:
        """Write the fp32 artefact."""
        begin = time.monotonic()
        graph = self._graph(plans.FP32)
        if not graph.is_file():
            write_recipe(self._job.folder, plans.FP32, graph)
        facts = CandidateFacts(
            recipe=plans.FP32,
            outcome=Outcome.CHOSEN,
            reason="the fp32 graph as it was made",
            build_seconds=time.monotonic() - begin,
            size_bytes=graph_bytes(graph),
        )
        found = ["Nothing was measured yet: this is the fp32 graph as it was made."]
        manifest = self._manifest([facts], facts, found)
        return write_artefact(self._job.baseline, manifest, folder=self._job.folder, graphs={plans.FP32: graph})

    def run(self) -> Manifest:
        """Try all candidates within the time budget, and write the artefact."""
        job = self._job
        self._events.advance(Stage.EXPORT, "writing the fp32 graph", facts={"budget_seconds": self._seconds}, by=0)
        prepare_generation(job)
        self._events.advance(Stage.EXPORT, f"{self._decoder.parameters / 1e6:.0f} M weights")
        facts = self._reference()
        measured = [self._settled(facts)]
        if self._searches:
            measured += [self._settled(self._resumed(recipe)) for recipe in self._tried]
            measured += [
                CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason=reason)
                for recipe, reason in self._skipped
            ]
        self._require_candidate(measured)
        passed = [one for one in measured if one.outcome in {Outcome.REFERENCE, Outcome.SLOWER}]
        chosen = plans.best(passed, job.spec.objective)
        capacity, capacity_found = self._capacity(chosen)
        findings = self._findings(measured, chosen, capacity_found)
        manifest = self._manifest(plans.concluded(measured, chosen), chosen, findings)
        manifest = manifest.model_copy(
            update={
                "token_capacity": capacity,
                "seconds": time.monotonic() - self._begin,
                "budget_seconds": self._seconds,
                "cut_short": any(one.reason_code.is_out_of_time for one in measured),
                "speed_up": _speed_up(facts, chosen),
            }
        )
        graphs = {recipe: self._graph(recipe) for recipe in {chosen.recipe, plans.FP32}}
        written = write_artefact(job.artefact, manifest, folder=job.folder, graphs=graphs)
        if not manifest.cut_short:
            job.work.remove()
        self._events.advance(Stage.REPORT, str(job.artefact / "report.html"))
        done = {"artefact": str(job.artefact), "found": False, "seconds": manifest.seconds}
        self._events.advance(Stage.DONE, manifest.chosen.plan.summary, facts=done, by=0)
        return written

    # candidates

    def _reference(self) -> CandidateFacts:
        """The fp32 model's times; its answers on the texts of the guard go to disk."""
        begin = time.monotonic()
        try:
            with self._process(plans.FP32) as process:
                measured = process.refer(
                    JUDGING_SHARE * self._seconds,
                    least=LEAST_PROMPTS,
                    timeout_seconds=max(self._left, REFERENCE_SECONDS),
                )
        except WorkerFailed as failure:
            raise_full_disk(failure, self._job.work)
            raise failure.as_error("the fp32 model does not run") from failure
        return CandidateFacts(
            recipe=plans.FP32,
            outcome=Outcome.REFERENCE,
            reason="the others are compared with it",
            latency=measured.latency,
            generation=measured.generation,
            build_seconds=time.monotonic() - begin,
            size_bytes=graph_bytes(self._graph(plans.FP32)),
        )

    def _resumed(self, recipe: Recipe) -> CandidateFacts:
        """A candidate as an interrupted run has left it, or tried now.

        A candidate with which this process ends too, as in a container whose processes are killed together when its
        memory does not suffice, is left out by the run after the next: the search ends nevertheless.
        """
        work = self._job.work
        record = work.load(recipe)
        if record is not None and self._graph(recipe).is_file():
            return record.facts
        begun = work.tries(recipe)
        if begun >= MOST_TRIES:
            reason = f"the search ended {begun} times while it was tried, out of memory in all likelihood"
            return CandidateFacts(recipe=recipe, outcome=Outcome.FAILED, reason=reason)
        work.save_tries(recipe, begun + 1)
        facts = self._try(recipe)
        work.save_tries(recipe, 0)
        if facts.outcome in {Outcome.SLOWER, Outcome.REJECTED}:
            work.save(CandidateRecord(facts=facts))
        return facts

    def _try(self, recipe: Recipe) -> CandidateFacts:
        facts = CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason="")
        if self._left_for_candidates <= 0:
            return facts.settled(Outcome.SKIPPED, ReasonCode.NO_TURN)
        if recipe.engine is EngineName.NATIVE and (reason := self._why_not_native()) is not None:
            return facts.settled(Outcome.SKIPPED, reason)
        self._events.advance(Stage.CANDIDATES, recipe.name, by=0)
        try:
            with self._process(recipe) as process:
                built = process.build(timeout_seconds=self._limit)
                facts = facts.model_copy(update={"build_seconds": built.seconds, "size_bytes": built.size_bytes})
                seconds = COMPARED_SHARE * self._seconds
                judged = process.judge(self._budget, seconds=seconds, timeout_seconds=self._limit)
                found = judged.invariance
                facts = facts.model_copy(update={"verdict": judged.verdict, "batch_invariance": found})
                if not judged.verdict.passed:
                    return facts.settled(Outcome.REJECTED, judged.verdict.reason)
                if recipe.engine is EngineName.NATIVE and found.differing:
                    # The server promises that its answers do not depend on other requests.
                    reason = f"{found.differing} of {found.requests} answers depend on other requests"
                    return facts.settled(Outcome.REJECTED, reason)
                measured = process.measure(timeout_seconds=self._limit)
        except WorkerFailed as failure:
            raise_full_disk(failure, self._job.work)
            return failed_facts(facts, failure)
        facts = facts.model_copy(update={"generation": measured.generation, "latency": measured.latency})
        return facts.settled(Outcome.SLOWER, ReasonCode.WITHIN_BUDGET)

    @property
    def _left_for_candidates(self) -> float:
        return self._left - WRITING_SECONDS - self._capacity_seconds

    @property
    def _limit(self) -> float:
        """Seconds for one call: a candidate that hangs must leave time for the others."""
        return max(MAX_REMAINING_SHARE * self._left_for_candidates, 0.1)

    def _why_not_native(self) -> str | None:
        if not library_path().is_file():
            return (
                "the native engine was not compiled: install a C compiler (Debian: gcc and libc6-dev) and then Penstock"
            )
        return why_not_native(self._decoder)

    @property
    def _budget(self) -> GenerationBudget:
        share = self._job.spec.optimization.accuracy.min_agreement
        return GenerationBudget() if share is None else GenerationBudget(same_best=share)

    @cached_property
    def _requests(self) -> tuple[tuple[int, int], ...]:
        """Tokens of prompts and answers of the workload."""
        return request_lengths(self._job.spec.workload, self._context)

    @property
    def _prompt_tokens(self) -> int:
        """The median prompt of the workload."""
        return sorted(prompt for prompt, _ in self._requests)[len(self._requests) // 2]

    @property
    def _capacity_seconds(self) -> float:
        return min(CAPACITY_SHARE * self._seconds, MOST_CAPACITY_SECONDS)

    def _capacity(self, chosen: CandidateFacts) -> tuple[TokenCurve, list[str]]:
        """What one replica takes with the chosen plan, and what is to say about it."""
        seconds = min(self._capacity_seconds, self._left - WRITING_SECONDS)
        if seconds <= 0:
            return TokenCurve(), capacity_findings(TokenCurve(), self._job.spec.objective)
        end = time.monotonic() + seconds
        failed: list[str] = []

        def report(point: TokenPoint) -> None:
            message = f"{point.tokens_per_second:.4g} tokens/s with {point.clients} clients"
            self._events.advance(Stage.CAPACITY, message, facts=point.model_dump(mode="json"), by=0)

        with self._process(chosen.recipe) as process:

            def measure(clients: int, left: float) -> TokenPoint | None:
                try:
                    return process.capacity(clients, left, timeout_seconds=left + ENDING_SECONDS)
                except WorkerFailed as failure:
                    failed.append(f"The capacity with {clients} clients was not measured: {failure.reason}.")
                    return None

            objective = self._job.spec.objective
            curve = measure_tokens(
                measure, self._requests, objective, seconds_left=lambda: end - time.monotonic(), on_point=report
            )
        self._events.advance(Stage.CAPACITY, curve.summary or "not measured")
        return curve, failed if failed and not curve.points else failed + capacity_findings(curve, objective)

    def _graph(self, recipe: Recipe) -> Path:
        """The path of a recipe's graph. Recipes that differ in their arithmetic alone share it."""
        name, graphs = plans.graph_name(recipe), self._job.work.path / "graphs"
        if recipe.engine is EngineName.NATIVE:
            return graphs / f"native-{plans.NATIVE_BITS[recipe.precision]}" / name
        path = graphs / plans.STORAGE[recipe.precision].value / name
        if recipe == plans.FP32 and not path.is_file() and self._job.baseline.is_dir():
            return self._job.baseline / graph_path(recipe, Path(name))
        return path

    def _settled(self, facts: CandidateFacts) -> CandidateFacts:
        """Report the outcome of a candidate."""
        found = {"candidate": facts.model_dump(mode="json")}
        self._events.advance(Stage.CANDIDATES, settled_message(facts), facts=found)
        return facts

    def _require_candidate(self, measured: Sequence[CandidateFacts]) -> None:
        """With `whenNoCandidate: Fail`, raise an error unless a candidate besides fp32 may be served."""
        others = [one for one in measured if one.recipe != plans.FP32]
        wants_one = self._job.spec.optimization.when_no_candidate is NoCandidate.FAIL and self._searches
        if not wants_one or any(one.outcome is Outcome.SLOWER for one in others):
            return
        listed = "; ".join(f"{one.recipe.name}: {one.reason}" for one in others)
        raise NoCandidateWithinBudget(
            f"no candidate is within the accuracy budget, and whenNoCandidate is Fail ({listed})",
            remedy="Raise spec.optimization.budgetSeconds, widen spec.optimization.accuracy, allow more precisions, or "
            "set whenNoCandidate: ServeFP32",
        )

    def _findings(
        self, measured: Sequence[CandidateFacts], chosen: CandidateFacts, capacity: Sequence[str]
    ) -> list[str]:
        found = []
        late = sum(one.reason_code.is_out_of_time for one in measured)
        if late:
            found.append(f"The time budget ended before {late} candidates had a turn: a larger one tries them.")
        compared = chosen.batch_invariance
        if compared is not None and compared.differing:
            found.append(
                "With this plan an answer may depend on the requests that run at the same time, also with a seed or at "
                f"temperature 0: {compared.differing} of {compared.requests} answers were others alone than with "
                f"{compared.at_once - 1} other requests."
            )
        elif compared is not None:
            found.append(f"{compared.requests} answers were the same alone and with {compared.at_once - 1} others.")
        return [*found, *capacity, *unused_budgets(self._job.spec.task, self._job.spec.optimization.accuracy)]

    # the artefact

    def _manifest(
        self, measured: Sequence[CandidateFacts], chosen: CandidateFacts, findings: Sequence[str]
    ) -> Manifest:
        decoder = decoder_facts(self._decoder)
        manifest = self._job.manifest(
            self._decoder.parameters,
            chosen=self._served(chosen.recipe),
            baseline=self._served(plans.FP32),
            candidates=measured,
            findings=findings,
        )
        workload = lengths_text(self._requests)
        decoder = decoder.model_copy(update={"context": self._context})
        return manifest.model_copy(update={"decoder": decoder, "workload": workload})

    def _served(self, recipe: Recipe) -> ServedModel:
        io = GraphIO(inputs=("input_ids",), outputs=dict(GRAPH_OUTPUTS[Head.CAUSAL_LM]))
        return ServedModel(
            path=graph_path(recipe, Path(plans.graph_name(recipe))),
            io=io,
            plan=plans.plan_of(recipe, self._job.grant.cores),
        )


def _speed_up(reference: CandidateFacts, chosen: CandidateFacts) -> dict[int, float]:
    """Time of a prompt with fp32 over that with the chosen plan, by tokens."""
    return {
        tokens: reference.milliseconds[tokens] / chosen.milliseconds[tokens]
        for tokens in sorted(reference.milliseconds.keys() & chosen.milliseconds.keys())
    }
