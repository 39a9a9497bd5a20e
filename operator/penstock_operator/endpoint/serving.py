"""Chooses the artefact that the pods serve: the result, the fp32 graph until there is a result, or the present
artefact.

An artefact that serves is replaced only by one that exists, was judged, and is not worse.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.hardware import NeuronGeneration
from penstock.resources.endpoint import OptimizationMode
from penstock.resources.optimized_model import OptimizedModelStatus
from penstock.resources.result import ArtefactReference, Result
from penstock.tasks import TaskName
from penstock_operator.endpoint.optimization.index_gate import refused_by_index
from penstock_operator.endpoint.optimization.model import OptimizationState, artefact_uri, status_of, target_of
from penstock_operator.endpoint.optimization.replaces import why_worse, without_toolchain
from penstock_operator.endpoint.spec import ParsedEndpoint
from penstock_operator.facts.reasons import Reason
from penstock_operator.facts.workloads import DeploymentFacts, OptimizedModelFacts


@dataclass(frozen=True)
class ServingChoice:
    """The artefact that the Deployment is to serve, and the spec that it was made for."""

    artefact: ArtefactReference | None
    """None: not known."""
    digest: str
    """`sha256:...`."""
    optimized_model: str
    """Empty: pinned by the endpoint, and no OptimizedModel of its namespace has it (`policy.sharedArtefacts`)."""
    task: TaskName
    hardware_class: str
    cores: int
    max_input_tokens: int | None
    truncate: bool
    uri: str = ""
    """The artefact's address by the status of its OptimizedModel; empty: not known."""
    result: Result | None = None
    """The measurements; None for the fp32 graph while the search runs, and for a pinned artefact."""
    measured: Result | None = None
    """As `result`, and of a pinned artefact too, where it may have been measured for another spec: for its memory, and
    the bounds of its latency histogram."""
    stated_p95_milliseconds: float | None = None
    """The p95 objective that its optimisation was given; None: none, or it is pinned."""
    baseline: bool = False
    """It is the fp32 graph, and the search has not ended."""
    kept: str = ""
    """Why it is not the artefact of the present spec; empty: it is."""
    same_spec: bool = False
    """It is kept, and another version of the optimiser made it for the same spec."""
    target: NeuronGeneration | None = None
    """The Inferentia devices that it was compiled for; None: it computes on CPUs, or it is only known by its digest."""
    fp32: bool = False
    """The fp32 graph of the artefact serves instead of its plan, after an alarm of the guard of live traffic."""
    known: bool = True
    """False: only its digest is known, and the Deployment is not changed."""


def choose(
    endpoint: ParsedEndpoint,
    wanted: OptimizationState | None,
    serving: OptimizationState | None,
    deployment: DeploymentFacts | None,
    *,
    accepted: bool = True,
    pinned: OptimizedModelFacts | None = None,
) -> ServingChoice | None:
    """What to serve; None: nothing yet.

    `wanted` is the OptimizedModel of the present spec (None: pinned, or not known), `serving` the Deployment's.
    An artefact that a spec pins serves only if the spec is `accepted`. `pinned`: the OptimizedModel that has it.
    """
    spec = endpoint.spec
    if accepted and spec.optimization.mode is OptimizationMode.PINNED and spec.optimization.artefact is not None:
        status = None if pinned is None else status_of(pinned)
        reference = None if status is None else _reference(status, spec.optimization.artefact)
        return ServingChoice(
            artefact=reference,
            digest=spec.optimization.artefact,
            optimized_model="" if pinned is None else pinned.name,
            task=spec.task,
            hardware_class=spec.hardware_class,
            cores=spec.cores,
            max_input_tokens=spec.serving.max_input_tokens,
            truncate=spec.serving.truncate,
            uri="" if pinned is None else artefact_uri(pinned.status, spec.optimization.artefact),
            measured=None if status is None else _measured(status, reference),
            target=None if pinned is None else target_of(pinned),
        )
    present = deployment.artefact if deployment is not None else ""
    if wanted is not None and wanted.ready and wanted.status.artefact is not None:
        worse = "" if spec.vector_space is None else refused_by_index(wanted)
        if serving is not None and present and wanted.name != serving.name:
            worse = worse or why_worse(wanted, serving)
        if worse and present:
            same = serving is not None and without_toolchain(wanted.spec) == without_toolchain(serving.spec)
            known = serving and _of(serving, _reference(serving.status, present), kept=worse, same_spec=same)
            return known or _unknown(endpoint, present, deployment, kept=worse)
        return None if worse else _of(wanted, wanted.status.artefact)
    if present:
        if wanted is not None and _baseline_digest(wanted) == present:
            return _of(wanted, wanted.status.baseline)
        waits = "the present plan goes on serving until there is a better one"
        known = None if serving is None else _of(serving, _reference(serving.status, present), kept=waits)
        return known or _unknown(endpoint, present, deployment, kept=waits)
    if wanted is None or not spec.optimization.serve_while_optimizing or spec.vector_space is not None:
        return None
    failure = wanted.status.failure
    if wanted.failed and failure is not None and failure.reason == Reason.NO_CANDIDATE_WITHIN_BUDGET:
        # whenNoCandidate: Fail does not allow the fp32 graph either.
        return None
    return _of(wanted, wanted.status.baseline) if wanted.status.baseline is not None else None


def _of(
    model: OptimizationState, artefact: ArtefactReference | None, *, kept: str = "", same_spec: bool = False
) -> ServingChoice | None:
    if artefact is None or (model.spec.toolchain.target is not None and artefact == model.status.baseline):
        return None  # the fp32 graph computes on CPUs, and pods with devices have few
    result, latency = _measured(model.status, artefact), model.spec.objective.latency
    return ServingChoice(
        artefact=artefact,
        digest=artefact.digest,
        uri=artefact.uri,
        optimized_model=model.name,
        task=model.spec.task,
        hardware_class=model.spec.hardware_class,
        cores=model.spec.cores,
        max_input_tokens=model.spec.serving.max_input_tokens,
        truncate=model.spec.serving.truncate,
        target=model.spec.toolchain.target,
        result=result,
        measured=result,
        stated_p95_milliseconds=None if latency is None else latency.p95_milliseconds,
        baseline=model.status.artefact is None or artefact.digest != model.status.artefact.digest,
        kept=kept,
        same_spec=same_spec,
    )


def _reference(status: OptimizedModelStatus, digest: str) -> ArtefactReference | None:
    for known in (status.artefact, status.baseline):
        if known is not None and known.digest == digest:
            return known
    return None  # the OptimizedModel was deleted, and a new one of its name has another result


def _measured(status: OptimizedModelStatus, artefact: ArtefactReference | None) -> Result | None:
    """The measurements of an artefact in a status; None for the fp32 graph."""
    is_result = artefact is not None and status.artefact is not None and artefact.digest == status.artefact.digest
    return status.result if is_result else None


def _unknown(endpoint: ParsedEndpoint, digest: str, deployment: DeploymentFacts | None, *, kept: str) -> ServingChoice:
    """A previously pinned artefact, or the artefact of a deleted OptimizedModel: the Deployment is not changed."""
    spec = endpoint.spec
    return ServingChoice(
        artefact=None,
        digest=digest,
        optimized_model=deployment.optimized_model if deployment is not None else "",
        task=spec.task,
        hardware_class=spec.hardware_class,
        cores=spec.cores,
        max_input_tokens=spec.serving.max_input_tokens,
        truncate=spec.serving.truncate,
        kept=kept,
        known=False,
    )


def _baseline_digest(model: OptimizationState) -> str:
    return "" if model.status.baseline is None else model.status.baseline.digest
