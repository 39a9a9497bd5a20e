"""From an exported graph to a candidate: one module per engine, chosen by the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import OptimizationError
from penstock.manifest import GraphIO
from penstock.recipe import EngineName, Recipe
from penstock_optimizer.quantise.built import Built
from penstock_optimizer.search.recipes import OPTIONS
from penstock_runtime.rows import Row

__all__ = ["Built", "build"]


def build(
    recipe: Recipe, graph: Path, io: GraphIO, calibration: Sequence[Row], out: Path, *, threads: int = 1
) -> Built:
    """Make a recipe's graph in the folder `out` (created) on this many threads. Deterministic.

    `graph` is the fused fp32 graph for ONNX Runtime and the native engine, the plain one for OpenVINO. `calibration`
    are rows of texts that the guard does not judge with; recipes that need none ignore them.
    OptimizationError if a recipe cannot be made; other errors of the libraries are not caught.
    """
    unknown = set(recipe.options) - OPTIONS.get((recipe.engine, recipe.precision), frozenset())
    if unknown:
        raise OptimizationError(
            f"{recipe.engine.value} {recipe.precision.value} has no option {', '.join(sorted(unknown))}",
            remedy="penstock_optimizer.search.recipes.OPTIONS lists them",
        )
    match recipe.engine:
        case EngineName.ONNXRUNTIME:
            from penstock_optimizer.quantise.onnxruntime import build as build_onnxruntime

            return build_onnxruntime(recipe, graph, io, calibration, out, threads=threads)
        case EngineName.OPENVINO:
            from penstock_optimizer.quantise.openvino import build as build_openvino

            return build_openvino(recipe, graph, io, calibration, out, threads=threads)
        case EngineName.NATIVE:
            from penstock_optimizer.quantise.native import build as build_native

            return build_native(recipe, graph, io, calibration, out, threads=threads)
