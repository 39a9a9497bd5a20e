"""Optimises an endpoint for text generation: the fp32 artefact, candidates with their verdicts and times, the artefact.

Everything runs in this process, unlike the candidates of encoders: they are few, and of one engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from penstock.capacity import TokenCurve, TokenPoint
from penstock.errors import ArtefactError, NoCandidateWithinBudget
from penstock.manifest import (
    GRAPH_OUTPUTS,
    CandidateFacts,
    GenerationSpeed,
    GraphIO,
    Manifest,
    Metric,
    Outcome,
    ReasonCode,
    ServedModel,
)
from penstock.recipe import EngineName, Recipe
from penstock.resources.endpoint import NoCandidate, OptimizationMode
from penstock.tasks import Head
from penstock_optimizer.candidate.work_folder import locked
from penstock_optimizer.generation import drive, plans
from penstock_optimizer.generation.agreement_of_logits import GenerationBudget, compare, judge_texts
from penstock_optimizer.generation.decoder import Decoder
from penstock_optimizer.generation.decoder_families import read_decoder
from penstock_optimizer.generation.decoder_graph import decoder_facts, write_graph
from penstock_optimizer.generation.native_graph import why_not_native, write_native
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
from penstock_optimizer.job.screening import CAPACITY_SHARE, MOST_CAPACITY_SECONDS
from penstock_runtime.engines.native.library import library_path
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.generation.engine import BLOCK_SIZE, StepEngine
from penstock_runtime.generation.open import block_bytes, load_graph
from penstock_runtime.rows import Float
from penstock_runtime.tokens import Tokenizer

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
COMPANY = 4
"""Prompts that are continued alone and together."""
CAPACITY_CLIENTS = 32
"""Clients whose requests fit into the cache when the capacity is measured, if they take no more than..."""
CAPACITY_CACHE_BYTES = 2**30
"""... this: with more, requests wait for blocks."""
WRITING_SECONDS = 5.0
"""Reserved for the artefact and the report."""


@dataclass(frozen=True)
class ReferenceTexts:
    """What the fp32 model gives on the texts of the guard."""

    texts: list[drive.Forced]
    logits: list[Float]


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
        self._graphs: dict[Recipe, Path] = {}

    @cached_property
    def _decoder(self) -> Decoder:
        return read_decoder(self._job.folder)

    @cached_property
    def _prompts(self) -> list[drive.Tokens]:
        longest = max(min(LONGEST_PROMPT, self._context - CONTINUATION - 1), 1)
        return [
            np.array(prompt[:longest], np.int32)
            for prompt in judging_prompts(self._job.folder, self._job.spec.workload.texts, PROMPTS)
        ]

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
        facts = CandidateFacts(
            recipe=plans.FP32,
            outcome=Outcome.CHOSEN,
            reason="the fp32 graph as it was made",
            build_seconds=time.monotonic() - begin,
            size_bytes=_size(graph),
        )
        found = ["Nothing was measured yet: this is the fp32 graph as it was made."]
        manifest = self._manifest([facts], facts, found)
        return write_artefact(
            self._job.baseline, manifest, folder=self._job.folder, graphs={plans.FP32: self._graph(plans.FP32)}
        )

    def run(self) -> Manifest:
        """Try all candidates within the time budget, and write the artefact."""
        job = self._job
        self._events.advance(Stage.EXPORT, "writing the fp32 graph", facts={"budget_seconds": self._seconds}, by=0)
        prepare_generation(job)
        self._events.advance(Stage.EXPORT, f"{self._decoder.parameters / 1e6:.0f} M weights")
        reference, facts = self._reference()
        measured = [self._settled(facts)]
        if self._searches:
            measured += [self._settled(self._try(recipe, reference)) for recipe in self._tried]
            measured += [
                CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason=reason)
                for recipe, reason in self._skipped
            ]
        self._require_candidate(measured)
        passed = [one for one in measured if one.outcome in {Outcome.REFERENCE, Outcome.SLOWER}]
        chosen = plans.best(passed, job.spec.objective)
        capacity = self._capacity(chosen)
        findings = self._findings(measured, chosen, capacity)
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

    def _reference(self) -> tuple[ReferenceTexts, CandidateFacts]:
        """The fp32 model's continuations and times."""
        begin = time.monotonic()
        graph = self._graph(plans.FP32)
        engine = self._open(plans.FP32)
        try:
            speed = self._speed(engine)
            each = (time.monotonic() - begin) / 4
            count = int(np.clip(self._seconds * JUDGING_SHARE / max(each, 1e-3), LEAST_PROMPTS, len(self._prompts)))
            prompts = self._prompts[:count]
            found = drive.continue_greedily(engine, prompts, CONTINUATION)
            latency = drive.measure_prompts(engine, self._lengths)
        finally:
            engine.close()
        texts = [drive.Forced(prompt, tokens) for prompt, (tokens, _) in zip(prompts, found, strict=True)]
        facts = CandidateFacts(
            recipe=plans.FP32,
            outcome=Outcome.REFERENCE,
            reason="the others are compared with it",
            latency=latency,
            generation=speed,
            build_seconds=time.monotonic() - begin,
            size_bytes=_size(graph),
        )
        return ReferenceTexts(texts, [logits for _, logits in found]), facts

    def _try(self, recipe: Recipe, reference: ReferenceTexts) -> CandidateFacts:
        if self._left < WRITING_SECONDS + self._capacity_seconds:
            blank = CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason="")
            return blank.settled(Outcome.SKIPPED, ReasonCode.NO_TURN)
        if recipe.engine is EngineName.NATIVE and (reason := self._why_not_native()) is not None:
            return CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason=reason)
        self._events.advance(Stage.CANDIDATES, recipe.name, by=0)
        begin = time.monotonic()
        facts = CandidateFacts(recipe=recipe, outcome=Outcome.FAILED, reason="")
        try:
            graph = self._graph(recipe)
            facts = facts.model_copy(update={"build_seconds": time.monotonic() - begin, "size_bytes": _size(graph)})
            engine = self._open(recipe)
        except (ArtefactError, RuntimeError, MemoryError) as error:
            return facts.settled(Outcome.FAILED, f"it does not load: {error}")
        try:
            found = drive.forced_logits(engine, reference.texts)
            compared = [
                compare(expected, actual, text.continuation)
                for expected, actual, text in zip(reference.logits, found, reference.texts, strict=True)
            ]
            company = drive.same_in_company(engine, self._prompts[:COMPANY], CONTINUATION)
            verdict = judge_texts(compared, company, self._budget)
            facts = facts.model_copy(update={"verdict": verdict})
            if not verdict.passed:
                return facts.settled(Outcome.REJECTED, verdict.reason)
            if recipe.engine is EngineName.NATIVE and company < 1:
                # The server promises that its answers do not depend on other requests.
                return facts.settled(Outcome.REJECTED, f"only {company:.1%} of its tokens are the same in company")
            speed = self._speed(engine)
            latency = drive.measure_prompts(engine, self._lengths)
        except InferenceFailed as error:
            return facts.settled(Outcome.FAILED, f"it does not run: {error}")
        finally:
            engine.close()
        facts = facts.model_copy(update={"generation": speed, "latency": latency})
        return facts.settled(Outcome.SLOWER, ReasonCode.WITHIN_BUDGET)

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
    def _output_tokens(self) -> int:
        return max(min(OUTPUT, self._context - self._prompt_tokens), 2)

    @property
    def _capacity_seconds(self) -> float:
        return min(CAPACITY_SHARE * self._seconds, MOST_CAPACITY_SECONDS)

    def _capacity(self, chosen: CandidateFacts) -> TokenCurve:
        """What one replica takes with the chosen plan."""
        recipe, facts = chosen.recipe, decoder_facts(self._decoder)
        seconds = min(self._capacity_seconds, self._left - WRITING_SECONDS)
        if seconds <= 0:
            return TokenCurve()
        end = time.monotonic() + seconds
        longest = drive.blocks_needed(BLOCK_SIZE, max(map(sum, self._requests)), 1)
        fitting = CAPACITY_CACHE_BYTES // block_bytes(facts, recipe)
        blocks = max(longest, min(CAPACITY_CLIENTS * longest, fitting))
        engine = load_graph(self._graph(recipe), facts, recipe, self._job.grant.cores, blocks=blocks)

        def report(point: TokenPoint) -> None:
            message = f"{point.tokens_per_second:.4g} tokens/s with {point.clients} clients"
            self._events.advance(Stage.CAPACITY, message, facts=point.model_dump(mode="json"), by=0)

        curve = measure_tokens(
            engine,
            Tokenizer.load(self._job.folder).backend.decode,
            self._requests,
            self._job.spec.objective,
            seconds_left=lambda: end - time.monotonic(),
            on_point=report,
        )
        self._events.advance(Stage.CAPACITY, curve.summary or "not measured")
        return curve

    @property
    def _lengths(self) -> list[int]:
        return sorted({min(length, self._context) for length in (*PROMPT_LENGTHS, self._prompt_tokens)})

    def _speed(self, engine: StepEngine) -> GenerationSpeed:
        prompt = np.resize(np.concatenate(self._prompts), self._prompt_tokens).astype(np.int32)
        return drive.measure_speed(engine, prompt, self._output_tokens)

    def _open(self, recipe: Recipe) -> StepEngine:
        longest = max(LONGEST_PROMPT + CONTINUATION, self._prompt_tokens + self._output_tokens)
        blocks = max(drive.blocks_needed(BLOCK_SIZE, longest), drive.blocks_needed(BLOCK_SIZE, self._lengths[-1], 1))
        facts = decoder_facts(self._decoder)
        return load_graph(self._graph(recipe), facts, recipe, self._job.grant.cores, blocks=blocks)

    def _graph(self, recipe: Recipe) -> Path:
        """The graph of a recipe. Recipes that differ in their arithmetic alone share it."""
        name, graphs = plans.graph_name(recipe), self._job.work.path / "graphs"
        if recipe.engine is EngineName.NATIVE:
            bits = plans.NATIVE_BITS[recipe.precision]
            path = graphs / f"native-{bits}" / name
            if not path.is_file():
                write_native(self._decoder, bits, path)
            return path
        storage = plans.STORAGE[recipe.precision]
        path = graphs / storage.value / name
        if recipe == plans.FP32 and not path.is_file() and self._job.baseline.is_dir():
            path = self._job.baseline / graph_path(recipe, Path(name))
        if not path.is_file():
            write_graph(self._decoder, storage, path)
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

    def _findings(self, measured: Sequence[CandidateFacts], chosen: CandidateFacts, capacity: TokenCurve) -> list[str]:
        found = []
        late = sum(one.reason_code.is_out_of_time for one in measured)
        if late:
            found.append(f"The time budget ended before {late} candidates had a turn: a larger one tries them.")
        company = next(
            (metric.value for metric in _metrics(chosen) if metric.name == "same_in_company"),
            None,
        )
        if company is not None and company < 1:
            found.append(
                "With this plan an answer may depend on the requests that run at the same time, also with a seed or at "
                f"temperature 0: {company:.0%} of the tokens were the same alone and in company."
            )
        found += capacity_findings(capacity, self._job.spec.objective)
        return [*found, *unused_budgets(self._job.spec.task, self._job.spec.optimization.accuracy)]

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


def _metrics(facts: CandidateFacts) -> tuple[Metric, ...]:
    return facts.verdict.metrics if facts.verdict is not None else ()


def _size(graph: Path) -> int:
    return sum(file.stat().st_size for file in graph.parent.iterdir())


def _speed_up(reference: CandidateFacts, chosen: CandidateFacts) -> dict[int, float]:
    """Time of a prompt with fp32 over that with the chosen plan, by tokens."""
    return {
        tokens: reference.milliseconds[tokens] / chosen.milliseconds[tokens]
        for tokens in sorted(reference.milliseconds.keys() & chosen.milliseconds.keys())
    }
