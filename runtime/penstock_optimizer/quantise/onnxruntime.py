"""Makes what ONNX Runtime serves: the fused fp32 graph, and its int8 versions.

The graph is fused before it is quantised (the exporter does that), so that an `Attention` becomes a `QAttention`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import onnx

from penstock.errors import OptimizationError
from penstock.manifest import GraphIO
from penstock.recipe import Precision, Recipe
from penstock_optimizer.quantise.built import Built, copy_graph
from penstock_optimizer.quantise.calibrated import quantise_graph
from penstock_optimizer.quantise.integer import IntegerWriter
from penstock_optimizer.quantise.linear import MICROSOFT
from penstock_runtime.rows import Row


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
    quantised, notes = quantise_graph(recipe, graph, io, calibration, path, writer=IntegerWriter, threads=threads)
    return Built(path, io, _fused(quantised), notes)


def _fused(model: onnx.ModelProto) -> dict[str, int]:
    """Counts of the operators that are ONNX Runtime's own, and of the standard ones that quantise."""
    counts = Counter(
        node.op_type
        for node in model.graph.node
        if node.domain == MICROSOFT or node.op_type in {"QuantizeLinear", "DynamicQuantizeLinear", "LayerNormalization"}
    )
    return dict(sorted(counts.items()))
