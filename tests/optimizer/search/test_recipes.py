"""The candidates of each instruction set."""

from __future__ import annotations

import re

import pytest

from penstock.hardware import Isa
from penstock.recipe import REDUCED_RANGE, SMOOTH, EngineName, Precision
from penstock_optimizer.search.recipes import OPTIONS, REFERENCE, candidate_recipes

ALL = (tuple(EngineName), tuple(Precision))


def names(isa: Isa, engines: tuple[EngineName, ...] = ALL[0], precisions: tuple[Precision, ...] = ALL[1]) -> list[str]:
    return [recipe.name for recipe in candidate_recipes(isa, engines, precisions).recipes]


@pytest.mark.parametrize("isa", Isa)
def test_the_reference_comes_first_and_nothing_comes_twice(isa: Isa) -> None:
    found = candidate_recipes(isa, *ALL)

    assert found.recipes[0] == REFERENCE
    everything = [*found.recipes, *(skipped.recipe for skipped in found.skipped)]
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("isa", Isa)
def test_recipes_of_one_processor_have_different_short_names(isa: Isa) -> None:
    found = candidate_recipes(isa, *ALL)

    short = [recipe.name for recipe in (*found.recipes, *(skipped.recipe for skipped in found.skipped))]
    assert len(set(short)) == len(short)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+){1,4}", name) for name in short)


@pytest.mark.parametrize("isa", Isa)
def test_every_option_is_one_that_its_engine_knows(isa: Isa) -> None:
    found = candidate_recipes(isa, *ALL)

    for recipe in [*found.recipes, *(skipped.recipe for skipped in found.skipped)]:
        assert set(recipe.options) <= OPTIONS.get((recipe.engine, recipe.precision), frozenset())
        assert list(recipe.options) == sorted(recipe.options)


@pytest.mark.parametrize("isa", Isa)
def test_int8_is_limited_where_sums_could_saturate_and_only_there(isa: Isa) -> None:
    tuned = [recipe for recipe in candidate_recipes(isa, *ALL).recipes if SMOOTH in recipe.options]

    assert tuned
    for recipe in tuned:
        saturates = not isa.has_int8_dot and recipe.engine is not EngineName.NATIVE  # whose sums are exact anywhere
        assert (REDUCED_RANGE in recipe.options) is saturates


@pytest.mark.parametrize(
    ("isa", "second"),
    [
        (Isa.AVX2, "onnxruntime-int8"),
        (Isa.AVX512, "onnxruntime-int8"),
        (Isa.AVX512_VNNI, "native-int8"),
        (Isa.AVX512_BF16, "native-int8"),
        (Isa.AMX, "native-int8"),
        (Isa.NEON, "onnxruntime-int8"),
    ],
)
def test_the_most_promising_recipe_comes_after_the_reference(isa: Isa, second: str) -> None:
    assert names(isa)[1] == second


@pytest.mark.parametrize("isa", [Isa.NEON, Isa.NEON_DOT, Isa.NEON_I8MM, Isa.OTHER])
def test_the_native_engine_is_tried_only_on_processors_with_its_kernels(isa: Isa) -> None:
    found = candidate_recipes(isa, *ALL)

    (reason,) = {skipped.reason for skipped in found.skipped if skipped.recipe.engine is EngineName.NATIVE}
    assert isa.value in reason
    assert "AVX2" in reason


@pytest.mark.parametrize("isa", [Isa.AVX2, Isa.AVX_VNNI, Isa.AVX512])
def test_the_native_engine_is_tried_with_8_bit_weights_where_it_has_no_kernels_for_fewer_bits(isa: Isa) -> None:
    found = candidate_recipes(isa, *ALL)

    tried = [recipe.name for recipe in found.recipes if recipe.engine is EngineName.NATIVE]
    skipped = [one for one in found.skipped if one.recipe.engine is EngineName.NATIVE]
    assert tried == ["native-int8"]
    assert [one.recipe.options for one in skipped] == [("6-bit-weights", "compensated", "per-channel", "smooth")]
    assert "8 bits" in skipped[0].reason


def test_bf16_is_tried_only_on_processors_that_have_it() -> None:
    assert "openvino-bf16" in names(Isa.AMX)
    found = candidate_recipes(Isa.AVX512_VNNI, *ALL)
    reasons = {skipped.recipe.name: skipped.reason for skipped in found.skipped}
    assert "no native bf16" in reasons["openvino-bf16"]
    assert "no native bf16" in reasons["openvino-int8-bf16"]


@pytest.mark.parametrize("isa", [Isa.NEON, Isa.AVX2])
def test_openvino_is_not_quantised_where_that_is_slower(isa: Isa) -> None:
    assert [name for name in names(isa) if name.startswith("openvino")] == ["openvino-fp32"]


def test_recipes_that_the_endpoint_excludes_are_skipped_with_the_name_of_the_field() -> None:
    found = candidate_recipes(Isa.AMX, (EngineName.ONNXRUNTIME,), (Precision.INT8_STATIC,))

    assert [recipe.name for recipe in found.recipes] == ["onnxruntime-fp32", "onnxruntime-int8"]
    reasons = {skipped.recipe.name: skipped.reason for skipped in found.skipped}
    assert reasons["openvino-fp32"] == "optimization.engines leaves openvino out"
    assert reasons["onnxruntime-int8-dynamic-plain"] == "optimization.precisions leaves int8-dynamic out"
