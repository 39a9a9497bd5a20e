"""One candidate in a process of its own: what `worker` serves. Calls come as JSON (see `processes` for the other end).

Everything heavy is imported here, on use: a candidate of ONNX Runtime never loads OpenVINO, and the coordinating
process neither.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.endpoint import AccuracyBudget, Workload
from penstock.manifest import GraphIO, Verdict
from penstock.recipe import Plan, Precision, Recipe
from penstock.tasks import HEAD_OF_TASK, Head, TaskName
from penstock_optimizer import measure
from penstock_optimizer.lab import BuiltFacts, ExportedFacts, Value
from penstock_optimizer.load.summary import median
from penstock_optimizer.search.goal import Sample
from penstock_runtime.engines.base import Engine, EngineFacts, Threads
from penstock_runtime.rows import Batch, Outputs, Row

MIX_REQUESTS = 48
"""Requests of one round over the workload's mix: a median and a 95th percentile of lengths, and short enough to be
repeated."""
WIDE_SECONDS = 0.08
ENGINES_KEPT = 2
LARGE_BYTES = 600_000_000
"""Of a graph's files: of larger ones only one engine is kept."""


class Subject(Value):
    """What all candidates have in common."""

    model: str
    """The model's folder."""
    task: TaskName
    max_tokens: int
    """The longest row: the model's limit, or the endpoint's."""
    truncate: bool = True
    workload: Workload = Workload()
    accuracy: AccuracyBudget = AccuracyBudget()
    cores: int
    requests_per_second: float | None = None
    """The rate at which p95 is wanted, where the objective has both."""


class GraphFile(Value):
    """A graph that can be loaded."""

    path: str
    io: GraphIO


Shape = tuple[Threads, bool]
"""Threads of an engine, and whether it runs wide."""


def _shape(plan: Plan) -> Shape:
    return Threads(plan.streams, plan.threads_per_stream), plan.wide_from_tokens is not None


class _Kept:
    """An engine that its user may not close: it is used again for the next plan."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    def run(self, batch: Batch) -> Outputs:
        return self._engine.run(batch)

    def run_wide(self, batch: Batch) -> Outputs:
        return self._engine.run_wide(batch)

    def close(self) -> None:
        return


class Candidate:
    """The object behind the calls. `configure` comes first."""

    def __init__(self) -> None:
        self._subject: Subject | None = None
        self._recipe: Recipe | None = None
        self._graph: GraphFile | None = None
        self._engines: dict[Shape, Engine] = {}
        self._warm: set[Shape | Plan] = set()

    # calls

    def configure(self, subject: dict[str, Any], recipe: dict[str, Any] | None = None) -> None:
        """Say what it is about."""
        self._subject = Subject.model_validate(subject)
        self._recipe = Recipe.model_validate(recipe) if recipe is not None else None

    def use(self, graph: dict[str, Any]) -> None:
        """Measure and judge this graph from now on."""
        self._graph = GraphFile.model_validate(graph)
        self._close_engines()

    def export(self, out: str, flavour: str) -> ExportedFacts:
        """Write the fp32 graph."""
        from penstock_optimizer.export import Flavour, export

        begin = time.perf_counter()
        exported = export(self._folder, HEAD_OF_TASK[self._about.task], Path(out), flavour=Flavour(flavour))
        return ExportedFacts(
            graph=str(exported.path),
            io=exported.io,
            fused_nodes=exported.fused_nodes,
            how=exported.how,
            parameters=exported.parameters,
            seconds=time.perf_counter() - begin,
        )

    def build(self, exported: dict[str, Any], out: str) -> BuiltFacts:
        """Make the recipe's graph from an exported one, and use it."""
        from penstock_optimizer.calibration import calibration_rows, samples
        from penstock_optimizer.quantise import build

        source = GraphFile.model_validate(exported)
        begin = time.perf_counter()
        calibrating, _ = self._corpora
        requests = samples(self._about.task, calibrating, mask=self._mask)
        rows = calibration_rows(self._task, requests)
        built = build(self._its_recipe, Path(source.path), source.io, rows, Path(out), threads=self._about.cores)
        self.use({"path": str(built.path), "io": built.io})
        return BuiltFacts(
            graph=built.path.name,
            io=built.io,
            fused_nodes=built.fused_nodes,
            notes=built.notes,
            size_bytes=built.size_bytes,
            seconds=time.perf_counter() - begin,
        )

    def teach(self, file: str) -> Verdict:
        """As the teacher: run the judging requests, keep the outcomes in `file`, and prove how it may be batched."""
        from penstock_optimizer.guard import Alone, forward_of, measure_invariance, teach
        from penstock_optimizer.teacher_file import save_observed

        forward = forward_of(self._latency_engine(), self._its_graph.io)
        alone = Alone(forward)
        teacher = teach(self._task, alone, self._judging)
        save_observed(teacher.observed, Path(file))
        grid = self._latency_engine().facts.grid
        invariance = measure_invariance(forward, teacher.rows, alone=alone, grid=grid)
        return Verdict(
            passed=True,
            reason="the fp32 graph is right by definition",
            metrics=invariance.metrics,
            texts=len(teacher.prepared),
            batching=invariance.batching.value,
        )

    def judge(self, file: str) -> Verdict:
        """Hold it against the teacher's outcomes in `file`."""
        from penstock_optimizer.guard import Teacher, arithmetic_of, forward_of, guard_candidate, prepare
        from penstock_optimizer.teacher_file import load_observed

        teacher = Teacher(prepare(self._task, self._judging), load_observed(Path(file)))
        engine = self._latency_engine()
        return guard_candidate(
            self._task,
            forward_of(engine, self._its_graph.io),
            teacher,
            self._about.accuracy,
            arithmetic=arithmetic_of(self._its_recipe),
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

    def wide_from(self, lengths: list[int]) -> int | None:
        """See `Session`."""
        # Two engines: one that is prepared for wide runs may share its threads with narrow ones.
        narrow, wide = ({tokens: self._lone(tokens, wide=wide) for tokens in lengths} for wide in (False, True))
        return measure.wide_from(lengths, narrow.__getitem__, wide.__getitem__)

    def sample(self, plan: dict[str, Any]) -> Sample:
        """Measure a plan over the workload's mix."""
        return self._loop.run(self._sample(Plan.model_validate(plan)))

    def ceiling(self, precision: str, folder: str) -> float:
        """The best rate of matrix products in this precision of any engine here, 10^9 operations a second."""
        from penstock.recipe import EngineName
        from penstock_optimizer import gemm
        from penstock_runtime.engines.load import load_engine

        wanted = Precision(precision)
        path = Path(folder) / "chain.onnx"
        gemm.write_chain(path, int8=gemm.is_int8(wanted))
        rates = []
        for recipe in gemm.chain_recipes(wanted, tuple(EngineName)):
            engine = load_engine(path, gemm.IO, recipe, gemm.chain_threads(self._about.cores))
            rates.append(gemm.measure_chain(engine))
            engine.close()
        return max(rates)

    # what the calls need

    async def _sample(self, plan: Plan) -> Sample:
        from penstock_runtime.loaded import LoadedModel
        from penstock_runtime.predictor import Limits, Predictor

        shape = _shape(plan)
        engine = _Kept(self._plan_engine(shape[0], wide=shape[1]))
        model = LoadedModel(self._task, engine, plan, self._its_graph.io, max_tokens=self._about.max_tokens)
        predictor = Predictor(model, Limits(deadline_seconds=600.0))
        try:
            if shape not in self._warm:
                # As the server does before it is ready; then the very lengths, since kernels may be compiled for each.
                await predictor.warm_up()
                await measure.lone_latency(predictor, self._requests, seconds=0.0)
                self._warm.add(shape)
            if plan not in self._warm:
                # The batches that really form with this plan, once, unmeasured.
                await measure.saturation(predictor, self._requests, expected_seconds=60.0)
                self._warm.add(plan)
            return await measure.sample_plan(predictor, self._requests, rate=self._about.requests_per_second)
        finally:
            await predictor.drain()

    @cached_property
    def _loop(self) -> asyncio.Runner:
        import uvloop

        return asyncio.Runner(loop_factory=uvloop.new_event_loop)

    @property
    def _about(self) -> Subject:
        assert self._subject is not None  # noqa: S101 - configure comes first
        return self._subject

    @property
    def _its_recipe(self) -> Recipe:
        assert self._recipe is not None  # noqa: S101 - configured with one
        return self._recipe

    @property
    def _its_graph(self) -> GraphFile:
        assert self._graph is not None  # noqa: S101 - build or use came before
        return self._graph

    @cached_property
    def _folder(self) -> Any:
        from penstock_runtime.models.folder import ModelFolder

        return ModelFolder.open(Path(self._about.model))

    @cached_property
    def _task(self) -> Any:
        from penstock_runtime.tasks.factory import make_task

        return make_task(
            self._about.task, self._folder, max_tokens=self._about.max_tokens, truncate=self._about.truncate
        )

    @cached_property
    def _tokenizer(self) -> Any:
        from penstock_runtime.tokens import Tokenizer

        return Tokenizer.load(self._folder)

    @property
    def _mask(self) -> str:
        return self._tokenizer.mask_token or "[MASK]"

    @cached_property
    def _corpora(self) -> Any:
        from penstock_optimizer.calibration import own_corpus, split

        return split(own_corpus(), self._about.workload.texts)

    @cached_property
    def _judging(self) -> Any:
        from penstock_optimizer.calibration import judging_samples, samples

        _, judging = self._corpora
        return judging_samples(self._task, samples(self._about.task, judging, mask=self._mask))

    @cached_property
    def _token_pool(self) -> list[int]:
        """Ids as they come in texts, to make rows of any length from; one mask token, at the start, for graphs that
        compute the vocabulary for each."""
        from penstock_optimizer.guard import prepare

        mask = self._tokenizer.mask_id
        ids = [token for prepared in prepare(self._task, self._judging[:60]) for token in prepared.rows[0].ids]
        plain = [token for token in ids if token != mask]
        return [mask, *plain] if HEAD_OF_TASK[self._about.task] is Head.MASKED_LM and mask is not None else plain

    @cached_property
    def _requests(self) -> list[measure.Request]:
        from penstock_optimizer.load.bodies import workload_bodies
        from penstock_optimizer.load.lengths import LengthMix
        from penstock_runtime.models.json_files import read_optional
        from penstock_runtime.tokens.backend import open_backend

        about = self._about
        config = read_optional(self._folder.path, "tokenizer_config.json")
        bodies = workload_bodies(
            about.task,
            open_backend(self._folder.tokenizer, config, lower_case=self._folder.lower_case),
            about.workload,
            LengthMix.of(about.workload, maximum=about.max_tokens),
            count=MIX_REQUESTS,
            mask_token=self._mask,
        )
        read = [json.loads(body.body) for body in bodies]
        return [measure.Request(one["inputs"], one.get("parameters", {})) for one in read]

    def _batch(self, tokens: int) -> Batch:
        from penstock_runtime.batching.rectangle import stack

        pool = self._token_pool
        return stack([Row((pool * (tokens // len(pool) + 1))[:tokens])])

    def _lone(self, tokens: int, *, wide: bool) -> float:
        """Median milliseconds of a lone row with one thread for each stream, on one of them or on all."""
        engine = self._plan_engine(Threads(self._about.cores, 1), wide=wide)
        run, batch = (engine.run_wide if wide else engine.run), self._batch(tokens)
        return median(measure.time_runs(lambda: run(batch), WIDE_SECONDS))

    def _latency_engine(self) -> Engine:
        return self._plan_engine(Threads(1, self._about.cores), wide=False)

    def _plan_engine(self, threads: Threads, *, wide: bool) -> Engine:
        """The graph, loaded with these threads. The last few are kept: a challenger and its incumbent take turns."""
        from penstock_runtime.engines.load import load_engine

        wanted = (threads, wide)
        engine = self._engines.pop(wanted, None)
        if engine is None:
            graph = self._its_graph
            size = sum(file.stat().st_size for file in Path(graph.path).parent.iterdir() if file.is_file())
            while len(self._engines) >= (ENGINES_KEPT if size < LARGE_BYTES else 1):
                self._forget(next(iter(self._engines)))
            engine = load_engine(Path(graph.path), graph.io, self._its_recipe, threads, wide=wide)
        # At the end again: the first one is the one that was not used for the longest time.
        self._engines[wanted] = engine
        return engine

    def _close_engines(self) -> None:
        for shape in list(self._engines):
            self._forget(shape)

    def _forget(self, shape: Shape) -> None:
        self._engines.pop(shape).close()
        self._warm = {
            one for one in self._warm if one != shape and not (isinstance(one, Plan) and _shape(one) == shape)
        }
