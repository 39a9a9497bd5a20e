"""One candidate in a process of its own: what `worker` serves. Calls come as JSON (see `processes` for the other end).

Everything heavy is imported here, on use: a candidate of ONNX Runtime never loads OpenVINO, and the coordinating
process neither.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedModel
from penstock.manifest import Verdict
from penstock.recipe import Plan, Precision, Recipe
from penstock.resources.endpoint import AccuracyBudget, Workload
from penstock.tasks import HEAD_OF_TASK, Head, TaskName
from penstock_optimizer.candidate import measure
from penstock_optimizer.candidate.lab import BuiltFacts, ExportedFacts, GraphFile, Value
from penstock_optimizer.load.summary import median
from penstock_optimizer.search.goal import Sample
from penstock_optimizer.search.space import NEVER_WIDE, WideFrom
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.rows import Batch, Row

if TYPE_CHECKING:
    from penstock_optimizer.candidate.kept_engines import KeptEngines
    from penstock_optimizer.load.spec import RequestBody

MIX_REQUESTS = 48
"""Requests of one round over the workload's mix: a median and a 95th percentile of lengths, and short enough to be
repeated."""
SHORT_REQUESTS = 8
"""Of each of the shortest lengths."""
WIDE_SECONDS = 0.08
WIDE_TURNS = 3


class Subject(Value):
    """What all candidates have in common."""

    model: str
    """The model's folder."""
    task: TaskName
    max_tokens: int
    """The longest row: the model's limit, or the endpoint's."""
    workload: Workload = Workload()
    accuracy: AccuracyBudget = AccuracyBudget()
    cores: int
    requests_per_second: float | None = None
    """The rate at which p95 is wanted, where the objective has both."""


class Candidate:
    """The object behind the calls. `configure` comes first."""

    def __init__(self) -> None:
        self._subject: Subject | None = None
        self._recipe: Recipe | None = None
        self._graph: GraphFile | None = None
        self._kept: KeptEngines | None = None
        self._second_graph_bytes: int | None = None

    # calls

    def configure(self, subject: dict[str, Any], recipe: dict[str, Any] | None = None) -> None:
        """Say what it is about."""
        self._subject = Subject.model_validate(subject)
        self._recipe = Recipe.model_validate(recipe) if recipe is not None else None

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
        from penstock_optimizer.guard.calibration import calibration_rows, samples
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
        from penstock_optimizer.candidate.reference_file import save_observed
        from penstock_optimizer.guard import Alone, forward_of, measure_invariance, teach

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
        from penstock_optimizer.candidate.reference_file import load_observed
        from penstock_optimizer.guard import Teacher, arithmetic_of, forward_of, guard_candidate, prepare

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

    def wide_from(self, lengths: list[int]) -> WideFrom:
        """See `Session`."""
        # Two engines: one that is prepared for wide runs may share its threads with narrow ones. In turns, where both
        # are kept: a machine that is slower for a while is so for both.
        turns = WIDE_TURNS if self._engines.most > 1 else 1
        found = {wide: {tokens: list[float]() for tokens in lengths} for wide in (False, True)}
        for _ in range(turns):
            for wide, times in found.items():
                for tokens in lengths:
                    times[tokens].append(self._lone(tokens, wide=wide))
        return measure.wide_from(lengths, lambda n: min(found[False][n]), lambda n: min(found[True][n]))

    def lone(self, lengths: list[int], wide: bool) -> dict[str, float]:
        """See `Session` (lengths as text: JSON has no other keys)."""
        return {str(tokens): self._lone(tokens, wide=wide) for tokens in lengths}

    def sample(self, plan: dict[str, Any], short: dict[str, Any] | None = None) -> Sample:
        """Measure a plan over the workload's mix; `short`: the graph of its short rows."""
        return self._loop.run(self._sample(self._planned(plan, short)))

    def judge_plan(self, file: str, plan: dict[str, Any], short: dict[str, Any] | None = None) -> Verdict:
        """Hold the answers of a plan against the teacher's outcomes in `file`."""
        from penstock_optimizer.candidate.reference_file import load_observed
        from penstock_optimizer.guard import Teacher, forward_of, guard_answers, prepare

        threads = {"streams": 1, "threads_per_stream": self._about.cores, **NEVER_WIDE.fields}
        engine = self._engines.of(self._planned(plan, short).model_copy(update=threads))
        teacher = Teacher(prepare(self._task, self._judging), load_observed(Path(file)))
        return guard_answers(self._task, forward_of(engine, self._its_graph.io), teacher, self._about.accuracy)

    def ceiling(self, precision: str, folder: str) -> float:
        """The best rate of matrix products in this precision of any engine here, 10^9 operations a second."""
        from penstock.recipe import EngineName
        from penstock_optimizer.candidate import gemm
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
        from penstock_optimizer.candidate.kept_engines import Kept, resident_bytes, shapes
        from penstock_runtime.serving.loaded_model import LoadedModel
        from penstock_runtime.serving.predictor import Limits, Predictor

        used = shapes(plan)
        engines = self._engines
        weighs = plan.short is not None and self._second_graph_bytes is None
        if weighs:
            # What comes on top of the plan's own engine, warm and alone, is the second graph's.
            if not engines.is_warm(used[:1]):
                await self._sample(plan.unrouted)
            engines.close(but=used[0])
        before = resident_bytes()
        engine = Kept(engines.of(plan))
        model = LoadedModel(self._task, engine, plan, self._its_graph.io, max_tokens=self._about.max_tokens)
        predictor = Predictor(model, Limits(deadline_seconds=600.0))
        try:
            if not engines.is_warm(used):
                # As the server does before it is ready; then the very lengths, since kernels may be compiled for each.
                await predictor.warm_up()
                await measure.lone_latency(predictor, self._requests, seconds=0.0)
                engines.warmed(used)
                if weighs:
                    self._second_graph_bytes = max(resident_bytes() - before, 0)
            if not engines.is_warm(plan):
                # The batches that really form with this plan, once, unmeasured.
                await measure.saturation(predictor, self._requests, expected_seconds=60.0)
                engines.warmed(plan)
            sample = await measure.sample_plan(
                predictor, self._requests, short=self._short_requests, rate=self._about.requests_per_second
            )
            added = self._second_graph_bytes if plan.short is not None else None
            return sample.model_copy(update={"second_graph_bytes": added})
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

        # Cutting whatever the endpoint's rule is: what is measured and judged with are our own requests, made to about
        # a length, and one that is a token too long must not end the optimisation.
        return make_task(self._about.task, self._folder, max_tokens=self._about.max_tokens, truncate=True)

    @cached_property
    def _tokenizer(self) -> Any:
        from penstock_runtime.tokens import Tokenizer

        return Tokenizer.load(self._folder)

    @property
    def _mask(self) -> str:
        return self._tokenizer.mask_token or "[MASK]"

    @cached_property
    def _corpora(self) -> Any:
        from penstock_optimizer.guard.calibration import own_corpus, split

        return split(own_corpus(), self._about.workload.texts)

    @cached_property
    def _judging(self) -> Any:
        from penstock_optimizer.guard.calibration import judging_samples, samples

        _, judging = self._corpora
        found = judging_samples(self._task, samples(self._about.task, judging, mask=self._mask))
        if not found:
            raise UnsupportedModel(
                f"rows of {self._about.max_tokens} tokens are too short for any {self._about.task.value} request that "
                "the answers are proved with",
                remedy="Raise serving.maxInputTokens",
            )
        return found

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
    def _bodies(self) -> tuple[RequestBody, ...]:
        """Requests of the workload's mix, grouped by their tokens."""
        from penstock_optimizer.load.bodies import workload_bodies
        from penstock_optimizer.load.lengths import LengthMix

        about = self._about
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
    def _requests(self) -> list[measure.Request]:
        return _requests(self._bodies)

    @cached_property
    def _short_requests(self) -> dict[int, list[measure.Request]]:
        """Requests of the shortest lengths, by tokens; none where the workload has hardly any so short."""
        from penstock_optimizer.load.bodies import predict_bodies
        from penstock_optimizer.search.route import short_lengths

        return {
            tokens: _requests(
                predict_bodies(
                    self._about.task, self._tokenizer.backend, [tokens] * SHORT_REQUESTS, mask_token=self._mask
                )
            )
            for tokens in short_lengths([int(body.group) for body in self._bodies])
            if tokens <= self._about.max_tokens
        }

    def _batch(self, tokens: int) -> Batch:
        from penstock_runtime.batching.collate import stack

        pool = self._token_pool
        return stack([Row((pool * (tokens // len(pool) + 1))[:tokens])])

    def _lone(self, tokens: int, *, wide: bool) -> float:
        """Median milliseconds of a lone row with one thread for each stream, on one of them or on all."""
        engine = self._engines.get((self._its_recipe, Threads(self._about.cores, 1), wide))
        run, batch = (engine.run_wide if wide else engine.run), self._batch(tokens)
        return median(measure.time_runs(lambda: run(batch), WIDE_SECONDS))

    def _latency_engine(self) -> Engine:
        return self._engines.get((self._its_recipe, Threads(1, self._about.cores), False))

    @property
    def _engines(self) -> KeptEngines:
        from penstock_optimizer.candidate.kept_engines import KeptEngines

        if self._kept is None:
            self._kept = KeptEngines(self._its_recipe, self._its_graph)
        return self._kept

    def _planned(self, plan: dict[str, Any], short: dict[str, Any] | None) -> Plan:
        """A plan from a call, the graph of its short rows made known."""
        found = Plan.model_validate(plan)
        if found.short is not None and short is not None:
            self._engines.know(found.short.recipe, GraphFile.model_validate(short))
        return found


def _requests(bodies: Sequence[RequestBody]) -> list[measure.Request]:
    read = [json.loads(body.body) for body in bodies]
    return [measure.Request(one["inputs"], one.get("parameters", {})) for one in read]
