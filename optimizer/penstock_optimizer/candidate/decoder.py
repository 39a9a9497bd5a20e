"""Builds, judges and times one candidate of text generation in a worker process: the object that `isolation` serves."""

from __future__ import annotations

import shutil
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from penstock.manifest import BatchInvariance, DecoderFacts, Frozen, GenerationSpeed, LatencyPoint, Verdict
from penstock.recipe import EngineName, Precision, Recipe
from penstock_optimizer.candidate import drive
from penstock_optimizer.candidate.isolation import CpuTime
from penstock_optimizer.candidate.measure import CONTENTION
from penstock_optimizer.export import read_decoder
from penstock_optimizer.guard.agreement_of_logits import GenerationBudget, TextAgreement, compare, judge_texts
from penstock_optimizer.guard.batch_invariance import Tokens, measure_invariance, requests_of, within
from penstock_optimizer.quantise.decoder.native_file import write_native
from penstock_optimizer.quantise.decoder.openvino_graph import write_graph
from penstock_optimizer.quantise.decoder.storage import Storage
from penstock_runtime.engines.base import BLOCK_SIZE, StepEngine
from penstock_runtime.engines.load import load_step_engine
from penstock_runtime.engines.native.graph_file import SUFFIX
from penstock_runtime.models.folder import ModelFolder

TARGET = "penstock_optimizer.candidate.decoder:DecoderCandidate"
COMPARED = 64
"""Most requests that are run alone and together, to compare their answers."""
COMPARED_PROMPT, COMPARED_ANSWER = 48, 12
"""Most tokens of their prompts and answers."""
STORAGE = {
    Precision.FP32: Storage.FP32,
    Precision.BF16: Storage.FP32,
    Precision.INT8_WEIGHTS: Storage.INT8,
    Precision.INT8_ROWWISE: Storage.INT8,
    Precision.INT4_WEIGHTS: Storage.INT4,
    Precision.INT4_ROWWISE: Storage.INT4,
}
"""The form in which OpenVINO's graph of a precision stores its weights."""
NATIVE_BITS = {Precision.INT8_ROWWISE: 8, Precision.INT4_ROWWISE: 4}
"""Bits of the weights in the native engine's graph of a precision."""


class DecoderContext(Frozen):
    """What all candidates of an optimisation have in common."""

    model: str
    """The model's folder."""
    decoder: DecoderFacts
    cores: int
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of the guard's prompts. They fit into the context with their continuations."""
    continuation: int
    """Tokens after each prompt that are compared."""
    timed_prompts: tuple[int, ...]
    """Tokens of the prompts that are timed alone, in ascending order."""
    prompt_tokens: int
    """Tokens of the prompt for which the whole answer is timed."""
    output_tokens: int
    reference: str
    """Folder for the tokens and logits of the fp32 model on the guard's prompts."""


class BuiltGraph(Frozen):
    """The graph on disk."""

    seconds: float
    size_bytes: int


class MeasuredSpeed(Frozen):
    """The times of a candidate."""

    generation: GenerationSpeed
    latency: tuple[LatencyPoint, ...]


class JudgedAnswers(Frozen):
    """The findings of the guard."""

    verdict: Verdict
    invariance: BatchInvariance


class DecoderCandidate:
    """Receives the calls. `configure` comes first, `build` before the rest. The engine is opened when it is used."""

    _context: DecoderContext
    _recipe: Recipe
    _graph: Path

    @property
    def contention(self) -> CpuTime:
        """Of all measurements so far; the worker sends it with each answer."""
        return CONTENTION.total

    def configure(self, context: dict[str, Any], recipe: dict[str, Any], graph: str) -> None:
        """Set the context, the recipe, and the path of its graph."""
        self._context = DecoderContext.model_validate(context)
        self._recipe = Recipe.model_validate(recipe)
        self._graph = Path(graph)

    def build(self) -> BuiltGraph:
        """Write the graph, unless it exists. Recipes that differ in their arithmetic alone share it."""
        begin = time.monotonic()
        if not self._graph.is_file():
            write_recipe(ModelFolder.open(Path(self._context.model)), self._recipe, self._graph)
        return BuiltGraph(seconds=time.monotonic() - begin, size_bytes=graph_bytes(self._graph))

    def refer(self, seconds: float, least: int) -> MeasuredSpeed:
        """Time the reference, and store its tokens and logits on the guard's prompts: on at least `least` of them, and
        on as many as fit into about `seconds`."""
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
        """Compare with the reference's logits, and answers alone with answers in company, for `seconds`. `budget`:
        fields of GenerationBudget."""
        compared = self._compared()
        prompts = [prompt[:COMPARED_PROMPT] for prompt in self._prompts]
        requests = requests_of(prompts, COMPARED, min(COMPARED_ANSWER, self._context.continuation))
        invariance = measure_invariance(self._engine, requests, goes_on=within(seconds))
        verdict = judge_texts(compared, invariance.same_tokens, GenerationBudget(**budget))
        return JudgedAnswers(verdict=verdict, invariance=invariance)

    def measure(self) -> MeasuredSpeed:
        """Time the candidate."""
        return MeasuredSpeed(generation=self._speed(), latency=self._latency())

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
    def _prompts(self) -> list[Tokens]:
        return [np.array(prompt, np.int32) for prompt in self._context.prompts]

    @cached_property
    def _engine(self) -> StepEngine:
        """The engine, with a cache for judging and timing."""
        context = self._context
        judged = max(map(len, context.prompts)) + context.continuation
        longest = max(judged, context.prompt_tokens + context.output_tokens)
        together = drive.blocks_needed(BLOCK_SIZE, longest)
        blocks = max(together, drive.blocks_needed(BLOCK_SIZE, context.timed_prompts[-1], 1))
        return load_step_engine(self._graph, context.decoder, self._recipe, context.cores, blocks=blocks)


def graph_file(graphs: Path, recipe: Recipe) -> Path:
    """The path of a recipe's graph below this folder. Recipes that differ in their arithmetic alone share it."""
    if recipe.engine is EngineName.NATIVE:
        return graphs / f"native-{NATIVE_BITS[recipe.precision]}" / f"model{SUFFIX}"
    return graphs / STORAGE[recipe.precision].value / "model.xml"


def write_recipe(folder: ModelFolder, recipe: Recipe, graph: Path) -> None:
    """Write a recipe's graph into a separate folder, which appears when all its files are complete."""
    draft = graph.parent.with_name(f"{graph.parent.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    decoder = read_decoder(folder)
    if recipe.engine is EngineName.NATIVE:
        write_native(decoder, NATIVE_BITS[recipe.precision], draft / graph.name)
    else:
        write_graph(decoder, STORAGE[recipe.precision], draft / graph.name)
    shutil.rmtree(graph.parent, ignore_errors=True)
    draft.rename(graph.parent)


def graph_bytes(graph: Path) -> int:
    """The size of all files of a graph."""
    return sum(file.stat().st_size for file in graph.parent.iterdir())
