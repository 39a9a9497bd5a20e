"""Makes what the native engine serves: `model.native`, from the fused fp32 graph that our own builder writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import OptimizationError
from penstock.manifest import GraphIO
from penstock.recipe import Precision, Recipe
from penstock_optimizer.quantise.built import Built
from penstock_optimizer.quantise.calibrated import quantise_graph
from penstock_optimizer.quantise.native_steps import native_graph
from penstock_optimizer.quantise.observe import weights_file
from penstock_optimizer.quantise.rowwise import RowwiseWriter
from penstock_runtime.engines.native import library_path
from penstock_runtime.engines.native.graph_file import SUFFIX, write
from penstock_runtime.rows import Row


def build(
    recipe: Recipe, graph: Path, io: GraphIO, calibration: Sequence[Row], out: Path, *, threads: int = 1
) -> Built:
    """Write `out/model.native` for a recipe from a fused fp32 graph. OptimizationError when the engine is not
    compiled, or the graph has what it does not know."""
    if recipe.precision is not Precision.INT8_ROWWISE:
        raise OptimizationError(f"the native engine has no {recipe.precision.value}", remedy="Use ONNX Runtime for it")
    if not library_path().is_file():  # before the calibration, which takes long
        raise OptimizationError(
            f"the native engine was not compiled: {library_path()} is missing",
            remedy="Install a C compiler (Debian: gcc and libc6-dev) and then Penstock again",
        )
    out.mkdir(parents=True, exist_ok=True)
    path, written = out / f"model{SUFFIX}", out / "quantised.onnx"
    try:
        # Whether the engine knows the graph, before the calibration, which takes long.
        bare = recipe.model_copy(update={"options": ()})
        native_graph(quantise_graph(bare, graph, io, (), written, writer=RowwiseWriter, threads=threads)[0])
        model, notes = quantise_graph(recipe, graph, io, calibration, written, writer=RowwiseWriter, threads=threads)
        made = native_graph(model)
    finally:
        for file in (written, weights_file(written)):
            file.unlink(missing_ok=True)
    write(path, made)
    return Built(path, io, dict(sorted(Counter(step.operator for step in made.steps).items())), notes)
