"""Lists the recipes of text generation for a processor, and chooses the best of the measured ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.hardware import Isa
from penstock.manifest import CandidateFacts, GenerationSpeed, Outcome
from penstock.recipe import BF16_REST, CACHE_U8, WIDE_ACTIVATIONS, EngineName, Plan, Precision, Recipe
from penstock.resources.endpoint import Objective, Optimization

FP32 = Recipe(engine=EngineName.OPENVINO, precision=Precision.FP32)
"""The reference, and the first answer."""
NEAR = 0.05
"""Times this close count as equal, so that the second criterion decides."""


def candidates(isa: Isa, optimization: Optimization) -> tuple[list[Recipe], list[tuple[Recipe, str]]]:
    """The recipes to try besides fp32, the most promising first, and those left out with the reason."""
    tried, skipped = [], []
    for engine, precision, options in (
        (EngineName.NATIVE, Precision.INT4_ROWWISE, (WIDE_ACTIVATIONS,)),
        (EngineName.NATIVE, Precision.INT8_ROWWISE, (WIDE_ACTIVATIONS,)),
        (EngineName.OPENVINO, Precision.INT4_WEIGHTS, ()),
        (EngineName.OPENVINO, Precision.INT8_ROWWISE, ()),
        (EngineName.OPENVINO, Precision.INT4_ROWWISE, ()),
        (EngineName.OPENVINO, Precision.INT8_WEIGHTS, (BF16_REST,)),
        (EngineName.OPENVINO, Precision.INT4_WEIGHTS, (BF16_REST,)),
        (EngineName.OPENVINO, Precision.BF16, ()),
        (EngineName.OPENVINO, Precision.INT8_ROWWISE, (CACHE_U8,)),
        (EngineName.OPENVINO, Precision.INT4_WEIGHTS, (CACHE_U8,)),
        (EngineName.OPENVINO, Precision.INT8_WEIGHTS, ()),
    ):
        recipe = Recipe(engine=engine, precision=precision, options=options)
        reason = _why_not(recipe, isa, optimization)
        if reason is None:
            tried.append(recipe)
        else:
            skipped.append((recipe, reason))
    return tried, skipped


def _why_not(recipe: Recipe, isa: Isa, optimization: Optimization) -> str | None:
    if recipe.engine not in optimization.engines:
        return f"optimization.engines leaves {recipe.engine.value} out"
    if recipe.precision not in optimization.precisions:
        return f"optimization.precisions leaves {recipe.precision.value} out"
    if (recipe.precision is Precision.BF16 or BF16_REST in recipe.options) and not isa.has_bf16:
        return f"{isa.value} has no native bf16: it would be emulated, slower than fp32"
    is_rowwise = recipe.precision in {Precision.INT8_ROWWISE, Precision.INT4_ROWWISE}
    if recipe.engine is EngineName.OPENVINO and is_rowwise and not isa.has_int8_dot:
        return f"{isa.value} has no 8-bit dot product"
    return None


def plan_of(recipe: Recipe, cores: int) -> Plan:
    """All cores work on each step."""
    return Plan(recipe=recipe, streams=1, threads_per_stream=cores)


def answer_milliseconds(speed: GenerationSpeed) -> float:
    """The time of one client's whole answer."""
    return speed.first_token_milliseconds + (speed.output_tokens - 1) * speed.next_token_p50_milliseconds


def time_over_limit(speed: GenerationSpeed, objective: Objective) -> float:
    """The largest ratio of a measured time to its limit, both p95 where there is one; 1 within all limits."""
    limits = (
        (speed.first_token_milliseconds, objective.first_token_milliseconds),
        (speed.next_token_p95_milliseconds, objective.next_token_milliseconds),
    )
    return max([1.0, *(measured / limit for measured, limit in limits if limit is not None)])


def best(measured: Sequence[CandidateFacts], objective: Objective) -> CandidateFacts:
    """The best of candidates with a speed, by criteria in order; where candidates are within `NEAR`, the next decides.

    First, where the objective limits the time to the first token or between tokens, the time that a client alone waits
    beyond the limit. Then the time of one client's answer, and tokens per second of many; in the other order with an
    objective on tokens per second, or on throughput without latency."""
    asks_for_rate = objective.tokens_per_second is not None
    by_rate_first = asks_for_rate or (objective.throughput is not None and objective.latency is None)

    def costs(facts: CandidateFacts) -> tuple[float, float, float]:
        assert facts.generation is not None  # noqa: S101 - the caller gives measured ones
        speed = facts.generation
        over, alone, shared = time_over_limit(speed, objective), answer_milliseconds(speed), 1 / speed.tokens_per_second
        return (over, shared, alone) if by_rate_first else (over, alone, shared)

    left = list(measured)
    for criterion in range(2):
        lowest = min(costs(facts)[criterion] for facts in left)
        left = [facts for facts in left if costs(facts)[criterion] <= lowest * (1 + NEAR)]
    return min(left, key=lambda facts: costs(facts)[2])


def concluded(measured: Sequence[CandidateFacts], chosen: CandidateFacts) -> tuple[CandidateFacts, ...]:
    """The candidates with their final outcomes and reasons."""
    assert chosen.generation is not None  # noqa: S101 - the caller gives a measured one
    own = answer_milliseconds(chosen.generation)
    settled = []
    for facts in measured:
        if facts.recipe == chosen.recipe:
            settled.append(facts.settled(Outcome.CHOSEN, "best for the objective within the accuracy budget"))
        elif facts.recipe != FP32 and facts.outcome is Outcome.SLOWER and facts.generation is not None:
            alone = answer_milliseconds(facts.generation) / own
            shared = chosen.generation.tokens_per_second / facts.generation.tokens_per_second
            reason = f"{alone:.2f} times the time of an answer, {shared:.2f} times the time of a shared token"
            settled.append(facts.settled(Outcome.SLOWER, reason))
        else:
            settled.append(facts)
    return tuple(settled)
