"""From an exported graph to a candidate: what each engine serves, by the recipe.

ONNX Runtime and the native engine are served graphs that are made from the fused fp32 graph: it is fused before it is
quantised (the exporter does that), so that an `Attention` becomes a `QAttention`. OpenVINO's are made in `openvino`.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from penstock.errors import OptimizationError
from penstock.manifest import GraphIO
from penstock.recipe import EngineName, Precision, Recipe
from penstock_optimizer.export.build.graph import MICROSOFT
from penstock_optimizer.quantise.linear import weights_file
from penstock_optimizer.quantise.native.steps import native_graph
from penstock_optimizer.quantise.quantiser import IntegerWriter, RowwiseWriter, quantise_graph
from penstock_optimizer.search.recipes import OPTIONS
from penstock_runtime.engines.native import library_path
from penstock_runtime.engines.native.graph_file import SUFFIX, write
from penstock_runtime.rows import Row


@dataclass(frozen=True)
class Built:
    """A candidate on disk."""

    path: Path
    """`model.onnx`, `model.xml` with `model.bin` next to it, or `model.native`."""
    io: GraphIO
    fused_nodes: dict[str, int] = field(default_factory=dict)
    """Fused and quantised operators by type, as evidence."""
    notes: tuple[str, ...] = ()
    """Decisions of the calibration, such as `alpha 0.7`."""

    @property
    def size_bytes(self) -> int:
        """All files of the candidate."""
        return sum(file.stat().st_size for file in self.path.parent.glob(f"{self.path.stem}.*"))


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
    out.mkdir(parents=True, exist_ok=True)
    match recipe.engine:
        case EngineName.ONNXRUNTIME:
            return _build_onnxruntime(recipe, graph, io, calibration, out, threads=threads)
        case EngineName.OPENVINO:
            from penstock_optimizer.quantise.openvino import make_model

            path = out / "model.xml"
            return Built(path, io, *make_model(recipe, graph, io, calibration, path, threads=threads))
        case EngineName.NATIVE:
            return _build_native(recipe, graph, io, calibration, out, threads=threads)
        case EngineName.NEURON:
            raise OptimizationError(
                "neuron models are compiled from the model's code, not from its graph",
                remedy="penstock_optimizer.targets.neuron compiles them",
            )


def _build_onnxruntime(
    recipe: Recipe, graph: Path, io: GraphIO, calibration: Sequence[Row], out: Path, *, threads: int
) -> Built:
    """Write `out/model.onnx`."""
    path = out / "model.onnx"
    if recipe.precision is Precision.FP32:
        copy_graph(graph, path)
        return Built(path, io, _fused(onnx.load(str(path), load_external_data=False)))
    if recipe.precision not in {Precision.INT8_DYNAMIC, Precision.INT8_STATIC}:
        raise OptimizationError(f"ONNX Runtime has no {recipe.precision.value} recipe", remedy="Use OpenVINO for it")
    quantised, notes = quantise_graph(recipe, graph, io, calibration, path, writer=IntegerWriter, threads=threads)
    return Built(path, io, _fused(quantised), notes)


def copy_graph(graph: Path, path: Path) -> None:
    """Copy `graph` to `path`, and its weights files under their own names (the graph refers to them)."""
    shutil.copyfile(graph, path)
    data = weights_file(graph)
    if data.exists():
        shutil.copyfile(data, path.with_name(data.name))


def _fused(model: onnx.ModelProto) -> dict[str, int]:
    """Counts of the operators that are ONNX Runtime's own, and of the standard ones that quantise."""
    counts = Counter(
        node.op_type
        for node in model.graph.node
        if node.domain == MICROSOFT or node.op_type in {"QuantizeLinear", "DynamicQuantizeLinear", "LayerNormalization"}
    )
    return dict(sorted(counts.items()))


def _build_native(
    recipe: Recipe, graph: Path, io: GraphIO, calibration: Sequence[Row], out: Path, *, threads: int
) -> Built:
    """Write `out/model.native`. OptimizationError when the engine is not compiled, or does not know
    the graph."""
    if recipe.precision is not Precision.INT8_ROWWISE:
        raise OptimizationError(f"the native engine has no {recipe.precision.value}", remedy="Use ONNX Runtime for it")
    if not library_path().is_file():  # before the calibration, which takes long
        raise OptimizationError(
            f"the native engine was not compiled: {library_path()} is missing",
            remedy="Install a C compiler (Debian: gcc and libc6-dev) and then Penstock again",
        )
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
