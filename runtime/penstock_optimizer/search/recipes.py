"""The recipes worth trying on a processor, in the order of promise, and those left out with the reason. Pure.

The order matters twice: the search may run out of time, and a recipe that is judged early lets later, hopeless ones
be cut short. docs/decisions/recipes.md has the measurements that it follows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from penstock.hardware import Isa
from penstock.recipe import BF16_REST, EngineName, Precision, Recipe

PER_CHANNEL = "per-channel"
"""A scale for each output channel of a weight instead of one for the whole matrix."""
SMOOTH = "smooth"
"""Outlier channels of the activations are scaled down and the weights up (SmoothQuant): the same product, a better
grid. The strength is chosen on calibration texts."""
COMPENSATED = "compensated"
"""Rounding errors of weights are made good by the weights rounded after them (GPTQ), and their mean by the bias."""
REDUCED_RANGE = "reduced-range"
"""Neighbouring weights are limited, so that without VNNI the sum of two 8-bit products cannot saturate at 16 bits."""
SIX_BITS = "6-bit-weights"
"""Native: weights are kept in 6 bits and made 8-bit again in the registers. The reading of weights is most of a short
row's time, and a quarter of it goes. With 5 bits MiniLM's mean cosine is under the budget (0.982; 0.995 with 6)."""
NNCF = "nncf"
"""OpenVINO: made by NNCF, the products within the attention int8 as well, instead of by our own quantiser."""
GROUP_32 = "group-32"
"""OpenVINO: a scale for every 32 activations of a token, found at run time."""

OPTIONS: dict[tuple[EngineName, Precision], frozenset[str]] = {
    (EngineName.ONNXRUNTIME, Precision.INT8_DYNAMIC): frozenset({PER_CHANNEL, SMOOTH, COMPENSATED, REDUCED_RANGE}),
    (EngineName.ONNXRUNTIME, Precision.INT8_STATIC): frozenset({PER_CHANNEL, SMOOTH, COMPENSATED, REDUCED_RANGE}),
    (EngineName.OPENVINO, Precision.INT8_STATIC): frozenset(
        {PER_CHANNEL, SMOOTH, COMPENSATED, REDUCED_RANGE, NNCF, BF16_REST}
    ),
    (EngineName.OPENVINO, Precision.INT8_ROWWISE): frozenset({GROUP_32, BF16_REST}),
    (EngineName.NATIVE, Precision.INT8_ROWWISE): frozenset({PER_CHANNEL, SMOOTH, COMPENSATED, SIX_BITS}),
}
"""The options that a precision of an engine knows; fp32 and bf16 know none."""

NATIVE_WIDE_ISAS = frozenset({Isa.AVX512_VNNI, Isa.AVX512_BF16, Isa.AMX})
"""Where the native engine multiplies 64 pairs of bytes at once, and may keep weights in fewer than 8 bits."""
NATIVE_ISAS = NATIVE_WIDE_ISAS | {Isa.AVX2, Isa.AVX_VNNI, Isa.AVX512}
"""Where it is worth trying: with the kernels of AVX2 as well. On other processors it has none of its own."""

TEACHER = Recipe(engine=EngineName.ONNXRUNTIME, precision=Precision.FP32)
"""The fp32 graph that the others are judged by, and the fall-back."""


def is_tuned(recipe: Recipe) -> bool:
    """False for int8 whose rounding errors nothing makes good: where it is no faster, another one is served."""
    return recipe.precision not in {Precision.INT8_DYNAMIC, Precision.INT8_STATIC} or COMPENSATED in recipe.options


def weight_bits(recipe: Recipe) -> int:
    """Bits of a quantised weight."""
    return 6 if SIX_BITS in recipe.options else 8


@dataclass(frozen=True)
class Skipped:
    """A recipe that is not tried."""

    recipe: Recipe
    reason: str
    """One sentence, such as `this processor has no native bf16: it would be emulated`."""


@dataclass(frozen=True)
class Candidates:
    """What to try, the most promising first, and what not."""

    recipes: tuple[Recipe, ...]
    skipped: tuple[Skipped, ...] = ()


def candidate_recipes(isa: Isa, engines: Collection[EngineName], precisions: Collection[Precision]) -> Candidates:
    """The recipes for this instruction set within the endpoint's `engines` and `precisions`.

    The teacher is always the first recipe, whatever is allowed: the others are judged by it.
    """
    tried: list[Recipe] = [TEACHER]
    skipped: list[Skipped] = []
    for recipe in _by_promise(isa):
        reason = _why_not(recipe, isa, engines, precisions)
        if reason is None:
            tried.append(recipe)
        else:
            skipped.append(Skipped(recipe, reason))
    return Candidates(tuple(tried), tuple(skipped))


def _by_promise(isa: Isa) -> Iterator[Recipe]:
    """All recipes besides the teacher. With VNNI or AMX our own engine's int8 leads, then OpenVINO's; without, ONNX
    Runtime's does."""
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
    yield _recipe(EngineName.OPENVINO, Precision.INT8_STATIC, NNCF, SMOOTH, *tuned[3:])
    yield _recipe(EngineName.OPENVINO, Precision.FP32)
    if not isa.has_int8_dot:
        # Less accurate than the tuned ones, and made in a second where those take twenty: for budgets that are short.
        yield _recipe(EngineName.ONNXRUNTIME, Precision.INT8_DYNAMIC, PER_CHANNEL, REDUCED_RANGE)
    # What a user gets without asking for more: the yardstick of the report, hardly ever within the budget.
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
