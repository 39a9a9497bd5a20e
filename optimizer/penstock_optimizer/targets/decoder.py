"""Optimises a model of text generation for this machine's CPUs: candidates one after the other, capacity by clients.

Verdicts and times are stored in the work folder, from which the next run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from penstock.capacity import TokenCurve, TokenPoint
from penstock.manifest import GRAPH_OUTPUTS, CandidateFacts, GraphIO, Outcome, ReasonCode, ServedModel
from penstock.recipe import EngineName, Recipe
from penstock.resources.endpoint import Objective, OptimizationMode
from penstock.tasks import Head
from penstock_optimizer.candidate import decoder as candidate
from penstock_optimizer.candidate.decoder import (
    BuiltGraph,
    DecoderContext,
    JudgedAnswers,
    MeasuredSpeed,
    graph_bytes,
    graph_file,
    write_recipe,
)
from penstock_optimizer.candidate.isolation import CpuTime, Worker, WorkerFailed
from penstock_optimizer.candidate.work_folder import CandidateRecord
from penstock_optimizer.capacity.curve import CapacityFailed, ReplicaBroken, ReplicaServer
from penstock_optimizer.capacity.tokens import StreamingClients, lengths_text, measure_tokens, request_lengths
from penstock_optimizer.export import read_decoder
from penstock_optimizer.export.transformer import Decoder
from penstock_optimizer.guard.agreement_of_logits import GenerationBudget
from penstock_optimizer.guard.prompts import judging_prompts
from penstock_optimizer.job.job import Job, graph_path
from penstock_optimizer.job.progress import OnProgressEvent, ProgressReporter, Stage
from penstock_optimizer.quantise.decoder.native_file import why_not_native
from penstock_optimizer.quantise.decoder.openvino_graph import decoder_facts
from penstock_optimizer.search import decoder_plans as plans
from penstock_optimizer.targets.screening import failed_facts, raise_full_disk
from penstock_optimizer.targets.target import (
    MAX_REMAINING_SHARE,
    Budget,
    ChosenModel,
    MeasuredCapacity,
    Target,
    measured_noise,
    of_company,
)
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

T = TypeVar("T", BuiltGraph, JudgedAnswers, MeasuredSpeed)


class DecoderTarget(Target):
    """See `Target`."""

    reference = plans.FP32

    def __init__(self, job: Job, seconds: float, on_progress: OnProgressEvent) -> None:
        self._job = job
        self.budget = Budget(seconds, plans_share=0.0)
        self._searches = job.spec.optimization.mode is OptimizationMode.AUTO
        self._tried, self._skipped = plans.candidates(job.host.cpu.isa, job.spec.optimization)
        count = 1 + (len(self._tried) if self._searches else 0)
        self.events = ProgressReporter(
            on_progress, {Stage.EXPORT: 1, Stage.CANDIDATES: count, Stage.CAPACITY: 1, Stage.REPORT: 1}
        )
        self._candidates: list[CandidateFacts] = []
        self._processes: list[Worker] = []

    @property
    def candidates(self) -> Sequence[CandidateFacts]:
        """See `Target`."""
        return self._candidates

    def export(self, seconds: float) -> tuple[str, Mapping[str, Any]]:
        """See `Target`. The time is not limited: writing takes as long as reading the weights."""
        del seconds
        begin = time.monotonic()
        graph = self._graph(plans.FP32)
        if not graph.is_file():
            write_recipe(self._job.folder, plans.FP32, graph)
        self._build_seconds = time.monotonic() - begin
        return f"{self._decoder.parameters / 1e6:.0f} M weights", {}

    def unmeasured(self) -> ChosenModel:
        """See `Target`."""
        graph = self._graph(plans.FP32)
        return ChosenModel.unmeasured(
            self._served(plans.FP32),
            graph,
            self._decoder.parameters,
            build_seconds=self._build_seconds,
            size_bytes=graph_bytes(graph),
            fields=self._fields,
        )

    def try_candidates(self) -> None:
        """See `Target`."""
        self._settle(self._reference())
        if self._searches:
            for recipe in self._tried:
                self._settle(self._resumed(recipe))
            self._candidates += [
                CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason=reason)
                for recipe, reason in self._skipped
            ]

    def choose(self) -> ChosenModel:
        """See `Target`."""
        passed = [one for one in self.candidates if one.outcome in {Outcome.REFERENCE, Outcome.SLOWER}]
        chosen = plans.best(passed, self._job.spec.objective)
        noise = measured_noise(0.0, self.candidates)
        contention = sum((process.contention for process in self._processes), CpuTime()).share
        return ChosenModel(
            self._served(chosen.recipe),
            self._served(plans.FP32),
            {recipe: self._graph(recipe) for recipe in (chosen.recipe, plans.FP32)},
            self._decoder.parameters,
            plans.concluded(self.candidates, chosen),
            findings=(*of_company(noise, contention), *_of_invariance(chosen)),
            fields={
                **self._fields,
                "speed_up": _speed_up(self.candidates[0], chosen),
                "noise": noise,
                "contention": contention,
            },
        )

    def capacity(self, server: ReplicaServer) -> MeasuredCapacity:
        """See `Target`."""
        job, doubts = self._job, list[str]()
        objective = job.spec.objective
        end = self.budget.spent + min(self.budget.capacity_seconds, self.budget.left_for_capacity())
        clients = StreamingClients(server, job.tokenizer.backend, self._requests, job.load_cpus or job.host.allowed)

        def measure(count: int, seconds: float) -> TokenPoint | None:
            try:
                return clients.measure(count, seconds)
            except ReplicaBroken:
                raise
            except CapacityFailed as failure:
                doubts.append(f"The capacity with {count} clients was not measured: {failure.message}.")
                return None

        curve = measure_tokens(
            measure, self._requests, objective, seconds_left=lambda: end - self.budget.spent, on_point=self._report
        )
        self.events.advance(Stage.CAPACITY, curve.summary or "not measured")
        missed = () if doubts and not curve.points else tuple(of_token_curve(curve, objective))
        return MeasuredCapacity({"token_capacity": curve}, missed, tuple(doubts))

    def instead(self, choice: ChosenModel, failure: ReplicaBroken) -> ChosenModel | None:
        """See `Target`."""
        broken = choice.chosen.plan.recipe
        if broken == plans.FP32:
            return None
        self._candidates = [
            one.settled(Outcome.FAILED, failure.outcome) if one.recipe == broken else one for one in self.candidates
        ]
        return self.choose()

    # candidates

    def _reference(self) -> CandidateFacts:
        """The fp32 model's times; its answers on the texts of the guard go to disk."""
        begin = time.monotonic()
        try:
            with self._process(plans.FP32) as process:
                measured = _call(
                    process,
                    MeasuredSpeed,
                    "refer",
                    max(self.budget.left(), REFERENCE_SECONDS),
                    seconds=JUDGING_SHARE * self.budget.seconds,
                    least=LEAST_PROMPTS,
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

        A candidate with which this process ends too, as in a container that ends all its processes when its
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
        if self.budget.left_for_candidates() <= 0:
            return facts.settled(Outcome.SKIPPED, ReasonCode.NO_TURN)
        if recipe.engine is EngineName.NATIVE and (reason := self._why_not_native()) is not None:
            return facts.settled(Outcome.SKIPPED, reason)
        self.events.trying(recipe)
        try:
            with self._process(recipe) as process:
                built = _call(process, BuiltGraph, "build", self._limit)
                facts = facts.model_copy(update={"build_seconds": built.seconds, "size_bytes": built.size_bytes})
                seconds = COMPARED_SHARE * self.budget.seconds
                judged = _call(
                    process, JudgedAnswers, "judge", self._limit, budget=asdict(self._accuracy), seconds=seconds
                )
                found = judged.invariance
                facts = facts.model_copy(update={"verdict": judged.verdict, "batch_invariance": found})
                if not judged.verdict.passed:
                    return facts.settled(Outcome.REJECTED, judged.verdict.reason)
                if recipe.engine is EngineName.NATIVE and found.differing:
                    # The server promises that its answers do not depend on other requests.
                    reason = f"{found.differing} of {found.requests} answers depend on other requests"
                    return facts.settled(Outcome.REJECTED, reason)
                measured = _call(process, MeasuredSpeed, "measure", self._limit)
        except WorkerFailed as failure:
            raise_full_disk(failure, self._job.work)
            return failed_facts(facts, failure)
        facts = facts.model_copy(update={"generation": measured.generation, "latency": measured.latency})
        return facts.settled(Outcome.SLOWER, ReasonCode.WITHIN_BUDGET)

    def _settle(self, facts: CandidateFacts) -> None:
        """Record and report the outcome of a candidate."""
        self._candidates.append(facts)
        self.events.settled(facts)

    def _report(self, point: TokenPoint) -> None:
        message = f"{point.tokens_per_second:.4g} tokens/s with {point.clients} clients"
        self.events.advance(Stage.CAPACITY, message, facts=point.model_dump(mode="json"), by=0)

    def _process(self, recipe: Recipe) -> Worker:
        configuration = {"context": self._candidate_context, "recipe": recipe, "graph": str(self._graph(recipe))}
        log = self._job.work.log(recipe.slug)
        self._processes.append(
            Worker(candidate.TARGET, log=log, cpus=self._job.cpus, configuration=lambda: configuration)
        )
        return self._processes[-1]

    @property
    def _limit(self) -> float:
        """Seconds for one call: a candidate that hangs must leave time for the next."""
        return max(MAX_REMAINING_SHARE * self.budget.left_for_candidates(), 0.1)

    def _why_not_native(self) -> str | None:
        if not library_path().is_file():
            return (
                "the native engine was not compiled: install a C compiler (Debian: gcc and libc6-dev) and then Penstock"
            )
        return why_not_native(self._decoder)

    # the model and its workload

    @cached_property
    def _decoder(self) -> Decoder:
        return read_decoder(self._job.folder)

    @cached_property
    def _candidate_context(self) -> DecoderContext:
        longest = max(min(LONGEST_PROMPT, self._context - CONTINUATION - 1), 1)
        prompts = judging_prompts(self._job.folder, self._job.spec.workload.texts, PROMPTS)
        return DecoderContext(
            model=str(self._job.folder.path),
            decoder=decoder_facts(self._decoder),
            cores=self._job.grant.cores,
            prompts=tuple(tuple(prompt[:longest]) for prompt in prompts),
            continuation=CONTINUATION,
            timed_prompts=tuple(sorted({min(one, self._context) for one in (*PROMPT_LENGTHS, self._prompt_tokens)})),
            prompt_tokens=self._prompt_tokens,
            output_tokens=max(min(OUTPUT, self._context - self._prompt_tokens), 2),
            reference=str(self._job.work.path / "reference"),
        )

    @property
    def _context(self) -> int:
        return min(self._decoder.context, self._job.max_tokens)

    @property
    def _accuracy(self) -> GenerationBudget:
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

    def _graph(self, recipe: Recipe) -> Path:
        """The path of a recipe's graph, in the work folder or in the fp32 artefact."""
        path = graph_file(self._job.work.path / "graphs", recipe)
        if recipe == plans.FP32 and not path.is_file() and self._job.baseline.is_dir():
            return self._job.baseline / graph_path(recipe, path)
        return path

    def _served(self, recipe: Recipe) -> ServedModel:
        io = GraphIO(inputs=("input_ids",), outputs=dict(GRAPH_OUTPUTS[Head.CAUSAL_LM]))
        path = graph_path(recipe, self._graph(recipe))
        return ServedModel(path=path, io=io, plan=plans.plan_of(recipe, self._job.grant.cores))

    @property
    def _fields(self) -> dict[str, Any]:
        decoder = decoder_facts(self._decoder).model_copy(update={"context": self._context})
        return {"decoder": decoder, "workload": lengths_text(self._requests)}


def _call(process: Worker, answer: type[T], method: str, timeout_seconds: float, **arguments: Any) -> T:
    """Call a method of `DecoderCandidate`; WorkerFailed."""
    return answer.model_validate(process.call(method, timeout_seconds=timeout_seconds, **arguments))


def _of_invariance(chosen: CandidateFacts) -> Iterator[str]:
    """The finding about answers that depend on other requests."""
    compared = chosen.batch_invariance
    if compared is not None and compared.differing:
        yield (
            "With this plan an answer may depend on the requests that run at the same time, also with a seed or at "
            f"temperature 0: {compared.differing} of {compared.requests} answers were others alone than with "
            f"{compared.at_once - 1} other requests."
        )
    elif compared is not None:
        yield f"{compared.requests} answers were the same alone and with {compared.at_once - 1} others."


def _speed_up(reference: CandidateFacts, chosen: CandidateFacts) -> dict[int, float]:
    """Time of a prompt with fp32 over the time with the chosen plan, by tokens."""
    slow, fast = reference.milliseconds, chosen.milliseconds
    return {tokens: slow[tokens] / fast[tokens] for tokens in sorted(slow.keys() & fast.keys())}


def of_token_curve(curve: TokenCurve, objective: Objective) -> Iterator[str]:
    """The capacity of a replica that generates text was not measured, or misses the objective."""
    wanted = objective.tokens_per_second
    if not curve.points:
        yield "The capacity of a replica was not measured: the time budget was too short."
    elif curve.within is None:
        yield f"{curve.summary[:1].upper()}{curve.summary[1:]}: give it more cores, or a smaller model."
    elif wanted is not None and (reached := curve.within.tokens_per_second) < wanted:
        yield f"The {wanted:.4g} tokens/s of the objective are not reached: one replica takes {reached:.4g} of them."
