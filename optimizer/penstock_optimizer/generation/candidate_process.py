"""One candidate of text generation in a worker process: writes its graph, judges it, times it, measures its capacity.

`CandidateProcess` is the optimisation's end. `GenerationCandidate` receives the calls; `candidate.isolation` serves it.
A candidate that crashes, hangs or runs out of memory ends its process alone: the call raises WorkerFailed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from penstock.capacity import TokenPoint
from penstock.manifest import BatchInvariance, DecoderFacts, Frozen, GenerationSpeed, LatencyPoint, Verdict
from penstock.recipe import EngineName, Recipe
from penstock_optimizer.candidate.isolation import Worker
from penstock_optimizer.candidate.runner import CONFIGURE_SECONDS
from penstock_optimizer.export.families import read_decoder
from penstock_optimizer.generation import drive, plans
from penstock_optimizer.generation.agreement_of_logits import GenerationBudget, TextAgreement, compare, judge_texts
from penstock_optimizer.generation.batch_invariance import measure_invariance, requests_of, within
from penstock_optimizer.generation.token_capacity import CapacityClients
from penstock_optimizer.quantise.decoder.native_file import write_native
from penstock_optimizer.quantise.decoder.openvino_graph import write_graph
from penstock_runtime.engines.base import BLOCK_SIZE, StepEngine
from penstock_runtime.generation.load import block_bytes, load_graph
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.tokens import Tokenizer

TARGET = "penstock_optimizer.generation.candidate_process:GenerationCandidate"
COMPARED = 64
"""Most requests that are run alone and with others, to compare their answers."""
COMPARED_PROMPT, COMPARED_ANSWER = 48, 12
"""Most tokens of their prompts and answers."""
CAPACITY_CLIENTS = 32
"""Clients whose requests fit into the cache when the capacity is measured, if they take no more than..."""
CAPACITY_CACHE_BYTES = 2**30
"""... this: with more, requests wait for blocks."""


class GenerationContext(Frozen):
    """What all candidates of an optimisation have in common."""

    model: str
    """The model's folder."""
    decoder: DecoderFacts
    cores: int
    prompts: tuple[tuple[int, ...], ...]
    """Of the guard. They, and what follows them, fit into the context."""
    continuation: int
    """Tokens after each prompt that are compared."""
    timed_prompts: tuple[int, ...]
    """Tokens of the prompts that are timed alone, in ascending order."""
    prompt_tokens: int
    """Tokens of the prompt whose whole answer is timed."""
    output_tokens: int
    requests: tuple[tuple[int, int], ...]
    """Tokens of prompts and answers of the workload, for the capacity."""
    reference: str
    """Folder of what the fp32 model gives on the texts of the guard."""


class BuiltGraph(Frozen):
    """The graph on disk."""

    seconds: float
    size_bytes: int


class MeasuredSpeed(Frozen):
    """The times of a candidate."""

    generation: GenerationSpeed
    latency: tuple[LatencyPoint, ...]


class JudgedAnswers(Frozen):
    """What the guard finds."""

    verdict: Verdict
    invariance: BatchInvariance


class CandidateProcess:
    """A candidate in a worker process. Use as a context manager. Every call may raise WorkerFailed."""

    def __init__(
        self, context: GenerationContext, recipe: Recipe, graph: Path, *, log: Path, cpus: Sequence[int]
    ) -> None:
        self._worker = Worker(TARGET, log=log, cpus=cpus)
        self.recipe = recipe
        self._configuration = {"context": context, "recipe": recipe, "graph": str(graph)}
        self._configured = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def build(self, *, timeout_seconds: float) -> BuiltGraph:
        """Write the graph, unless it exists. Recipes that differ in their arithmetic alone share it."""
        return BuiltGraph.model_validate(self._call("build", timeout_seconds))

    def refer(self, seconds: float, *, least: int, timeout_seconds: float) -> MeasuredSpeed:
        """Time the candidate, and store what it gives on the texts of the guard: on at least `least` of the prompts,
        and on as many as fit into about `seconds`."""
        return MeasuredSpeed.model_validate(self._call("refer", timeout_seconds, seconds=seconds, least=least))

    def judge(self, budget: GenerationBudget, *, seconds: float, timeout_seconds: float) -> JudgedAnswers:
        """Compare with what the reference has stored, and answers alone with answers in company, for `seconds`."""
        found = self._call("judge", timeout_seconds, budget=asdict(budget), seconds=seconds)
        return JudgedAnswers.model_validate(found)

    def measure(self, *, timeout_seconds: float) -> MeasuredSpeed:
        """Time the candidate."""
        return MeasuredSpeed.model_validate(self._call("measure", timeout_seconds))

    def capacity(self, clients: int, seconds: float, *, timeout_seconds: float) -> TokenPoint | None:
        """A point of the capacity curve; None if there is none within `seconds`."""
        found = self._call("capacity", timeout_seconds, clients=clients, seconds=seconds)
        return None if found is None else TokenPoint.model_validate(found)

    def _call(self, method: str, timeout_seconds: float, **arguments: Any) -> Any:
        if not self._configured:
            limit = max(timeout_seconds, CONFIGURE_SECONDS)
            self._worker.call("configure", timeout_seconds=limit, **self._configuration)
            self._configured = True
        return self._worker.call(method, timeout_seconds=timeout_seconds, **arguments)


class GenerationCandidate:
    """Receives the calls. `configure` comes first, `build` before the others. The engine is opened when it is used."""

    _context: GenerationContext
    _recipe: Recipe
    _graph: Path

    def configure(self, context: dict[str, Any], recipe: dict[str, Any], graph: str) -> None:
        """Set the context, the recipe, and the path of its graph."""
        self._context = GenerationContext.model_validate(context)
        self._recipe = Recipe.model_validate(recipe)
        self._graph = Path(graph)

    def build(self) -> BuiltGraph:
        """See `CandidateProcess`."""
        begin = time.monotonic()
        if not self._graph.is_file():
            write_recipe(ModelFolder.open(Path(self._context.model)), self._recipe, self._graph)
        return BuiltGraph(seconds=time.monotonic() - begin, size_bytes=graph_bytes(self._graph))

    def refer(self, seconds: float, least: int) -> MeasuredSpeed:
        """See `CandidateProcess`."""
        begin = time.monotonic()
        speed = self._speed()
        each = (time.monotonic() - begin) / 4
        count = int(np.clip(seconds / max(each, 1e-3), least, len(self._prompts)))
        found = drive.continue_greedily(self._engine, self._prompts[:count], self._context.continuation)
        folder = Path(self._context.reference)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "tokens.npy", np.stack([tokens for tokens, _ in found]))
        np.save(folder / "logits.npy", np.stack([logits for _, logits in found]))
        return MeasuredSpeed(generation=speed, latency=self._latency())

    def judge(self, budget: dict[str, float], seconds: float) -> JudgedAnswers:
        """See `CandidateProcess`."""
        compared = self._compared()
        prompts = [prompt[:COMPARED_PROMPT] for prompt in self._prompts]
        requests = requests_of(prompts, COMPARED, min(COMPARED_ANSWER, self._context.continuation))
        invariance = measure_invariance(self._engine, requests, goes_on=within(seconds))
        verdict = judge_texts(compared, invariance.same_tokens, GenerationBudget(**budget))
        return JudgedAnswers(verdict=verdict, invariance=invariance)

    def measure(self) -> MeasuredSpeed:
        """See `CandidateProcess`."""
        return MeasuredSpeed(generation=self._speed(), latency=self._latency())

    def capacity(self, clients: int, seconds: float) -> TokenPoint | None:
        """See `CandidateProcess`."""
        return self._clients.measure(clients, seconds)

    def _compared(self) -> list[TextAgreement]:
        folder = Path(self._context.reference)
        tokens = np.load(folder / "tokens.npy")
        # Hundreds of megabytes with a large vocabulary: a group of texts at a time.
        logits = np.load(folder / "logits.npy", mmap_mode="r")
        compared = []
        for start in range(0, len(tokens), drive.TOGETHER):
            group = range(start, min(start + drive.TOGETHER, len(tokens)))
            texts = [drive.Forced(self._prompts[index], tokens[index]) for index in group]
            found = drive.forced_logits(self._engine, texts)
            compared += [
                compare(logits[index], actual, tokens[index]) for index, actual in zip(group, found, strict=True)
            ]
        return compared

    def _speed(self) -> GenerationSpeed:
        prompt = np.resize(np.concatenate(self._prompts), self._context.prompt_tokens).astype(np.int32)
        return drive.measure_speed(self._engine, prompt, self._context.output_tokens)

    def _latency(self) -> tuple[LatencyPoint, ...]:
        return drive.measure_prompts(self._engine, self._context.timed_prompts)

    @cached_property
    def _prompts(self) -> list[drive.Tokens]:
        return [np.array(prompt, np.int32) for prompt in self._context.prompts]

    @cached_property
    def _engine(self) -> StepEngine:
        """With a pool for what judges and times."""
        context = self._context
        judged = max(map(len, context.prompts)) + context.continuation
        longest = max(judged, context.prompt_tokens + context.output_tokens)
        together = drive.blocks_needed(BLOCK_SIZE, longest)
        return self._opened(max(together, drive.blocks_needed(BLOCK_SIZE, context.timed_prompts[-1], 1)))

    @cached_property
    def _clients(self) -> CapacityClients:
        """With a pool for many clients."""
        longest = drive.blocks_needed(BLOCK_SIZE, max(map(sum, self._context.requests)), 1)
        fitting = CAPACITY_CACHE_BYTES // block_bytes(self._context.decoder, self._recipe)
        blocks = max(longest, min(CAPACITY_CLIENTS * longest, fitting))
        decode = Tokenizer.load(ModelFolder.open(Path(self._context.model))).backend.decode
        return CapacityClients(self._opened(blocks), decode, self._context.requests)

    def _opened(self, blocks: int) -> StepEngine:
        return load_graph(self._graph, self._context.decoder, self._recipe, self._context.cores, blocks=blocks)


def write_recipe(folder: ModelFolder, recipe: Recipe, graph: Path) -> None:
    """Write a recipe's graph into a folder of its own, which appears when all its files are complete."""
    draft = graph.parent.with_name(f"{graph.parent.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    decoder = read_decoder(folder)
    if recipe.engine is EngineName.NATIVE:
        write_native(decoder, plans.NATIVE_BITS[recipe.precision], draft / graph.name)
    else:
        write_graph(decoder, plans.STORAGE[recipe.precision], draft / graph.name)
    shutil.rmtree(graph.parent, ignore_errors=True)
    draft.rename(graph.parent)


def graph_bytes(graph: Path) -> int:
    """Of all files of a graph."""
    return sum(file.stat().st_size for file in graph.parent.iterdir())
