"""The gate of `spec.vectorSpace.index`: an artefact with vectors that do not fit the index does not serve.

The optimisation job has made the certificate; here it is only read. What serves goes on serving, so that neither a
canary nor the pods of a rollout ever answer in two spaces.
"""

from __future__ import annotations

from penstock.resources.endpoint_parts.vector_space import IndexVerdict
from penstock_operator.endpoint.optimization.model import OptimizationState
from penstock_operator.facts.findings import Finding, no, unknown, yes
from penstock_operator.facts.reasons import Reason


def index_compatible(wanted: OptimizationState | None) -> Finding:
    """The condition IndexCompatible: the result of the present spec fits the index. Only with `spec.vectorSpace`."""
    if wanted is None or not wanted.ready or wanted.status.result is None:
        return unknown(Reason.NOT_ASKED, "The optimisation job compares vectors with the index when it has a result.")
    found = wanted.status.result.index
    if found is None:
        return no(
            Reason.NOT_CERTIFIED,
            "The job has compared no vectors with the index: a job for Inferentia cannot, and others may lack time. "
            "What serves is kept. Raise optimization.budgetSeconds, or certify the endpoint from outside and remove "
            "spec.vectorSpace (docs/how-to/change-the-model.md).",
        )
    if found.verdict.fits:
        return yes(Reason(found.verdict), f"Queries may search the index: {found.summary}.")
    remedy = "Embed the documents again with a second endpoint, then move the queries (docs/how-to/change-the-model.md)"
    if found.verdict is IndexVerdict.NOT_CERTIFIED:
        remedy = "A larger sample may prove it: give it another name in spec.vectorSpace.index.sample"
    return no(
        Reason(found.verdict), f"The new vectors do not fit the index: {found.summary}. What serves is kept. {remedy}."
    )


def refused_by_index(wanted: OptimizationState) -> str:
    """Why the result must not serve; empty if it may."""
    finding = index_compatible(wanted)
    return finding.message if finding.false else ""
