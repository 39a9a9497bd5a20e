"""Whether a new release is to search again, and whether the result of a new spec, or of a new release, is to replace
the artefact that serves."""

from __future__ import annotations

from penstock.resources.optimized_model import OptimizedModelSpec
from penstock.resources.result import Result
from penstock_operator.endpoint.optimization.model import OptimizationState

WORSE_SHARE = 0.9
"""A result with less than this share of the present capacity, measured alike, is worse; less difference is noise."""


def why_worse(new: OptimizationState, old: OptimizationState) -> str:
    """Why the result of the present spec should not replace what serves; empty when it should.

    Capacities are compared only where nothing but the version of the optimiser differs: a changed spec is
    something else.
    """
    found, present = new.status.result, old.status.result
    if found is None or present is None:
        return ""
    if present.accuracy.within_budget and not found.accuracy.within_budget:
        return f"the new result is outside its accuracy budget ({found.accuracy.reason})"
    now_on, before_on = new.spec.toolchain.target, old.spec.toolchain.target
    # The processor of a compile job has no part in the measurements.
    alike = now_on is before_on and (now_on is not None or found.cpu.isa is present.cpu.isa)
    if without_toolchain(new.spec) != without_toolchain(old.spec) or not alike:
        return ""
    if found.capacity.provisional or present.capacity.provisional:
        return ""
    for unit, now, before in (
        ("requests/s", found.capacity.requests_per_second, present.capacity.requests_per_second),
        ("tokens/s", _tokens_per_second(found), _tokens_per_second(present)),
    ):
        if before and (now is None or now < WORSE_SHARE * before):
            return (
                f"the new result takes {0 if now is None else now:.4g} {unit} within the objective, "
                f"and what serves takes {before:.4g}"
            )
    return ""


def _tokens_per_second(result: Result) -> float | None:
    return None if result.token_capacity is None else result.token_capacity.tokens_per_second


def without_toolchain(spec: OptimizedModelSpec) -> object:
    """The fields of the spec that its user chooses."""
    return spec.model_dump(exclude={"toolchain"})


def is_kept(served: OptimizationState, wanted: OptimizedModelSpec) -> bool:
    """Whether the result that serves stays the wanted one although other images would search for the present spec: it
    was made for the same spec with this revision of the search, and answers within its accuracy budget."""
    result = served.status.result
    return (
        served.ready
        and result is not None
        and result.accuracy.within_budget
        and served.spec.toolchain.target is wanted.toolchain.target
        and served.spec.toolchain.revision >= wanted.toolchain.revision
        and without_toolchain(served.spec) == without_toolchain(wanted)
    )
