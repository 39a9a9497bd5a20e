"""Makes what ONNX Runtime serves: the fused fp32 graph, and its int8 versions.

The graph is fused before it is quantised (the exporter does that), so that an `Attention` becomes a `QAttention`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from penstock.errors import OptimizationError
from penstock.manifest import GraphIO
from penstock.recipe import Precision, Recipe
from penstock_optimizer import recipes
from penstock_optimizer.quantise.built import Built, copy_graph
from penstock_optimizer.quantise.linear import MICROSOFT, LinearGraph, Range, Style
from penstock_optimizer.quantise.observe import difference, observe, outputs, save
from penstock_runtime.rows import Row

ALPHAS = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
"""Tried for `smooth`, the best by the graph's own outputs over some calibration rows is taken. Outside of these no
model seen was better; MiniLM's best is 0.7 (0.5: min cosine 0.95, 0.7: 0.99, 0.95: 0.98)."""
PROBES = 32
"""Rows that an alpha is judged with."""
PROBE_TOKENS = 128
"""Longer rows are left out of the probes: they cost much and tell little more."""


def build(
    recipe: Recipe, graph: Path, io: GraphIO, calibration: Sequence[Row], out: Path, *, threads: int = 1
) -> Built:
    """Write `out/model.onnx` for a recipe from a fused fp32 graph. OptimizationError when nothing could be quantised
    or the recipe is none of ours."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "model.onnx"
    if recipe.precision is Precision.FP32:
        copy_graph(graph, path)
        return Built(path, io, _fused(onnx.load(str(path), load_external_data=False)))
    if recipe.precision not in {Precision.INT8_DYNAMIC, Precision.INT8_STATIC}:
        raise OptimizationError(f"ONNX Runtime has no {recipe.precision.value} recipe", remedy="Use OpenVINO for it")
    style = Style(
        static=recipe.precision is Precision.INT8_STATIC,
        per_channel=recipes.PER_CHANNEL in recipe.options,
        reduced_range=recipes.REDUCED_RANGE in recipe.options,
    )
    smooth = recipes.SMOOTH in recipe.options
    linear = LinearGraph(onnx.load(str(graph)))
    if not linear.groups:
        raise OptimizationError(
            f"{graph.name} has no product with a constant weight that could be quantised",
            remedy="Allow fp32 in spec.optimization.precisions, or give the model as safetensors",
        )
    ranges: Mapping[str, Range] = {}
    if style.static or smooth:
        if not calibration:
            raise OptimizationError(
                f"{recipe.name} wants calibration texts", remedy="Give some, or leave the recipe out"
            )
        ranges = observe(linear.model, linear.values, io.inputs, calibration, threads, out / "observed.onnx")
    if smooth:
        style = _smoothest(style, graph, io, ranges, calibration, path, threads)
    linear.quantise(style, ranges)
    save(linear.model, path)
    return Built(path, io, _fused(linear.model), notes=() if style.smoothing is None else (f"alpha {style.smoothing}",))


def _smoothest(
    style: Style,
    graph: Path,
    io: GraphIO,
    ranges: Mapping[str, Range],
    calibration: Sequence[Row],
    path: Path,
    threads: int,
) -> Style:
    """The style with the alpha whose outputs are nearest to fp32. `path` is overwritten."""
    probes = [row for row in calibration if row.length <= PROBE_TOKENS][:PROBES] or list(calibration[:PROBES])
    teacher = outputs(graph, io.inputs, probes, threads)
    best = (float("inf"), style)
    for alpha in ALPHAS:
        trial = Style(style.static, style.per_channel, style.reduced_range, alpha)
        linear = LinearGraph(onnx.load(str(graph)))
        linear.quantise(trial, ranges)
        save(linear.model, path)
        best = min(
            best, (difference(teacher, outputs(path, io.inputs, probes, threads)), trial), key=lambda pair: pair[0]
        )
    return best[1]


def _fused(model: onnx.ModelProto) -> dict[str, int]:
    """Counts of the operators that are ONNX Runtime's own, and of the standard ones that quantise."""
    counts = Counter(
        node.op_type
        for node in model.graph.node
        if node.domain == MICROSOFT or node.op_type in {"QuantizeLinear", "DynamicQuantizeLinear", "LayerNormalization"}
    )
    return dict(sorted(counts.items()))
