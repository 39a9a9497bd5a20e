"""Makes what OpenVINO serves: the fp32 graph as IR, bf16 by the engine's own rounding, and NNCF's int8 versions.

NNCF is told to be quiet: no progress bars (ours are shown), no telemetry (nothing here goes over the network).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openvino as ov

from penstock.errors import OptimizationError
from penstock.manifest import GraphIO
from penstock.recipe import Precision, Recipe
from penstock_optimizer import recipes
from penstock_optimizer.quantise.built import Built
from penstock_optimizer.quantise.observe import feed
from penstock_runtime.rows import Row

SMOOTHING = 0.7
"""SmoothQuant's alpha. NNCF's own default is 0.95."""
GROUP_OPTION = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
WHOLE_ROW = 2**32
"""A group as wide as any layer: one scale for each token."""


def build(
    recipe: Recipe, graph: Path, io: GraphIO, calibration: Sequence[Row], out: Path, *, threads: int = 1
) -> Built:
    """Write `out/model.xml` and `.bin` for a recipe from a plain fp32 graph. OptimizationError when nothing could be
    quantised or the recipe is none of ours."""
    out.mkdir(parents=True, exist_ok=True)
    core = ov.Core()
    core.set_property({"INFERENCE_NUM_THREADS": threads})
    model = core.read_model(str(graph))
    match recipe.precision:
        case Precision.FP32 | Precision.BF16:
            pass  # the engine is told the precision when it loads the graph
        case Precision.INT8_STATIC:
            if not calibration:
                raise OptimizationError(
                    f"{recipe.name} wants calibration texts", remedy="Give some, or leave the recipe out"
                )
            with _quiet_nncf() as nncf:
                model = _static(nncf, model, recipe, [feed(row, io.inputs) for row in calibration])
            _check_quantised(model, graph, "FakeQuantize")
        case Precision.INT8_ROWWISE:
            with _quiet_nncf() as nncf:
                symmetric = recipes.SYMMETRIC in recipe.options
                mode = nncf.CompressWeightsMode.INT8_SYM if symmetric else nncf.CompressWeightsMode.INT8_ASYM
                model = nncf.compress_weights(model, mode=mode)
            model.set_rt_info(str(WHOLE_ROW), ["runtime_options", GROUP_OPTION])
            _check_quantised(model, graph, "Constant")
        case _:
            raise OptimizationError(
                f"OpenVINO has no {recipe.precision.value} recipe", remedy="Use ONNX Runtime for it"
            )
    path = out / "model.xml"
    ov.save_model(model, str(path), compress_to_fp16=False)
    return Built(path, io, _counts(model))


def _static(nncf: Any, model: Any, recipe: Recipe, samples: list[dict[str, Any]]) -> Any:
    options = set(recipe.options)
    ignored = None
    if recipes.FP32_ATTENTION in options:
        names = _products_of_activations(model)
        ignored = nncf.IgnoredScope(names=names) if names else None
    fix = nncf.OverflowFix.ENABLE if recipes.REDUCED_RANGE in options else nncf.OverflowFix.DISABLE
    alpha = SMOOTHING if recipes.SMOOTH in options else -1
    return nncf.quantize(
        model,
        nncf.Dataset(samples),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(samples),
        ignored_scope=ignored,
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            overflow_fix=fix,
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=alpha),
        ),
    )


def _products_of_activations(model: Any) -> list[str]:
    """The names of the products within the attention: both sides are computed."""
    return [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() == "MatMul" and not any(_is_constant(node.input_value(side)) for side in (0, 1))
    ]


def _is_constant(output: Any) -> bool:
    """True for a weight, also behind conversions and transposes."""
    node = output.get_node()
    while node.get_type_name() in {"Convert", "Transpose", "Reshape"}:
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


def _check_quantised(model: Any, graph: Path, operator: str) -> None:
    wanted = "i8" if operator == "Constant" else None
    found = any(
        node.get_type_name() == operator and (wanted is None or "8" in str(node.get_element_type()))
        for node in model.get_ops()
    )
    if not found:
        raise OptimizationError(
            f"NNCF found nothing to quantise in {graph.name}",
            remedy="Allow fp32 in spec.optimization.precisions, or give the model as safetensors",
        )


def _counts(model: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for node in model.get_ops():
        kind = node.get_type_name()
        if kind in {"FakeQuantize", "MatMul", "MVN", "Gelu", "ScaledDotProductAttention"}:
            counts[kind] += 1
        elif kind == "Constant" and str(node.get_element_type()) in {"<Type: 'int8_t'>", "<Type: 'uint8_t'>"}:
            counts["int8 weights"] += 1
    return dict(sorted(counts.items()))


@contextmanager
def _quiet_nncf() -> Iterator[Any]:
    """NNCF without progress bars, log lines, warnings of its own dependencies, or telemetry."""
    os.environ.setdefault("NNCF_CI", "1")  # read once, at import: replaces the telemetry by a stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nncf
        from nncf.common.logging import track_progress
        from rich.progress import Progress

        class Unseen(Progress):
            def __init__(self, *columns: Any, **settings: Any) -> None:
                super().__init__(*columns, **{**settings, "disable": True})

        nncf.set_log_level(logging.ERROR)
        shown = track_progress.Progress, track_progress.WeightedProgress
        track_progress.Progress = track_progress.WeightedProgress = Unseen
        try:
            yield nncf
        finally:
            track_progress.Progress, track_progress.WeightedProgress = shown
