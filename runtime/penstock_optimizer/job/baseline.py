"""The fp32 artefact: made within seconds, so that an endpoint answers while the search runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from penstock.errors import OptimizationError
from penstock.manifest import CandidateFacts, Manifest, Outcome, ServedModel
from penstock.recipe import Batching, Plan
from penstock_optimizer.candidate.isolation import Failure, WorkerFailed
from penstock_optimizer.candidate.lab import ExportedFacts
from penstock_optimizer.candidate.processes import ProcessLab
from penstock_optimizer.job.artefact import graph_path, write_artefact
from penstock_optimizer.job.budget import RAISE_BUDGET
from penstock_optimizer.job.job import Job
from penstock_optimizer.job.work_folder import locked
from penstock_optimizer.search.recipes import TEACHER
from penstock_optimizer.search.space import Limits, WideFrom, first_plan

WIDE_FROM = WideFrom(64, 64)
"""Unmeasured: from about this length on, a lone row gains from all cores with every engine and model that was tried."""
EXPORT_SECONDS = 600.0
"""A large model through torch takes minutes; more is a hang."""


@dataclass(frozen=True)
class Prepared:
    """What can be served at once."""

    artefact: Path
    finished: bool
    """True: the optimised artefact was there already. False: the fp32 one."""


def baseline_plan(cores: int, batching: Batching = Batching.EQUAL_LENGTH) -> Plan:
    """The fp32 plan, unmeasured. Equal lengths only, until the guard has proved that padding changes nothing."""
    return first_plan(TEACHER, Limits(cores, batching, ()), wide_from=WIDE_FROM)


def prepare_baseline(
    job: Job, *, seconds_left: Callable[[], float] = lambda: EXPORT_SECONDS
) -> tuple[Manifest, ExportedFacts]:
    """Export the fp32 graph and write its artefact, unless that is there. Errors of the model as `export` has them.

    `seconds_left`: of a time budget, when the export begins; OptimizationError where it does not end within them.
    """
    with locked(job.lock("baseline."), waiting=lambda: None):
        lab = ProcessLab(job.subject, job.work, job.cpus)
        limit = max(seconds_left(), 0.0)
        try:
            exported = lab.exported("fused", timeout_seconds=min(limit, EXPORT_SECONDS))
        except WorkerFailed as failure:
            if failure.failure is Failure.TIMED_OUT and limit < EXPORT_SECONDS:
                raise OptimizationError(
                    f"the time budget ended before the fp32 graph was written: {failure.reason}", remedy=RAISE_BUDGET
                ) from failure
            raise failure.as_error("the model could not be exported") from failure
        manifest = job.prepared()
        if manifest is None:
            manifest = _write(job, exported)
    return manifest, exported


def _write(job: Job, exported: ExportedFacts) -> Manifest:
    graph = Path(exported.graph)
    plan = baseline_plan(job.grant.cores)
    served = ServedModel(path=graph_path(TEACHER, graph), io=exported.io, plan=plan)

    def describe(files: dict[str, str]) -> Manifest:
        return Manifest(
            key=job.key,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            toolchain=job.tools,
            model=job.model_facts(exported.parameters),
            task=job.spec.task,
            cpu=job.host.cpu,
            cores=job.grant.cores,
            pinned=job.grant.pinned,
            objective=job.spec.objective.summary,
            chosen=served,
            baseline=served,
            candidates=(
                CandidateFacts(
                    recipe=TEACHER,
                    outcome=Outcome.CHOSEN,
                    reason="the fp32 graph as it was exported",
                    fused_nodes=exported.fused_nodes,
                    build_seconds=exported.seconds,
                    size_bytes=graph.stat().st_size,
                ),
            ),
            workload=job.mix.summary,
            findings=("Nothing was measured yet: this is the fp32 graph as it was exported.",),
            files=files,
        )

    return write_artefact(job.baseline, folder=job.folder, graphs={TEACHER: graph}, describe=describe)
