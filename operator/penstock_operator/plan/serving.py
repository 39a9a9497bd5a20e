"""Which artefact the pods are to serve: the result, or the fp32 graph meanwhile, or what they have served so far.

The one rule that matters: what serves is replaced only by something that is there, was judged, and is not worse.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.resources.endpoint import OptimizationMode
from penstock.resources.optimized_model import OptimizedModelSpec
from penstock.resources.result import ArtefactReference, Result
from penstock.tasks import TaskName
from penstock_operator.plan.endpoint import Endpoint
from penstock_operator.plan.observed import DeploymentFacts
from penstock_operator.plan.optimized_model import Optimization

NOTICEABLY = 0.9
"""A result that takes less than this share of what the present one takes, measured alike, is worse, not noise."""
NO_CANDIDATE = "NoCandidateWithinBudget"


@dataclass(frozen=True)
class Serving:
    """What the Deployment is to serve, and what it was made for."""

    artefact: ArtefactReference | None
    """None: pinned, or not known."""
    digest: str
    """`sha256:...`."""
    optimized_model: str
    """Empty: pinned by the endpoint."""
    task: TaskName
    hardware_class: str
    cores: int
    max_input_tokens: int | None
    truncate: bool
    result: Result | None = None
    """The evidence; None for the fp32 graph while it is all there is, and for a pinned artefact."""
    baseline: bool = False
    """The fp32 graph, while the search is not through."""
    kept: str = ""
    """Why it is not what the present spec asks for; empty: it is."""
    same_wish: bool = False
    """It is kept, and was made for the same spec by another version of the optimiser: as good as asked for."""
    known: bool = True
    """False: nothing is known of it but its digest, and the Deployment stays exactly as it is."""


def choose(
    endpoint: Endpoint, wanted: Optimization | None, serving: Optimization | None, deployment: DeploymentFacts | None
) -> Serving | None:
    """What to serve; None: nothing yet.

    `wanted` is the OptimizedModel of the present spec (None: pinned, or not known), `serving` that of the Deployment.
    """
    spec = endpoint.spec
    if spec.optimization.mode is OptimizationMode.PINNED and spec.optimization.artefact is not None:
        return Serving(
            artefact=None,
            digest=spec.optimization.artefact,
            optimized_model="",
            task=spec.task,
            hardware_class=spec.hardware_class,
            cores=spec.cores,
            max_input_tokens=spec.serving.max_input_tokens,
            truncate=spec.serving.truncate,
        )
    present = deployment.artefact if deployment is not None else ""
    if wanted is not None and wanted.ready and wanted.status.artefact is not None:
        if serving is not None and present and wanted.name != serving.name:
            worse = why_worse(wanted, serving)
            if worse:
                same = _without_toolchain(wanted.spec) == _without_toolchain(serving.spec)
                kept = _of(serving, _reference(serving, present), kept=worse, same_wish=same)
                return kept or _unknown(endpoint, present, deployment, kept=worse)
        return _of(wanted, wanted.status.artefact)
    if present:
        if wanted is not None and _baseline_digest(wanted) == present:
            return _of(wanted, wanted.status.baseline)
        waits = "the present plan goes on serving until there is a better one"
        known = None if serving is None else _of(serving, _reference(serving, present), kept=waits)
        return known or _unknown(endpoint, present, deployment, kept=waits)
    if wanted is None or not spec.optimization.serve_while_optimizing:
        return None
    failure = wanted.status.failure
    if wanted.failed and failure is not None and failure.reason == NO_CANDIDATE:
        # whenNoCandidate: Fail. The fp32 graph is exactly what is not wanted.
        return None
    return _of(wanted, wanted.status.baseline) if wanted.status.baseline is not None else None


def why_worse(new: Optimization, old: Optimization) -> str:
    """Why the result of the present spec should not replace what serves; empty when it should.

    Speeds are compared only where all that differs is who measured them (another version of the optimiser): a changed
    spec asks for something else, and gets it.
    """
    found, present = new.status.result, old.status.result
    if found is None or present is None:
        return ""
    if present.accuracy.within_budget and not found.accuracy.within_budget:
        return f"the new result is outside its accuracy budget ({found.accuracy.reason})"
    if _without_toolchain(new.spec) != _without_toolchain(old.spec) or found.cpu.isa is not present.cpu.isa:
        return ""
    now, before = found.capacity.requests_per_second, present.capacity.requests_per_second
    if before and (now is None or now < NOTICEABLY * before):
        return (
            f"the new result takes {0 if now is None else now:.4g} requests/s within the objective, "
            f"and what serves takes {before:.4g}"
        )
    return ""


def _without_toolchain(spec: OptimizedModelSpec) -> object:
    return spec.model_dump(exclude={"toolchain"})


def _of(
    model: Optimization, artefact: ArtefactReference | None, *, kept: str = "", same_wish: bool = False
) -> Serving | None:
    if artefact is None:
        return None
    result = model.status.artefact is not None and artefact.digest == model.status.artefact.digest
    return Serving(
        artefact=artefact,
        digest=artefact.digest,
        optimized_model=model.name,
        task=model.spec.task,
        hardware_class=model.spec.hardware_class,
        cores=model.spec.cores,
        max_input_tokens=model.spec.serving.max_input_tokens,
        truncate=model.spec.serving.truncate,
        result=model.status.result if result else None,
        baseline=not result,
        kept=kept,
        same_wish=same_wish,
    )


def _reference(model: Optimization, digest: str) -> ArtefactReference | None:
    for known in (model.status.artefact, model.status.baseline):
        if known is not None and known.digest == digest:
            return known
    return None  # that OptimizedModel was deleted, and another of its name found something else


def _unknown(endpoint: Endpoint, digest: str, deployment: DeploymentFacts | None, *, kept: str) -> Serving:
    """What serves was pinned, or its OptimizedModel was deleted: the Deployment stays exactly as it is."""
    spec = endpoint.spec
    return Serving(
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


def _baseline_digest(model: Optimization) -> str:
    return "" if model.status.baseline is None else model.status.baseline.digest
