"""Compiles an endpoint's model for AWS Inferentia: fp32 answers, a precision that agrees with them, shapes, artefact.

    reference   the fp32 graph on this host's CPU, which the answers are compared with
    judge       each precision's arithmetic on the CPU, at the compiled shapes, until the guard accepts one
    compile     one shape at a time, each in a separate process; finished ones are found again by the next run
    write       the artefact

The host needs no device. So the guard judges the arithmetic of the compiler's arguments, and not the compiled
model: the pod compares that with fp32 answers of the artefact (`fence.npz`) before it is ready. Capacity is not
measured.

There is no fp32 artefact to serve in the meantime: pods of these classes cost a device each and have few CPUs, so that
pods which answer from the CPU would cost most and answer last. Pods start with the compiled model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.errors import NoCandidateWithinBudget, OptimizationError, OutOfMemory
from penstock.hardware import INF1_UNSUPPORTED, NOT_RUN, NeuronGeneration
from penstock.manifest import Axes, CandidateFacts, Outcome, ReasonCode, ServedModel
from penstock.neuron_artefact import NEURON_FILE, CompiledModel, NeuronBucket, NeuronFence
from penstock.recipe import LARGEST_PADDING_SHARE, Batching, Plan, Precision, Recipe
from penstock.resources.endpoint import NoCandidate, OptimizationMode
from penstock_optimizer.candidate.isolation import CallFailure, WorkerFailed
from penstock_optimizer.candidate.runner import ProcessRunner
from penstock_optimizer.candidate.work_folder import load_observed
from penstock_optimizer.guard import gate
from penstock_optimizer.guard.gate import judging_samples, own_corpus, samples, split
from penstock_optimizer.job.job import Job, graph_path
from penstock_optimizer.job.progress import OnProgressEvent, ProgressReporter, Stage, export_message, settled_message
from penstock_optimizer.neuron import choice
from penstock_optimizer.neuron.choice import NeuronChoice
from penstock_optimizer.neuron.plans import buckets
from penstock_optimizer.neuron.published import published_rows, shape_of
from penstock_optimizer.neuron.session import Session, SourceModel
from penstock_optimizer.search.recipes import REFERENCE
from penstock_optimizer.targets.target import RAISE_BUDGET, Budget, ChosenModel, Target
from penstock_runtime.engines.neuron.fence import Fence, largest_error, write_fence
from penstock_runtime.host.cgroup import HostMemory
from penstock_runtime.rows import Row, collate
from penstock_runtime.tasks.base import Prepared
from penstock_runtime.tasks.factory import head_of, make_task

BUCKET_SECONDS = 1800.0
"""Limit for one shape: the compiler takes a few minutes by its documents."""
JUDGING_SECONDS = 600.0
WRITING_SECONDS = 2.0
COMPILER_BYTES = 2 * 2**30
COMPILER_TIMES_WEIGHTS = 4.0
"""Memory that must be free for one compilation: this, and this many times the fp32 weights. Not measured: chosen so
that BERT-large needs 7 GB of the 32 GB that the SDK's documents recommend."""
SAMPLE_LENGTHS = 400
FENCE_FILE = "fence.npz"
FENCE_ROWS = 4
FENCE_MARGIN = 3.0
LEAST_FENCE_ERROR = {Precision.FP32: 0.01, Precision.BF16: 0.05}
MOST_FENCE_ERROR = 0.5
"""A device may differ from fp32 by three times the difference of its arithmetic on the CPU, within these limits."""
GUARD_ON_CPU = (
    "The guard judged the arithmetic that the compiler was asked for, on the CPU. Pods compare the device's answers "
    "with fp32 before they are ready."
)
GOES_ON = f"{RAISE_BUDGET}: the next run goes on from here"


class CompilationFailed(Exception):
    """A shape could not be compiled with a precision."""


class NeuronTarget(Target):
    """See `Target`."""

    reference = REFERENCE
    measures_capacity = False

    def __init__(self, job: Job, seconds: float, on_progress: OnProgressEvent) -> None:
        assert job.neuron is not None  # noqa: S101 - only such jobs come here
        self._job = job
        self._tools = job.neuron
        self._target = job.neuron.target
        self.budget = Budget(seconds)
        self._runner = ProcessRunner(job.context, job.work, job.cpus)
        self._recipes = self._allowed()
        shapes = 2 * len(buckets(job.mix.sample(SAMPLE_LENGTHS, seed=0), longest=job.max_tokens))
        self.events = ProgressReporter(on_progress, {Stage.EXPORT: 1, Stage.CANDIDATES: 1 + shapes, Stage.REPORT: 1})
        self._candidates: list[CandidateFacts] = []

    @property
    def candidates(self) -> Sequence[CandidateFacts]:
        """See `Target`."""
        return self._candidates

    def export(self, seconds: float) -> tuple[str, Mapping[str, Any]]:
        """See `Target`: the fp32 graph and its answers to the judging requests, on the CPU."""
        session = self._runner.open(REFERENCE)
        try:
            self._exported = exported = self._runner.exported("fused", timeout_seconds=seconds)
            built = session.build(timeout_seconds=self.budget.left())
            verdict = session.judge(timeout_seconds=self.budget.left())
        except WorkerFailed as failure:
            if failure.failure is CallFailure.TIMED_OUT:
                raise OptimizationError(
                    f"the time budget ended before the fp32 answers were there: {failure.reason}", remedy=GOES_ON
                ) from failure
            raise failure.as_error("the fp32 graph does not run") from failure
        finally:
            session.close()
        blank = CandidateFacts(recipe=REFERENCE, outcome=Outcome.REFERENCE, reason="", verdict=verdict)
        facts = blank.model_copy(
            update={
                "fused_nodes": built.fused_nodes, "build_seconds": exported.seconds, "size_bytes": built.size_bytes,
            }
        )  # fmt: skip
        self._candidates.append(facts.settled(Outcome.REFERENCE, "the fp32 graph that the others are judged by"))
        return export_message(exported), {}

    def try_candidates(self) -> None:
        """See `Target`: compile with the first precision that the guard accepts and the compiler compiles."""
        job, io = self._job, self._exported.io
        is_masked = Axes.MASKS in io.outputs.values()
        mask = job.tokenizer.mask_id if is_masked else None
        try:
            self._compiled(SourceModel(job.folder, head_of(job.spec.task, job.folder), io, mask))
        except WorkerFailed as failure:
            raise failure.as_error("the model could not be compiled") from failure

    def choose(self) -> ChosenModel:
        """See `Target`."""
        recipe, chosen, folder, shapes = self._result
        verdict = next(one.verdict for one in self.candidates if one.recipe == recipe)
        batching = Batching(verdict.batching) if verdict is not None and verdict.batching else Batching.SINGLE
        longest = max(shape.tokens for shape in shapes)
        rows = max(shape.batch for shape in shapes)
        plan = Plan(
            recipe=recipe,
            streams=chosen.copies,
            threads_per_stream=chosen.cores_per_model,
            batching=batching if rows > 1 else Batching.SINGLE,
            max_batch_rows=rows,
            max_batch_tokens=rows * longest,
            max_padding_share=LARGEST_PADDING_SHARE if batching is Batching.PADDED and rows > 1 else 0.0,
        )
        served = ServedModel(path=graph_path(recipe, Path(NEURON_FILE)), io=self._exported.io, plan=plan)
        tried = {one.recipe for one in self.candidates}
        untried = [
            CandidateFacts(recipe=one, outcome=Outcome.SKIPPED, reason=f"{recipe.name} is within the accuracy budget")
            for one in self._recipes
            if one not in tried
        ]
        cut_short = len(shapes) < len(chosen.shapes)
        return ChosenModel(
            served,
            served,
            {recipe: folder / NEURON_FILE},
            self._exported.parameters,
            (*self.candidates, *untried),
            findings=self._findings(chosen, shapes, cut_short=cut_short),
            cut_short=cut_short,
            caveat=NOT_RUN,
            fields={"vector_space": self._job.vector_space(self._exported.weights)},
        )

    def _compiled(self, model: SourceModel) -> None:
        for recipe in self._recipes:
            with self._session(model, "judge") as session:
                wanted = self._choose(session, recipe)
                facts = self._judged(session, recipe, wanted)
                is_within = facts.outcome is Outcome.SLOWER
                fence, limit = self._fence(session, recipe, wanted) if is_within else (None, 0.0)
            self.events.settled(facts, _judged_message(facts))
            if fence is None:
                self._candidates.append(facts)
                continue
            begin = time.monotonic()
            try:
                chosen, folder, shapes = self._compile(model, recipe, wanted)
            except CompilationFailed as error:
                facts = facts.settled(Outcome.FAILED, f"it does not compile: {error}")
                self._candidates.append(facts)
                self.events.settled(facts, by=0)
                continue
            size = sum(file.stat().st_size for file in folder.iterdir())
            facts = facts.model_copy(update={"build_seconds": time.monotonic() - begin, "size_bytes": size})
            reason = f"its arithmetic is within the accuracy budget on the CPU; {NOT_RUN}"
            self._candidates.append(facts.settled(Outcome.CHOSEN, reason))
            self._write(self._description(model, recipe, chosen, shapes, limit), folder, fence)
            self._result = recipe, chosen, folder, shapes
            return
        listed = "; ".join(f"{one.recipe.name}: {one.reason}" for one in self.candidates if one.recipe != REFERENCE)
        raise NoCandidateWithinBudget(
            f"nothing can be served on {self._target.value} ({listed})",
            remedy="Widen spec.optimization.accuracy, allow more precisions, or take a class of CPUs",
        )

    def _judged(self, session: Session, recipe: Recipe, wanted: NeuronChoice) -> CandidateFacts:
        """The guard's verdict on the arithmetic of a precision."""
        job = self._job
        task = make_task(job.spec.task, job.folder, max_tokens=job.max_tokens, truncate=True)
        forward = session.forward(choice.arithmetic(self._target, recipe), wanted.shapes)
        reference = gate.Reference(self._prepared, load_observed(job.work.reference))
        verdict = gate.judge_candidate(
            task, forward, reference, job.spec.optimization.accuracy, arithmetic=gate.arithmetic_of(recipe)
        )
        facts = CandidateFacts(recipe=recipe, outcome=Outcome.SKIPPED, reason="", verdict=verdict)
        if not verdict.passed:
            return facts.settled(Outcome.REJECTED, verdict.reason)
        return facts.settled(Outcome.SLOWER, ReasonCode.WITHIN_BUDGET)

    def _compile(
        self, model: SourceModel, recipe: Recipe, wanted: NeuronChoice
    ) -> tuple[NeuronChoice, Path, list[NeuronBucket]]:
        """All shapes, or as many as there is time for. Another number of cores when the compiler refuses one."""
        refused = ""
        for cores in (wanted.cores_per_model, *wanted.others):
            folder = self._job.work.path / "neuron" / f"{recipe.slug}-{cores}"
            folder.mkdir(parents=True, exist_ok=True)
            try:
                shapes = self._compile_shapes(model, choice.compiler_flags(self._target, recipe, cores), wanted, folder)
            except CompilationFailed as error:
                refused = f"{error}" if cores == wanted.cores_per_model else f"{refused}; with {cores} cores: {error}"
                continue
            return wanted.over(cores), folder, shapes
        raise CompilationFailed(refused)

    def _compile_shapes(
        self, model: SourceModel, flags: Sequence[str], wanted: NeuronChoice, folder: Path
    ) -> list[NeuronBucket]:
        done: list[NeuronBucket] = []
        for number, shape in enumerate(wanted.shapes, 1):
            name = f"{shape.batch} x {shape.tokens} ({number} of {len(wanted.shapes)})"
            if (folder / shape.file).is_file():
                self.events.advance(Stage.CANDIDATES, f"shape {name}: compiled before")
                done.append(shape)
                continue
            left = self.budget.left()
            if left < WRITING_SECONDS:
                break
            message = f"compiling shape {name}; {left:,.0f} s of the time budget are left"
            self.events.advance(Stage.CANDIDATES, message, by=0)
            require_compiler_memory(self._job.host.with_present_memory().memory, self._weights)
            try:
                with self._session(model, f"compile-{shape.file.removesuffix('.pt')}") as session:
                    found = session.compile(
                        flags, shape, folder, timeout_seconds=min(self.budget.left(), BUCKET_SECONDS)
                    )
            except WorkerFailed as failure:
                if failure.out_of_memory:
                    raise
                if failure.failure is CallFailure.TIMED_OUT and failure.seconds < BUCKET_SECONDS:
                    break
                raise CompilationFailed(f"shape {name}: {failure.reason}") from failure
            share = f", {found['share']:.0%} of the operations" if self._target is NeuronGeneration.INF1 else ""
            self.events.advance(Stage.CANDIDATES, f"shape {name}: compiled in {found['seconds']:.1f} s{share}")
            done.append(shape)
        if not done:
            raise OptimizationError(
                f"the time budget of {self.budget.seconds:g} s ended before the first shape was compiled: that takes "
                "minutes",
                remedy=GOES_ON,
            )
        return done

    # parts

    def _allowed(self) -> tuple[Recipe, ...]:
        optimization = self._job.spec.optimization
        every = choice.RECIPES[self._target]
        if optimization.mode is OptimizationMode.OFF:
            return (choice.FP32,)
        allowed = [one for one in every if one.precision in optimization.precisions]
        if choice.FP32 not in allowed and optimization.when_no_candidate is NoCandidate.SERVE_FP32:
            allowed.append(choice.FP32)
        return tuple(allowed)

    def _session(self, model: SourceModel, name: str) -> Session:
        session = Session(self._tools, model, self._job.work.log(f"neuron-{name}"))
        self._weights, self._embedding_weights = session.weights, session.embedding_weights
        return session

    def _choose(self, session: Session, recipe: Recipe) -> NeuronChoice:
        job = self._job
        own = choice.model_shape(job.folder.config, session.weights, session.embedding_weights)
        return choice.choose(
            published_rows(),
            self._target,
            job.cores,
            shape_of(job.spec.model) or own,
            objective=job.spec.objective,
            lengths=job.mix.sample(SAMPLE_LENGTHS, seed=0),
            longest=job.max_tokens,
            weights_bytes=self._weights_bytes(recipe),
        )

    def _weights_bytes(self, recipe: Recipe) -> int:
        """On the device, of one copy of one shape. On Inf1 embeddings stay on the host."""
        on_host = self._embedding_weights if self._target is NeuronGeneration.INF1 else 0
        return (self._weights - on_host) * (4 if recipe.precision is Precision.FP32 else 2)

    @cached_property
    def _prepared(self) -> tuple[Prepared, ...]:
        """The judging requests, as `Candidate` takes them for the reference."""
        job = self._job
        task = make_task(job.spec.task, job.folder, max_tokens=job.max_tokens, truncate=True)
        mask = job.tokenizer.mask_token or "[MASK]"
        _, judging = split(own_corpus(), job.spec.workload.texts)
        return gate.prepare(task, judging_samples(task, samples(job.spec.task, judging, mask=mask)))

    def _fence(self, session: Session, recipe: Recipe, wanted: NeuronChoice) -> tuple[Fence, float]:
        """The check that a pod makes before it is ready (a fence): a few rows that fit into every shape, with the fp32
        model's answers, and the largest allowed relative difference of the device's answers."""
        shortest = min(shape.tokens for shape in wanted.shapes)
        rows = [row for prepared in self._prepared for row in prepared.rows]
        batch = collate(fence_rows(rows, shortest, session.model.mask_token))
        fence = Fence(batch, session.run("float32", batch))
        found = session.run(choice.arithmetic(self._target, recipe), batch)
        expected = largest_error(fence, session.model.io, found)
        least = LEAST_FENCE_ERROR[recipe.precision]
        return fence, min(max(FENCE_MARGIN * expected, least), MOST_FENCE_ERROR)

    # the artefact

    def _write(self, compiled: CompiledModel, folder: Path, fence: Fence) -> None:
        """`neuron.json` and the fence, next to the compiled shapes."""
        for unfinished in folder.glob("*.new"):  # of a killed run
            unfinished.unlink()
        write_fence(folder / FENCE_FILE, fence.batch, fence.outputs)
        (folder / NEURON_FILE).write_text(compiled.model_dump_json(indent=1), encoding="utf-8")

    def _description(
        self, model: SourceModel, recipe: Recipe, chosen: NeuronChoice, shapes: Sequence[NeuronBucket], limit: float
    ) -> CompiledModel:
        packages = dict(self._tools.packages)
        return CompiledModel(
            target=self._target,
            sdk=choice.sdk_release(self._target, packages),
            packages=packages,
            flags=choice.compiler_flags(self._target, recipe, chosen.cores_per_model),
            model_digest=self._job.digest,
            inputs=model.io.inputs,
            outputs=tuple(model.io.outputs),
            cores_per_model=chosen.cores_per_model,
            requests_per_copy=chosen.requests_per_copy,
            weights_bytes=self._weights_bytes(recipe),
            buckets=tuple(shapes),
            chosen_token=model.mask_token,
            fence=NeuronFence(file=FENCE_FILE, max_relative_error=limit),
        )

    def _findings(self, chosen: NeuronChoice, shapes: Sequence[NeuronBucket], *, cut_short: bool) -> list[str]:
        target = self._target.value
        found = [
            f"Compiled for {target} and {NOT_RUN}: latency and capacity were not measured.",
            GUARD_ON_CPU,
        ]
        if self._target is NeuronGeneration.INF1:
            found.append(f"{INF1_UNSUPPORTED}.")
        figure = chosen.figure
        if figure is not None and shape_of(self._job.spec.model) is not None:
            found.append(
                f"{figure.candidate.summary} was chosen by {figure.basis.value} figures: {figure.per_second:,.0f} "
                f"sequences/s on {chosen.cores} NeuronCores ({figure.evidence})."
            )
        longest = max(shape.tokens for shape in shapes)
        if longest < self._job.folder.max_tokens and self._job.spec.serving.max_input_tokens is None:
            found.append(
                f"Rows have up to {longest} tokens, and the model takes {self._job.folder.max_tokens}: state "
                "serving.maxInputTokens to compile for longer ones."
            )
        if chosen.dropped:
            found.append(
                f"{chosen.dropped} shapes were left out, so that the others fit into {choice.USABLE_SHARE:.0%} of the "
                "memory of a NeuronCore."
            )
        if cut_short:
            found.append(
                f"The time budget ended after {len(shapes)} of {len(chosen.shapes)} shapes: rows are padded to those, "
                "and a larger budget goes on from here."
            )
        return found


def fence_rows(rows: Sequence[Row], shortest: int, mask_token: int | None) -> list[Row]:
    """The longest of the rows that fit into the shortest compiled shape; where none does, the shortest ones, cut. Pure.

    The meaning of a cut row does not matter, since the answers to it are compared with the answers of the fp32 model.
    It keeps a mask token where the model answers for these alone."""
    fitting = sorted((row for row in rows if row.length <= shortest), key=lambda row: -row.length)[:FENCE_ROWS]
    if fitting:
        return fitting
    last = [] if mask_token is None else [mask_token]
    return [
        Row([*row.ids[: shortest - len(last)], *last], None if row.type_ids is None else row.type_ids[:shortest])
        for row in sorted(rows, key=lambda row: row.length)[:FENCE_ROWS]
    ]


def _judged_message(facts: CandidateFacts) -> str:
    if facts.outcome is Outcome.SLOWER and facts.verdict is not None:
        return f"{facts.recipe.name}: passed on the CPU ({facts.verdict.reason})"
    return settled_message(facts)


def require_compiler_memory(memory: HostMemory, weights: int) -> None:
    """OutOfMemory unless this host has the memory for one compilation: the kernel would end the compiler otherwise."""
    needed = COMPILER_BYTES + COMPILER_TIMES_WEIGHTS * 4 * weights
    if memory.available < needed:
        raise OutOfMemory(
            f"compiling needs some {needed / 1e9:.1f} GB of memory, and {memory.available / 1e9:.1f} GB are free",
            remedy="Give the job more memory (spec.pod.memory on a cluster)",
        )
