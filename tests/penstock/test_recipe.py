"""Short names of recipes."""

from __future__ import annotations

import pytest

from penstock.recipe import EngineName, Plan, Precision, Recipe, ShortRoute

TUNED = ("compensated", "per-channel", "smooth")
TUNED_6_BIT = ("6-bit-weights", *TUNED)
LIMITED = ("compensated", "per-channel", "reduced-range", "smooth")
ONNXRUNTIME, OPENVINO, NATIVE = EngineName.ONNXRUNTIME, EngineName.OPENVINO, EngineName.NATIVE
STATIC, DYNAMIC, ROWWISE = Precision.INT8_STATIC, Precision.INT8_DYNAMIC, Precision.INT8_ROWWISE


@pytest.mark.parametrize(
    ("engine", "precision", "options", "name"),
    [
        (ONNXRUNTIME, Precision.FP32, (), "onnxruntime-fp32"),
        (OPENVINO, Precision.BF16, (), "openvino-bf16"),
        (NATIVE, ROWWISE, TUNED, "native-int8"),
        (NATIVE, ROWWISE, TUNED_6_BIT, "native-int6"),
        (OPENVINO, STATIC, TUNED, "openvino-int8"),
        (OPENVINO, STATIC, LIMITED, "openvino-int8"),
        (OPENVINO, STATIC, ("bf16-rest", *TUNED), "openvino-int8-bf16"),
        (OPENVINO, STATIC, ("per-channel", "smooth"), "openvino-int8-per-channel-smooth"),
        (OPENVINO, STATIC, (), "openvino-int8-plain"),
        (OPENVINO, STATIC, ("bf16-rest",), "openvino-int8-plain-bf16"),
        (OPENVINO, ROWWISE, ("group-32",), "openvino-int8-rowwise"),
        (ONNXRUNTIME, STATIC, TUNED, "onnxruntime-int8"),
        (ONNXRUNTIME, DYNAMIC, TUNED, "onnxruntime-int8-dynamic"),
        (ONNXRUNTIME, DYNAMIC, (), "onnxruntime-int8-dynamic-plain"),
        (ONNXRUNTIME, DYNAMIC, ("per-channel", "reduced-range"), "onnxruntime-int8-dynamic-per-channel"),
        (ONNXRUNTIME, ROWWISE, (), "onnxruntime-int8-rowwise"),
    ],
)
def test_a_name_has_engine_and_precision_and_the_unusual_options(
    engine: EngineName, precision: Precision, options: tuple[str, ...], name: str
) -> None:
    assert Recipe(engine=engine, precision=precision, options=options).name == name


def test_the_full_name_and_the_folder_name_have_every_option() -> None:
    recipe = Recipe(engine=OPENVINO, precision=STATIC, options=TUNED)

    assert recipe.full_name == "openvino int8-static compensated per-channel smooth"
    assert recipe.slug == "openvino-int8-static-compensated-per-channel-smooth"


def test_a_summary_has_the_short_names_and_the_threads() -> None:
    short = Recipe(engine=NATIVE, precision=ROWWISE, options=TUNED)
    plan = Plan(recipe=Recipe(engine=OPENVINO, precision=STATIC, options=TUNED), streams=2, threads_per_stream=1)

    assert plan.summary == "openvino-int8, 2x1 threads"
    routed = plan.model_copy(update={"short": ShortRoute(longest_tokens=16, recipe=short)})
    assert routed.summary == "openvino-int8, 2x1 threads; up to 16 tokens native-int8"
