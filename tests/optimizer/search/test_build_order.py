"""The order to build recipes in: the most expected gain per second first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hardware import Isa
from penstock.recipe import BF16_REST, EngineName, Precision, Recipe
from penstock_optimizer.search.recipes import by_gain, candidate_recipes, expectation

ALL = (tuple(EngineName), tuple(Precision))
RECIPES = {isa: candidate_recipes(isa, *ALL).recipes[1:] for isa in Isa}


def names(isa: Isa) -> list[str]:
    return [recipe.name for recipe in by_gain(RECIPES[isa], isa)]


@pytest.mark.parametrize(
    ("isa", "first"),
    [
        (
            Isa.AMX,
            [
                "openvino-bf16",
                "native-int8",
                "openvino-int8-bf16",
                "openvino-int8",
                "onnxruntime-int8",
                "onnxruntime-int8-dynamic",
                "native-int6",
            ],
        ),
        (Isa.AVX512_VNNI, ["native-int8", "openvino-int8", "onnxruntime-int8"]),
        (Isa.AVX2, ["onnxruntime-int8-dynamic-per-channel", "native-int8", "onnxruntime-int8"]),
    ],
)
def test_a_recipe_built_in_a_second_comes_before_one_that_takes_twenty(isa: Isa, first: list[str]) -> None:
    assert names(isa)[: len(first)] == first


@pytest.mark.parametrize("isa", Isa)
def test_the_plain_int8_for_comparison_comes_last(isa: Isa) -> None:
    assert names(isa)[-1] == "onnxruntime-int8-dynamic-plain"


@pytest.mark.parametrize("isa", [isa for isa in Isa if isa.has_bf16])
def test_a_recipe_whose_graph_exists_comes_next(isa: Isa) -> None:
    order = by_gain(RECIPES[isa], isa)
    shared = [index for index, recipe in enumerate(order) if recipe.as_built != recipe or BF16_REST in recipe.options]

    assert shared
    for index in shared:
        assert order[index].as_built in {order[index - 1], order[index + 1]}


@given(st.sampled_from(Isa), st.data())
def test_every_recipe_comes_once(isa: Isa, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.sampled_from(RECIPES[isa]), unique=True))

    assert sorted(by_gain(some, isa), key=str) == sorted(some, key=str)


@pytest.mark.parametrize("isa", Isa)
def test_expectations_are_within_their_ranges(isa: Isa) -> None:
    for recipe in RECIPES[isa]:
        found = expectation(recipe, isa)
        assert found.build_seconds > 0
        assert 0 <= found.accepted <= 1
        assert 0 <= found.gain < 5


def test_recipes_of_one_graph_agree_in_what_it_is_built_from() -> None:
    plain = Recipe(engine=EngineName.OPENVINO, precision=Precision.INT8_STATIC, options=("per-channel", "smooth"))

    assert plain.with_bf16_rest.options == (BF16_REST, "per-channel", "smooth")
    assert plain.with_bf16_rest.as_built == plain.as_built == plain
    assert plain.with_bf16_rest.with_bf16_rest == plain.with_bf16_rest
