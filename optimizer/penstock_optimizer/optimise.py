"""Runs an optimisation from end to end: export, candidates, choice, capacity, artefact.

    prepare   makes the fp32 artefact within seconds, or finds the finished one
    optimise  makes the finished artefact within a time budget

Results are found by key. An interrupted run continues from its work folder. Of two runs of one key the second waits and
then finds the first one's result. The targets (`targets`) fill in the parts that depend on the kind of model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import NoCandidateWithinBudget
from penstock.manifest import PROBES_FILE, CandidateFacts, LiveLimits, Manifest, Outcome, ProbeFacts
from penstock.recipe import Plan
from penstock.resources.endpoint import ModelEndpoint, NoCandidate, OptimizationMode
from penstock.resources.endpoint_parts.vector_space import IndexCertificate
from penstock.tasks import TaskName
from penstock_optimizer.candidate.work_folder import locked
from penstock_optimizer.capacity.curve import (
    LIMITS_PROCESS_SECONDS,
    CapacityFailed,
    OutsideIndex,
    ReplicaBroken,
    ReplicaServer,
    measure_limits,
    serve_replica,
)
from penstock_optimizer.guard.certificate import certify
from penstock_optimizer.guard.index_sample import Embedder, IndexSample, index_vectors, read_sample
from penstock_optimizer.job.job import Job, write_artefact
from penstock_optimizer.job.progress import OnProgressEvent, ProgressEvent, Stage, ignore_progress
from penstock_optimizer.targets.target import (
    EXPORT_SECONDS,
    ChosenModel,
    MeasuredCapacity,
    Target,
    late,
    of_late_candidates,
    sentences,
)
from penstock_runtime.host.disk import translate_full_disk
from penstock_runtime.models.sources.fetch import fetch_file
from penstock_runtime.models.sources.transfer import OnProgress as OnTransfer
from penstock_runtime.models.sources.transfer import ignore_progress as no_transfer
from penstock_runtime.serving.probes import allowed_difference, texts_digest

if TYPE_CHECKING:
    from penstock_optimizer.neuron.session import NeuronToolchain

STORE = "the store"
"""Name of the folder in errors of a full disk."""
SAME_MODEL = 0.9
"""The least mean cosine to stored vectors with which fp32 is tried instead: they are by another precision."""
SHARED_CPUS = (
    "The load generator shared the cores with the server, since there were no others: "
    "its own work is in the latencies of the capacity curve."
)


@dataclass(frozen=True)
class PreparedArtefact:
    """An artefact that can be served at once."""

    artefact: Path
    finished: bool
    """True: the optimised artefact was there. False: the fp32 one."""


def prepare(
    endpoint: ModelEndpoint,
    *,
    store: Path,
    models: Path,
    cores: int | None = None,
    token: str | None = None,
    on_transfer: OnTransfer = no_transfer,
) -> PreparedArtefact:
    """Return what can be served at once: the finished artefact, or else the fp32 one, which is made in seconds.

    `on_transfer` receives the progress of the model's download, from several threads. PenstockError of all kinds: the
    model, the machine, the endpoint, a full disk.
    """
    job = Job.of(endpoint, store=store, models=models, cores=cores, token=token, on_transfer=on_transfer)
    found = job.finished(whole=False)
    if found is not None:
        _tidy(job, found)
        return PreparedArtefact(job.artefact, finished=True)
    if job.prepared() is None:
        job.check()
        with translate_full_disk(store, what=STORE):
            Optimisation(job, EXPORT_SECONDS, ignore_progress).prepare(EXPORT_SECONDS)
    return PreparedArtefact(job.baseline, finished=False)


def optimise(
    endpoint: ModelEndpoint,
    *,
    store: Path,
    models: Path,
    cores: int | None = None,
    budget_seconds: float | None = None,
    token: str | None = None,
    neuron: NeuronToolchain | None = None,
    on_progress: OnProgressEvent = ignore_progress,
    on_transfer: OnTransfer = no_transfer,
) -> Path:
    """Make the artefact of an endpoint on this machine, or find it; returns its folder `store/<key>`.

    `cores` and `budget_seconds` override the endpoint's. `neuron`: what compiles for AWS Inferentia, for an endpoint of
    such a class; None: for this machine's CPUs. OptimizationError when no result may be served; other
    PenstockErrors, and `on_transfer`, as for `prepare`.
    """
    begin = time.monotonic()
    job = Job.of(endpoint, store=store, models=models, cores=cores, token=token, neuron=neuron, on_transfer=on_transfer)
    seconds = budget_seconds or endpoint.spec.optimization.seconds(compiles=neuron is not None)
    found = job.finished(more_than_seconds=seconds)
    if found is None:

        def waiting() -> None:
            on_progress(ProgressEvent(Stage.EXPORT, 0, 1, "another process makes this artefact: waiting for it"))

        job.check()
        with translate_full_disk(store, what=STORE), locked(job.lock(""), waiting=waiting):
            found = job.finished(more_than_seconds=seconds)
            if found is None:
                Optimisation(job, seconds, on_progress).run()
                return job.artefact
    _tidy(job, found)
    facts = {"artefact": str(job.artefact), "found": True, "seconds": time.monotonic() - begin}
    on_progress(ProgressEvent(Stage.DONE, 1, 1, "found, made before for this model and machine", facts, 1, 1))
    return job.artefact


def _tidy(job: Job, found: Manifest) -> None:
    """Delete the files that the finished artefact makes useless."""
    job.remove_baseline()
    if not found.cut_short:
        job.remove_leftovers()


def _target(job: Job, seconds: float, on_progress: OnProgressEvent) -> Target:
    """The target of a job. Each imports the libraries of its kind of model only."""
    if job.neuron is not None:
        from penstock_optimizer.targets.neuron import NeuronTarget

        return NeuronTarget(job, seconds, on_progress)
    if job.spec.task is TaskName.TEXT_GENERATION:
        from penstock_optimizer.targets.decoder import DecoderTarget

        return DecoderTarget(job, seconds, on_progress)
    from penstock_optimizer.targets.encoder import EncoderTarget

    return EncoderTarget(job, seconds, on_progress)


class Optimisation:
    """One run of the stages."""

    def __init__(self, job: Job, seconds: float, on_progress: OnProgressEvent) -> None:
        self._job = job
        self._target = _target(job, seconds, on_progress)
        self._budget = self._target.budget
        self._events = self._target.events
        self._sample: IndexSample | None = None
        self._index: IndexCertificate | None = None
        """Of the present choice."""

    def prepare(self, seconds: float) -> None:
        """Export the fp32 graph within `seconds`, and write the fp32 artefact unless it exists. Errors of the model as
        for `export`; OptimizationError when the export takes longer."""
        job, target = self._job, self._target
        with locked(job.lock("baseline."), waiting=lambda: None):
            message, facts = target.export(seconds)
            choice = target.unmeasured() if job.prepared() is None else None
            if choice is not None:
                self._write(job.baseline, self._manifest(choice), choice)
        self._events.advance(Stage.EXPORT, message, facts=facts)

    def run(self) -> Manifest:
        """Run all stages and write the artefact."""
        job, target, budget, events = self._job, self._target, self._budget, self._events
        gate = job.spec.vector_space
        if gate is not None and target.measures_capacity:
            # Before the search: without the sample, its result could not serve.
            self._sample = read_sample(fetch_file(gate.index.source, job.work.path / "index"))
        events.advance(Stage.EXPORT, "writing the fp32 graph", facts={"budget_seconds": budget.seconds}, by=0)
        self.prepare(budget.left_for_capacity())
        try:
            target.try_candidates()
            self._require_candidate()
            choice = target.choose()
        finally:
            target.close()
        choice, manifest = self._measured(choice)
        manifest = target.finish(manifest)
        manifest = manifest.model_copy(update={"seconds": budget.spent})
        written = self._write(job.artefact, manifest, choice)
        if not manifest.cut_short:
            job.work.remove()
        caveat = f" ({choice.caveat})" if choice.caveat else ""
        events.done(job.artefact, f"{manifest.chosen.plan.summary}{caveat}", budget.spent)
        return written

    def _measured(self, choice: ChosenModel) -> tuple[ChosenModel, Manifest]:
        """The manifest with the capacity of a replica, measured with the real server. A choice with which the server
        breaks is replaced, at last by fp32. Without time to measure, the artefact is still complete."""
        job, target = self._job, self._target
        if not target.measures_capacity:
            return choice, self._manifest(choice, MeasuredCapacity())
        draft = job.work.path / "draft"
        for file in (self._probes, self._limits):
            file.unlink(missing_ok=True)  # of a choice that broke
        self._write(draft, self._manifest(choice), choice)
        try:
            capacity = self._capacity(draft)
        except CapacityFailed as failure:
            other = target.instead(choice, failure) if isinstance(failure, ReplicaBroken) else None
            if other is not None:
                return self._measured(other)
            self._events.no_capacity(failure.message)
            capacity = MeasuredCapacity(doubts=(f"The capacity was not measured: {failure.message}.",))
        return choice, self._manifest(choice, capacity)

    def _capacity(self, artefact: Path) -> MeasuredCapacity:
        job, budget = self._job, self._budget
        log, longest = job.work.log("capacity"), job.spec.serving.max_input_tokens
        if self._target.judges_live and budget.left_for_capacity() > LIMITS_PROCESS_SECONDS:
            measure_limits(artefact, self._limits, cpus=job.cpus, log=log, max_tokens=longest)
        with serve_replica(
            artefact,
            cores=job.grant.cores,
            cpus=job.cpus,
            log=log,
            max_tokens=longest,
            probes=self._probes,
            start_seconds=budget.left_for_capacity(),
        ) as server:
            self._certify(server)
            return self._target.capacity(server)

    def _certify(self, server: ReplicaServer) -> None:
        """Compare the vectors of a replica with the index of the endpoint. OutsideIndex if they do not fit, and another
        precision of the model may."""
        gate, sample, budget = self._job.spec.vector_space, self._sample, self._budget
        if gate is None or sample is None:
            return
        self._index = None
        seconds = budget.left_for_capacity() - budget.capacity_seconds

        def moved(done: int, of: int) -> None:
            self._events.advance(Stage.CAPACITY, f"comparing with the index: {done} of {of} texts", by=0)

        vectors = index_vectors(sample, gate.index, Embedder(server.url), seconds=max(seconds, 1.0), on_progress=moved)
        found = self._index = certify(vectors, gate.index)
        if not found.verdict.fits and (found.mean_cosine or 0) >= SAME_MODEL:
            raise OutsideIndex(f"its vectors do not fit the index ({found.summary})")

    @property
    def _probes(self) -> Path:
        """The vectors of the probe texts, once the server of the choice has written them."""
        return self._job.work.path / PROBES_FILE

    @property
    def _limits(self) -> Path:
        """What the guard of live traffic tests against, once the server of the choice has written it."""
        return self._probes.with_suffix(".json")

    def _require_candidate(self) -> None:
        """With `whenNoCandidate: Fail`, raise an error that lists each candidate, unless one may be served. Candidates
        that the endpoint excludes do not count; those that the time budget excluded do: they may be the better ones."""
        optimization = self._job.spec.optimization
        searches = optimization.mode is OptimizationMode.AUTO
        others = [
            one
            for one in self._target.candidates
            if one.recipe != self._target.reference
            and (one.outcome is not Outcome.SKIPPED or one.reason_code.is_out_of_time)
        ]
        if optimization.when_no_candidate is not NoCandidate.FAIL or not searches or not others:
            return
        if any(one.outcome in {Outcome.CHOSEN, Outcome.SLOWER} for one in others):
            return
        listed = "; ".join(f"{one.recipe.name}: {one.reason}" for one in others)
        longer = any(one.reason_code.is_out_of_time for one in others)
        raise NoCandidateWithinBudget(
            f"no candidate is within the accuracy budget, and whenNoCandidate is Fail ({listed})",
            remedy=("Raise spec.optimization.budgetSeconds, widen" if longer else "Widen")
            + " spec.optimization.accuracy, allow more precisions, or set whenNoCandidate: ServeFP32",
        )

    def _manifest(self, choice: ChosenModel, capacity: MeasuredCapacity | None = None) -> Manifest:
        """The manifest of a choice. `capacity` None: it is not the result."""
        job, measured = self._job, capacity or MeasuredCapacity()
        found = [
            *measured.missed,
            *of_late_candidates(choice.candidates),
            *choice.findings,
            *((SHARED_CPUS,) if capacity and self._target.measures_capacity and not job.load_cpus else ()),
            *sentences(choice.notes),
            *measured.doubts,
            *(sentences(job.findings()) if capacity else ()),
        ]
        fields = {**choice.fields, **measured.fields}
        if capacity and self._index is not None:
            fields["index"] = self._index
            fits = "fit" if self._index.verdict.fits else "do not fit"
            found.append(f"The vectors {fits} the index: {self._index.summary}.")
        if capacity and self._probes.is_file():
            cosine = least_cosine(choice.candidates, choice.chosen.plan)
            fields["probes"] = ProbeFacts(texts=texts_digest(), largest_difference=allowed_difference(cosine))
        if capacity and self._limits.is_file():
            fields["live"] = LiveLimits.model_validate_json(self._limits.read_bytes())
        if capacity:
            fields["budget_seconds"] = self._budget.seconds
            fields["cut_short"] = choice.cut_short or late(choice.candidates) > 0
        return job.manifest(
            choice.parameters,
            chosen=choice.chosen,
            baseline=choice.baseline,
            candidates=choice.candidates,
            findings=found,
            **fields,
        )

    def _write(self, folder: Path, manifest: Manifest, choice: ChosenModel) -> Manifest:
        more = {} if manifest.probes is None else {PROBES_FILE: self._probes}
        return write_artefact(folder, manifest, folder=self._job.folder, graphs=choice.graphs, more=more)


def least_cosine(candidates: Sequence[CandidateFacts], plan: Plan) -> float | None:
    """The lowest cosine to fp32 that the guard has seen of the recipes of a plan; None: it did not compare any."""
    metrics = [
        metric.value
        for one in candidates
        if one.recipe in plan.recipes and one.verdict is not None
        for metric in one.verdict.metrics
        if metric.name == "min_cosine"
    ]
    return min(metrics, default=None)
