"""Which candidate to make next: the one with the most to gain for the seconds that it costs. Pure.

The time budget may end before all are made, so a recipe that takes a second comes before one that takes twenty, unless
the latter promises that much more. Nothing is decided here: what is made is judged and measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.hardware import Isa
from penstock.recipe import BF16_REST, EngineName, Precision, Recipe
from penstock_optimizer.search.recipes import NATIVE_WIDE_ISAS, NNCF, PER_CHANNEL, REDUCED_RANGE, SIX_BITS, is_tuned

JUDGING_SECONDS = 4.0
"""Starting a process, a first look and the guard: what every candidate costs, whatever its graph."""


@dataclass(frozen=True)
class Expectation:
    """What experience with MiniLM on two cores says of a recipe (docs/decisions/recipes.md). Only ratios matter."""

    speed_up: float
    """Over fp32, at middling lengths."""
    accepted: float
    """How likely the guard lets it serve."""
    build_seconds: float

    @property
    def gain(self) -> float:
        """Of the time of a request, as a share of fp32's speed: 0 for what is as fast, or surely rejected."""
        return max(self.speed_up - 1.0, 0.0) * self.accepted


def expectation(recipe: Recipe, isa: Isa) -> Expectation:
    """What to expect of a recipe on an instruction set."""
    options = set(recipe.options)
    # Without 8-bit dot products sums go by pairs, and pairs that could saturate must be found and cut.
    speed_up, pairs = (3.8, 0.0) if isa.has_int8_dot else (2.0, 7.0 if REDUCED_RANGE in options else 0.0)
    match recipe.precision:
        case Precision.FP32:
            return Expectation(1.02, 1.0, 0.2)
        case Precision.BF16:
            return Expectation(3.2, 1.0, 0.2)
        case Precision.INT8_ROWWISE if recipe.engine is EngineName.NATIVE:
            # AVX2's kernels lead at a few tokens alone. With 6 bits short rows alone are faster: other engines have
            # more to tell first.
            own = 1.5 * speed_up if isa in NATIVE_WIDE_ISAS else 2.0
            return Expectation(own, 0.6 if SIX_BITS in options else 0.95, 12.0)
        case Precision.INT8_ROWWISE:
            return Expectation(0.7 * speed_up, 0.9, 11.0)
    if NNCF in options:
        return Expectation(speed_up, 0.5, 15.0)
    if is_tuned(recipe):
        better = 0.1 if BF16_REST in options else 0.0
        # Static graphs may be batched, dynamic ones may not.
        return Expectation(speed_up + better - 0.1 * (recipe.precision is Precision.INT8_DYNAMIC), 0.95, 10.0 + pairs)
    return Expectation(speed_up, 0.6 if PER_CHANNEL in options else 0.0, 1.0)


def by_gain(recipes: Sequence[Recipe], isa: Isa) -> list[Recipe]:
    """The recipes, the most gain for its cost first; those that promise the same in the order in which they came.

    A recipe whose graph another one before it has made costs the judging alone.
    """
    left = list(recipes)
    order: list[Recipe] = []
    made: set[Recipe] = set()
    while left:
        best = max(left, key=lambda recipe: _worth(recipe, isa, made))
        left.remove(best)
        order.append(best)
        made.add(best.as_built)
    return order


def _worth(recipe: Recipe, isa: Isa, made: set[Recipe]) -> float:
    """Gain for each second."""
    expected = expectation(recipe, isa)
    seconds = 0.0 if recipe.as_built in made else expected.build_seconds
    return expected.gain / (JUDGING_SECONDS + seconds)
