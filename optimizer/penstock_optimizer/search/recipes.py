"""Lists the recipes worth trying on a processor, those left out with the reason, and the order to build them in. Pure.

The time budget may end before all recipes are tried, so the one with the most expected gain for its seconds comes
first: a recipe that takes a second comes before one that takes twenty, unless the latter promises that much more. A
fast recipe that is judged early also shortens the trials of dominated ones. The expectations decide only the order:
each candidate is judged and measured. docs/decisions/recipes.md has the measurements behind them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from penstock.hardware import Isa
from penstock.recipe import (
    BF16_REST,
    COMPENSATED,
    GROUP_32,
    PER_CHANNEL,
    REDUCED_RANGE,
    SIX_BITS,
    SMOOTH,
    EngineName,
    Precision,
    Recipe,
)

OPTIONS: dict[tuple[EngineName, Precision], frozenset[str]] = {
    (EngineName.ONNXRUNTIME, Precision.INT8_DYNAMIC): frozenset({PER_CHANNEL, SMOOTH, COMPENSATED, REDUCED_RANGE}),
    (EngineName.ONNXRUNTIME, Precision.INT8_STATIC): frozenset({PER_CHANNEL, SMOOTH, COMPENSATED, REDUCED_RANGE}),
    (EngineName.OPENVINO, Precision.INT8_STATIC): frozenset(
        {PER_CHANNEL, SMOOTH, COMPENSATED, REDUCED_RANGE, BF16_REST}
    ),
    (EngineName.OPENVINO, Precision.INT8_ROWWISE): frozenset({GROUP_32, BF16_REST}),
    (EngineName.NATIVE, Precision.INT8_ROWWISE): frozenset({PER_CHANNEL, SMOOTH, COMPENSATED, SIX_BITS}),
}
"""The options that an engine supports for a precision; fp32 and bf16 have none."""

NATIVE_WIDE_ISAS = frozenset({Isa.AVX512_VNNI, Isa.AVX512_BF16, Isa.AMX})
"""The instruction sets with which the native engine multiplies 64 pairs of bytes at once, and may store weights in
fewer than 8 bits."""
NATIVE_ISAS = NATIVE_WIDE_ISAS | {Isa.AVX2, Isa.AVX_VNNI, Isa.AVX512}
"""The instruction sets that the native engine is worth trying on: it has kernels for AVX2 and up, and for no other
processor."""

REFERENCE = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32)
"""The fp32 graph: the reference that all candidates are judged by, and the fall-back."""


def is_tuned(recipe: Recipe) -> bool:
    """False for int8 without compensation of rounding errors: where a tuned recipe is as fast, it is served."""
    return recipe.precision not in {Precision.INT8_DYNAMIC, Precision.INT8_STATIC} or COMPENSATED in recipe.options


def weight_bits(recipe: Recipe) -> int:
    """Bits of a quantised weight."""
    return 6 if SIX_BITS in recipe.options else 8


@dataclass(frozen=True)
class SkippedRecipe:
    """A recipe that is not tried."""

    recipe: Recipe
    reason: str
    """One sentence, such as `this processor has no native bf16: it would be emulated`."""


@dataclass(frozen=True)
class CandidateRecipes:
    """The recipes to try, the most promising first, and those left out."""

    recipes: tuple[Recipe, ...]
    skipped: tuple[SkippedRecipe, ...] = ()


def candidate_recipes(isa: Isa, engines: Collection[EngineName], precisions: Collection[Precision]) -> CandidateRecipes:
    """The recipes for this instruction set within the endpoint's `engines` and `precisions`.

    The reference is always the first recipe, even if it is not allowed: all candidates are judged by it.
    """
    tried: list[Recipe] = [REFERENCE]
    skipped: list[SkippedRecipe] = []
    for recipe in _by_promise(isa):
        reason = _why_not(recipe, isa, engines, precisions)
        if reason is None:
            tried.append(recipe)
        else:
            skipped.append(SkippedRecipe(recipe, reason))
    return CandidateRecipes(tuple(tried), tuple(skipped))


def _by_promise(isa: Isa) -> Iterator[Recipe]:
    """All recipes besides the reference. With VNNI or AMX the native engine's int8 is fastest, then OpenVINO's;
    without, ONNX Runtime's."""
    tuned = (COMPENSATED, PER_CHANNEL, SMOOTH, *(() if isa.has_int8_dot else (REDUCED_RANGE,)))
    openvino = (
        _recipe(EngineName.OPENVINO, Precision.INT8_STATIC, BF16_REST, *tuned),
        _recipe(EngineName.OPENVINO, Precision.INT8_STATIC, *tuned),
        _recipe(EngineName.OPENVINO, Precision.BF16),
    )
    onnxruntime = (
        _recipe(EngineName.ONNXRUNTIME, Precision.INT8_STATIC, *tuned),
        _recipe(EngineName.ONNXRUNTIME, Precision.INT8_DYNAMIC, *tuned),
    )
    native = tuple(
        _recipe(EngineName.NATIVE, Precision.INT8_ROWWISE, COMPENSATED, PER_CHANNEL, SMOOTH, *more)
        for more in ((), (SIX_BITS,))
    )
    yield from (*native, *openvino, *onnxruntime) if isa.has_int8_dot else (*onnxruntime, *openvino, *native)
    yield _recipe(EngineName.OPENVINO, Precision.INT8_ROWWISE, GROUP_32)
    yield _recipe(EngineName.OPENVINO, Precision.FP32)
    if not isa.has_int8_dot:
        # Less accurate than the tuned ones, but built in a second instead of twenty: for short budgets.
        yield _recipe(EngineName.ONNXRUNTIME, Precision.INT8_DYNAMIC, PER_CHANNEL, REDUCED_RANGE)
    # The default of other tools, for comparison in the report; hardly ever within the accuracy budget.
    yield _recipe(EngineName.ONNXRUNTIME, Precision.INT8_DYNAMIC)


def _why_not(
    recipe: Recipe, isa: Isa, engines: Collection[EngineName], precisions: Collection[Precision]
) -> str | None:
    if recipe.engine not in engines:
        return f"optimization.engines leaves {recipe.engine.value} out"
    if recipe.precision not in precisions:
        return f"optimization.precisions leaves {recipe.precision.value} out"
    if (recipe.precision is Precision.BF16 or BF16_REST in recipe.options) and not isa.has_bf16:
        return f"{isa.value} has no native bf16: it would be emulated, slower than fp32"
    if recipe.engine is EngineName.OPENVINO and recipe.precision is not Precision.FP32 and isa is Isa.NEON:
        return "OpenVINO runs quantised graphs in floating point on Arm: nothing to gain"
    if recipe.engine is EngineName.OPENVINO and recipe.precision is Precision.INT8_STATIC and isa is Isa.AVX2:
        return "with AVX2 alone OpenVINO multiplies 8-bit integers more slowly than fp32"
    if recipe.engine is EngineName.NATIVE:
        return _why_not_native(recipe, isa)
    if recipe.precision is Precision.INT8_ROWWISE and not isa.has_int8_dot:
        return f"{isa.value} has no 8-bit dot product: OpenVINO quantises activations at run time only with one"
    return None


def _why_not_native(recipe: Recipe, isa: Isa) -> str | None:
    if isa not in NATIVE_ISAS:
        return f"{isa.value} is none that the native engine has kernels for: AVX2 and what came after it on x86"
    if SIX_BITS in recipe.options and isa not in NATIVE_WIDE_ISAS:
        return f"with {isa.value} the native engine keeps weights in 8 bits, whatever they need"
    return None


def _recipe(engine: EngineName, precision: Precision, *options: str) -> Recipe:
    return Recipe(engine=engine, precision=precision, options=tuple(sorted(options)))


JUDGING_SECONDS = 4.0
"""The fixed cost of a candidate: starting a process, a quick sample and the guard."""


@dataclass(frozen=True)
class Expectation:
    """What to expect of a recipe, by experience with MiniLM on two cores (docs/decisions/recipes.md). Only ratios
    matter."""

    speed_up: float
    """Over fp32, at medium lengths."""
    accepted: float
    """Probability that the guard accepts it."""
    build_seconds: float

    @property
    def gain(self) -> float:
        """Expected gain in speed as a share of fp32's: 0 for recipes that are no faster, or surely rejected."""
        return max(self.speed_up - 1.0, 0.0) * self.accepted


def expectation(recipe: Recipe, isa: Isa) -> Expectation:
    """The expectation for a recipe on an instruction set."""
    options = set(recipe.options)
    # Without 8-bit dot products sums are made in pairs, and pairs that could saturate must be found and limited.
    speed_up, pairs = (3.8, 0.0) if isa.has_int8_dot else (2.0, 7.0 if REDUCED_RANGE in options else 0.0)
    match recipe.precision:
        case Precision.FP32:
            return Expectation(1.02, 1.0, 0.2)
        case Precision.BF16:
            return Expectation(3.2, 1.0, 0.2)
        case Precision.INT8_ROWWISE if recipe.engine is EngineName.NATIVE:
            # AVX2's kernels are fastest at a few tokens only. With 6 bits only short rows are faster: other recipes
            # come first.
            own = 1.5 * speed_up if isa in NATIVE_WIDE_ISAS else 2.0
            return Expectation(own, 0.6 if SIX_BITS in options else 0.95, 12.0)
        case Precision.INT8_ROWWISE:
            return Expectation(0.7 * speed_up, 0.9, 11.0)
    if is_tuned(recipe):
        better = 0.1 if BF16_REST in options else 0.0
        # Static graphs may be batched, dynamic ones may not.
        return Expectation(speed_up + better - 0.1 * (recipe.precision is Precision.INT8_DYNAMIC), 0.95, 10.0 + pairs)
    return Expectation(speed_up, 0.6 if PER_CHANNEL in options else 0.0, 1.0)


def by_gain(recipes: Sequence[Recipe], isa: Isa) -> list[Recipe]:
    """The recipes, the most gain for its cost first; equal ones in the given order.

    A recipe costs the judging only if another one before it has built its graph.
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
    """Gain per second."""
    expected = expectation(recipe, isa)
    seconds = 0.0 if recipe.as_built in made else expected.build_seconds
    return expected.gain / (JUDGING_SECONDS + seconds)
