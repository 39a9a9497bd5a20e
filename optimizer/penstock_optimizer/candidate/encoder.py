"""Builds, judges and times one candidate in a worker process: the object that `isolation` serves.

Calls come as JSON from `runner.ProcessSession`. Exporters and engines are imported on use: a
candidate of ONNX Runtime never loads OpenVINO, and the coordinating process loads neither.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.manifest import GraphIO, Verdict
from penstock.recipe import Plan, Precision, Recipe
from penstock.tasks import Head
from penstock_optimizer.candidate import measure
from penstock_optimizer.candidate.isolation import CpuTime
from penstock_optimizer.candidate.measure import resident_bytes
from penstock_optimizer.candidate.runner import CandidateContext
from penstock_optimizer.candidate.work_folder import BuiltFacts, ExportedFacts, GraphFile, load_observed, save_observed
from penstock_optimizer.guard import gate
from penstock_optimizer.guard.gate import Corpus, calibration_rows, judging_samples, own_corpus, samples, split
from penstock_optimizer.guard.judge import SampleRequest
from penstock_optimizer.load.client import RequestBody
from penstock_optimizer.load.workload import LengthMix, predict_bodies, workload_bodies
from penstock_optimizer.search.goal import PlanSample
from penstock_optimizer.search.space import NEVER_WIDE, WideFrom, short_lengths, wide_thresholds
from penstock_runtime.engines.base import Engine, EngineFacts, Streams, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.engines.routed import RoutedEngine
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Batch, Outputs, Row, collate
from penstock_runtime.serving.loaded_model import LoadedModel, check_same_outputs
from penstock_runtime.serving.predictor import Predictor
from penstock_runtime.settings import QueueSettings
from penstock_runtime.tasks.base import Task
from penstock_runtime.tasks.factory import head_of, make_task
from penstock_runtime.tokens import Tokenizer

ENGINES_KEPT = 2
LARGE_BYTES = 600_000_000
"""Total size of a graph's files: of larger graphs only one engine is cached."""
MIX_REQUESTS = 48
"""Requests of one round over the workload's mix: enough for a median and a 95th percentile of lengths, few enough to be
repeated."""
SHORT_REQUESTS = 8
"""Requests of each of the shortest lengths."""
WIDE_SECONDS = 0.08
WIDE_TURNS = 3

Shape = tuple[Recipe, Threads, bool]
"""The recipe of an engine, its threads, and whether it runs wide (all cores for one row)."""


def shapes(plan: Plan) -> tuple[Shape, ...]:
    """The engine of a plan, and the engine of its short rows if it has one."""
    sides = [side for side in (plan, plan.of_short_rows) if side is not None]
    return tuple((side.recipe, Threads(side.streams, side.threads_per_stream), side.may_run_wide) for side in sides)


class BorrowedEngine:
    """An engine with a `close` that does nothing: the cache uses it again for the next plan."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._engine.facts

    def run(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._engine.run(batch)

    def run_wide(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._engine.run_wide(batch)

    def run_widening(self, batch: Batch) -> Outputs:
        """See `Engine`."""
        return self._engine.run_widening(batch)

    def start_streams(self) -> Streams:
        """See `Engine`."""
        return self._engine.start_streams()

    def close(self) -> None:
        """Do nothing: the cache closes it."""


class EngineCache:
    """Engines of one recipe's graph, and of those that serve its short rows."""

    def __init__(self, recipe: Recipe, graph: GraphFile) -> None:
        self._recipe = recipe
        self._graphs = {recipe: graph}
        self._engines: dict[Shape, Engine] = {}
        self._warm: set[tuple[Shape, ...] | Plan] = set()

    def add_graph(self, recipe: Recipe, graph: GraphFile) -> None:
        """Add another recipe's graph. ArtefactError when it has other outputs than the cache's own graph."""
        check_same_outputs(self._graphs[self._recipe].io, graph.io)
        self._graphs[recipe] = graph

    def of(self, plan: Plan) -> Engine:
        """The engine of a plan, or its two engines as one."""
        own, *short = [self.get(shape) for shape in shapes(plan)]
        return own if plan.short is None else RoutedEngine(own, short[0], plan.short.longest_tokens)

    def get(self, shape: Shape) -> Engine:
        """A graph, loaded with these threads. The least recently used engine is closed when too many are open."""
        engine = self._engines.pop(shape, None)
        if engine is None:
            recipe, threads, wide = shape
            graph = self._graphs[recipe]
            # An engine for short rows is in addition to the engine of the long rows, which came just before.
            most = _most_engines(graph) + (recipe != self._recipe)
            while len(self._engines) >= most:
                self._forget(next(iter(self._engines)))
            engine = load_engine(Path(graph.path), graph.io, recipe, threads, wide=wide)
        # Move to the end: the first one is the least recently used.
        self._engines[shape] = engine
        return engine

    @property
    def most(self) -> int:
        """How many engines of the own graph are cached."""
        return _most_engines(self._graphs[self._recipe])

    def is_warm(self, what: tuple[Shape, ...] | Plan) -> bool:
        """True when `mark_warm` was called with it since its engines were loaded."""
        return what in self._warm

    def mark_warm(self, what: tuple[Shape, ...] | Plan) -> None:
        """Record that these engines, or the batches of this plan, have run."""
        self._warm.add(what)

    def close(self, *, but: Shape | None = None) -> None:
        """Close all of them, or all but one."""
        for shape in list(self._engines):
            if shape != but:
                self._forget(shape)

    def _forget(self, shape: Shape) -> None:
        self._engines.pop(shape).close()
        self._warm = {one for one in self._warm if shape not in (shapes(one) if isinstance(one, Plan) else one)}


def _most_engines(graph: GraphFile) -> int:
    size = sum(file.stat().st_size for file in Path(graph.path).parent.iterdir() if file.is_file())
    return ENGINES_KEPT if size < LARGE_BYTES else 1


class Candidate:
    """Receives the calls. `configure` comes first."""

    _context: CandidateContext
    _recipe: Recipe
    _graph: GraphFile
    """Set by `build` or `use`."""

    def __init__(self) -> None:
        self._kept: EngineCache | None = None
        self._second_graph_bytes: int | None = None
        self._made_task: Task | None = None

    @property
    def contention(self) -> CpuTime:
        """Of all measurements so far; the worker sends it with each answer."""
        return measure.CONTENTION.total

    # calls

    def configure(
        self, context: dict[str, Any], recipe: dict[str, Any] | None = None, graph: dict[str, Any] | None = None
    ) -> None:
        """Set the context, the recipe, and its graph if that exists."""
        self._context = CandidateContext.model_validate(context)
        if recipe is not None:
            self._recipe = Recipe.model_validate(recipe)
        if graph is not None:
            self.use(graph)

    def use(self, graph: dict[str, Any]) -> None:
        """Measure and judge this graph from now on."""
        self._graph = GraphFile.model_validate(graph)
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def export(self, out: str, flavour: str) -> ExportedFacts:
        """Write the fp32 graph."""
        from penstock_optimizer.export import Flavour, export

        begin = time.perf_counter()
        exported = export(self._folder, head_of(self._context.task, self._folder), Path(out), flavour=Flavour(flavour))
        return ExportedFacts(
            graph=str(exported.path),
            io=exported.io,
            fused_nodes=exported.fused_nodes,
            how=exported.how,
            parameters=exported.parameters,
            weights=exported.weights,
            notes=exported.notes,
            seconds=time.perf_counter() - begin,
        )

    def build(self, exported: dict[str, Any], out: str) -> BuiltFacts:
        """Make the recipe's graph from an exported one, and use it."""
        from penstock_optimizer.quantise import build

        source = GraphFile.model_validate(exported)
        begin = time.perf_counter()
        calibrating, _ = self._corpora
        requests = samples(self._context.task, calibrating, mask=self._mask)
        rows = calibration_rows(self._task_of(source.io), requests)
        built = build(self._recipe, Path(source.path), source.io, rows, Path(out), threads=self._context.cores)
        self.use({"path": str(built.path), "io": built.io})
        return BuiltFacts(
            graph=built.path.name,
            io=built.io,
            fused_nodes=built.fused_nodes,
            notes=built.notes,
            size_bytes=built.size_bytes,
            seconds=time.perf_counter() - begin,
        )

    def observe_reference(self, file: str) -> Verdict:
        """Run the judging requests through the fp32 reference, store the outcomes in `file`, and prove how it may be
        batched."""
        forward = gate.forward_of(self._latency_engine(), self._graph.io)
        alone = gate.SingleRowForward(forward)
        reference = gate.observe_reference(self._task, alone, self._judging)
        save_observed(reference.observed, Path(file))
        grid = self._latency_engine().facts.grid
        invariance = gate.measure_invariance(forward, reference.rows, alone=alone, grid=grid)
        return Verdict(
            passed=True,
            reason="the fp32 graph is right by definition",
            metrics=invariance.metrics,
            texts=len(reference.prepared),
            batching=invariance.batching.value,
        )

    def judge(self, file: str) -> Verdict:
        """Compare it with the reference's outcomes in `file`."""
        reference = gate.Reference(gate.prepare(self._task, self._judging), load_observed(Path(file)))
        engine = self._latency_engine()
        return gate.judge_candidate(
            self._task,
            gate.forward_of(engine, self._graph.io),
            reference,
            self._context.accuracy,
            arithmetic=gate.arithmetic_of(self._recipe),
            grid=engine.facts.grid,
        )

    def time(self, lengths: list[int], seconds: float) -> dict[str, list[float]]:
        """Milliseconds of single runs at batch 1 on all cores, by tokens (as text: JSON has no other keys)."""
        engine = self._latency_engine()
        found = {}
        for tokens in lengths:
            batch = self._batch(tokens)
            found[str(tokens)] = measure.time_runs(lambda batch=batch: engine.run(batch), seconds)  # type: ignore[misc]
        return found

    def wide_from(self, lengths: list[int]) -> WideFrom:
        """See `CandidateSession`."""
        # Two engines: one that is prepared for wide runs may share its threads with narrow ones. Alternately, where
        # both are cached: a machine that is slower for a while affects both.
        turns = WIDE_TURNS if self._engines.most > 1 else 1
        found = {wide: {tokens: list[float]() for tokens in lengths} for wide in (False, True)}
        for _ in range(turns):
            for wide, times in found.items():
                for tokens in lengths:
                    times[tokens].append(self._lone(tokens, wide=wide))
        return wide_thresholds(lengths, lambda n: min(found[False][n]), lambda n: min(found[True][n]))

    def lone(self, lengths: list[int], wide: bool) -> dict[str, float]:
        """See `CandidateSession` (lengths as text: JSON has no other keys)."""
        return {str(tokens): self._lone(tokens, wide=wide) for tokens in lengths}

    def sample(self, plan: dict[str, Any], short: dict[str, Any] | None = None) -> PlanSample:
        """Measure a plan over the workload's mix; `short`: the graph of its short rows."""
        return self._loop.run(self._sample(self._planned(plan, short)))

    def judge_plan(self, file: str, plan: dict[str, Any], short: dict[str, Any] | None = None) -> Verdict:
        """Compare the answers of a plan with the reference's outcomes in `file`."""
        threads = {"streams": 1, "threads_per_stream": self._context.cores, **NEVER_WIDE.fields}
        engine = self._engines.of(self._planned(plan, short).model_copy(update=threads))
        reference = gate.Reference(gate.prepare(self._task, self._judging), load_observed(Path(file)))
        return gate.judge_answers(
            self._task, gate.forward_of(engine, self._graph.io), reference, self._context.accuracy
        )

    def ceiling(self, precision: str, folder: str) -> float:
        """The best rate of matrix products in this precision of any engine here, 10^9 operations a second."""
        wanted = Precision(precision)
        path = Path(folder) / "chain.onnx"
        measure.write_chain(path, int8=wanted in measure.INT8)
        rates = []
        for recipe in measure.chain_recipes(wanted):
            engine = load_engine(path, measure.IO, recipe, Threads(1, self._context.cores))
            rates.append(measure.measure_chain(engine))
            engine.close()
        return max(rates)

    # helpers of the calls

    async def _sample(self, plan: Plan) -> PlanSample:
        used = shapes(plan)
        engines = self._engines
        weighs = plan.short is not None and self._second_graph_bytes is None
        if weighs:
            # The plan's own engine, warm and alone, is measured first; the memory beyond it is the second graph's.
            if not engines.is_warm(used[:1]):
                await self._sample(plan.unrouted)
            engines.close(but=used[0])
        before = resident_bytes()
        engine = BorrowedEngine(engines.of(plan))
        model = LoadedModel(self._task, engine, plan, self._graph.io, max_tokens=self._context.max_tokens)
        predictor = Predictor(model, queue=QueueSettings(deadline_seconds=600.0))
        try:
            if not engines.is_warm(used):
                # As the server does before it is ready; then the very lengths, since kernels may be compiled for each.
                await predictor.warm_up()
                await measure.lone_latency(predictor, self._requests, seconds=0.0)
                engines.mark_warm(used)
                if weighs:
                    self._second_graph_bytes = max(resident_bytes() - before, 0)
            if not engines.is_warm(plan):
                # The batches that form with this plan, once, not measured.
                await measure.saturation(predictor, self._requests, expected_seconds=60.0)
                engines.mark_warm(plan)
            sample = await measure.sample_plan(
                predictor, self._requests, short=self._short_requests, rate=self._context.requests_per_second
            )
            added = self._second_graph_bytes if plan.short is not None else None
            return sample.model_copy(update={"second_graph_bytes": added})
        finally:
            await predictor.drain()

    @cached_property
    def _loop(self) -> asyncio.Runner:
        import uvloop

        return asyncio.Runner(loop_factory=uvloop.new_event_loop)

    @cached_property
    def _folder(self) -> ModelFolder:
        return ModelFolder.open(Path(self._context.model))

    @property
    def _task(self) -> Task:
        return self._task_of(self._graph.io)

    def _task_of(self, io: GraphIO) -> Task:
        # Truncates whatever the endpoint's rule is: measuring and judging use Penstock's own requests, made to about a
        # length, and one that is a token too long must not end the optimisation.
        if self._made_task is None:
            self._made_task = make_task(
                self._context.task, self._folder, io=io, max_tokens=self._context.max_tokens, truncate=True
            )
        return self._made_task

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self._folder)

    @property
    def _mask(self) -> str:
        return self._tokenizer.mask_token or "[MASK]"

    @cached_property
    def _corpora(self) -> tuple[Corpus, Corpus]:
        return split(own_corpus(), self._context.workload.texts)

    @cached_property
    def _judging(self) -> list[SampleRequest]:
        _, judging = self._corpora
        found = judging_samples(self._task, samples(self._context.task, judging, mask=self._mask))
        if not found:
            raise UnsupportedModel(
                f"rows of {self._context.max_tokens} tokens are too short for any {self._context.task.value} request "
                "that the answers are proved with",
                remedy="Raise serving.maxInputTokens",
            )
        return found

    @cached_property
    def _token_pool(self) -> list[int]:
        """Token ids as they occur in texts, to make rows of any length from; with one mask token at the start for
        graphs that compute the vocabulary for each mask."""
        mask = self._tokenizer.mask_id
        ids = [token for prepared in gate.prepare(self._task, self._judging[:60]) for token in prepared.rows[0].ids]
        plain = [token for token in ids if token != mask]
        head = head_of(self._context.task, self._folder)
        return [mask, *plain] if head is Head.MASKED_LM and mask is not None else plain

    @cached_property
    def _bodies(self) -> tuple[RequestBody, ...]:
        """Requests of the workload's mix, grouped by their tokens."""
        about = self._context
        mix = LengthMix.of(about.workload, maximum=about.max_tokens)
        return workload_bodies(
            about.task,
            self._tokenizer.backend,
            about.workload,
            mix,
            count=MIX_REQUESTS,
            mask_token=self._mask,
            side=self._tokenizer.side,
        )

    @cached_property
    def _requests(self) -> list[measure.PredictRequest]:
        return _requests(self._bodies)

    @cached_property
    def _short_requests(self) -> dict[int, list[measure.PredictRequest]]:
        """Requests of the shortest lengths, by tokens; empty where the workload has hardly any so short."""
        return {
            tokens: _requests(
                predict_bodies(
                    self._context.task, self._tokenizer.backend, [tokens] * SHORT_REQUESTS, mask_token=self._mask
                )
            )
            for tokens in short_lengths([int(body.group) for body in self._bodies])
            if tokens <= self._context.max_tokens
        }

    def _batch(self, tokens: int) -> Batch:
        pool = self._token_pool
        return collate([Row((pool * (tokens // len(pool) + 1))[:tokens])])

    def _lone(self, tokens: int, *, wide: bool) -> float:
        """Median milliseconds of a lone row with one thread for each stream, on one stream or on all."""
        engine = self._engines.get((self._recipe, Threads(self._context.cores, 1), wide))
        run, batch = (engine.run_wide if wide else engine.run), self._batch(tokens)
        return median(measure.time_runs(lambda: run(batch), WIDE_SECONDS))

    def _latency_engine(self) -> Engine:
        return self._engines.get((self._recipe, Threads(1, self._context.cores), False))

    @property
    def _engines(self) -> EngineCache:
        if self._kept is None:
            self._kept = EngineCache(self._recipe, self._graph)
        return self._kept

    def _planned(self, plan: dict[str, Any], short: dict[str, Any] | None) -> Plan:
        """The plan of a call, with the graph of its short rows added to the engines."""
        found = Plan.model_validate(plan)
        if found.short is not None and short is not None:
            self._engines.add_graph(found.short.recipe, GraphFile.model_validate(short))
        return found


def _requests(bodies: Sequence[RequestBody]) -> list[measure.PredictRequest]:
    read = [json.loads(body.body) for body in bodies]
    return [measure.PredictRequest(one["inputs"], one.get("parameters", {})) for one in read]
