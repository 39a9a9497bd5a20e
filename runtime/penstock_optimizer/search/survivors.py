"""Stage 1: candidates by verdict and by speed at batch 1. Decides who is measured at length, and who goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.recipe import Precision, Recipe
from penstock_optimizer.search.recipes import is_tuned

WITHIN_BUDGET = "within the accuracy budget"
"""The reason of a candidate that goes on, until there is a better one."""
NO_TURN = "the time budget was spent before its turn"
NOT_MEASURED = "the answers are right; the time budget was spent before it was measured beside the others"
CUT_OFF = "the time budget was spent while it was tried"
NO_PLAN_TRIED = "faster at first measurement; the plan search ended before its turn"
OUT_OF_TIME = (NO_TURN, NOT_MEASURED, CUT_OFF, NO_PLAN_TRIED)
"""Reasons of candidates that more time would try."""
HOPELESS = 1.3
"""A candidate slower than the best accepted one by this factor at every length seen is not measured at length."""
FINALIST_WITHIN = 1.25
"""Recipes whose expected latency is within this factor of the best go on to the plan search: threads, streams and
batching may still turn the order."""
MOST_FINALISTS = 3


@dataclass(frozen=True)
class Timed:
    """A candidate that the guard accepted, with medians of batch-1 latency in milliseconds by tokens."""

    recipe: Recipe
    milliseconds: Mapping[int, float]


def hopeless(look: Mapping[int, float], best: Mapping[int, float]) -> bool:
    """True when a first look (fastest runs, milliseconds by tokens) shows a candidate far behind the best accepted one
    at every length that both were seen at. Without a length in common nothing is known: not hopeless."""
    common = look.keys() & best.keys()
    return bool(common) and all(look[tokens] > HOPELESS * best[tokens] for tokens in common)


def expected_milliseconds(milliseconds: Mapping[int, float], lengths: Sequence[int]) -> float:
    """The geometric mean of the latency over a sample of lengths, interpolated between the measured ones.

    Geometric, so that a gain of a tenth counts the same for short requests as for long ones.
    """
    if not lengths:
        raise ValueError("no lengths to expect a latency for")
    return math.exp(math.fsum(math.log(interpolate(milliseconds, length)) for length in lengths) / len(lengths))


def interpolate(milliseconds: Mapping[int, float], tokens: int) -> float:
    """Latency at a length between measured ones: linear; outside of them by the slope of the nearest two, never below
    the smallest share of the nearest one that a proportional cost would give."""
    measured = sorted(milliseconds)
    if tokens in milliseconds or len(measured) == 1:
        nearest = tokens if tokens in milliseconds else measured[0]
        return milliseconds[nearest]
    above = next((position for position, length in enumerate(measured) if length > tokens), len(measured) - 1)
    left, right = measured[max(above - 1, 0)], measured[max(above, 1)]
    slope = (milliseconds[right] - milliseconds[left]) / (right - left)
    nearest = min((left, right), key=lambda length: abs(length - tokens))
    value = milliseconds[left] + slope * (tokens - left)
    return max(value, milliseconds[nearest] * min(1.0, tokens / nearest))


def finalists(accepted: Sequence[Timed], teacher: Timed, lengths: Sequence[int]) -> list[Recipe]:
    """The recipes for the plan search, the one that wins a draw first.

    The teacher comes first: whatever is not faster than fp32 beyond the noise is not worth any loss of accuracy.
    Then the other fp32 engines, then the rest by expected latency, int8 that was not tuned for accuracy last.
    """
    expected = {
        timed.recipe: expected_milliseconds(timed.milliseconds, lengths) for timed in accepted if timed.milliseconds
    }
    expected.pop(teacher.recipe, None)
    if not expected:
        return [teacher.recipe]
    best = min([*expected.values(), expected_milliseconds(teacher.milliseconds, lengths)])
    near = sorted(
        (recipe for recipe, value in expected.items() if value <= FINALIST_WITHIN * best), key=expected.__getitem__
    )[:MOST_FINALISTS]
    near.sort(key=lambda recipe: (recipe.precision is not Precision.FP32, not is_tuned(recipe)))
    return [teacher.recipe, *near]
