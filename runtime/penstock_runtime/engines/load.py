"""Loads a graph into the engine that its recipe names. Each engine's library is imported only when it is needed."""

from __future__ import annotations

from pathlib import Path

from penstock.manifest import GraphIO
from penstock.recipe import EngineName, Recipe
from penstock_runtime.engines.base import Engine, Threads


def load_engine(
    path: Path,
    io: GraphIO,
    recipe: Recipe,
    threads: Threads,
    *,
    wide: bool = False,
    max_tokens: int | None = None,
) -> Engine:
    """Load the graph at `path` (`.onnx`, `.xml` with its `.bin`, `.native`, or `neuron.json`) into the recipe's engine.

    `wide` prepares `run_wide` to use streams x per_stream threads for one batch; without it `run_wide` is `run`.
    `max_tokens`: no row is longer, and the model's position table may end there (None: it does not).
    ArtefactError when it does not load, or is not the graph that `io` describes.
    """
    match recipe.engine:
        case EngineName.ONNXRUNTIME:
            from penstock_runtime.engines import onnxruntime

            return onnxruntime.load(path, io, recipe, threads, wide=wide)
        case EngineName.OPENVINO:
            from penstock_runtime.engines import openvino

            return openvino.load(path, io, recipe, threads, wide=wide, max_tokens=max_tokens)
        case EngineName.NATIVE:
            from penstock_runtime.engines import native

            return native.load(path, io, recipe, threads, wide=wide)
        case EngineName.NEURON:
            from penstock_runtime.engines import neuron

            return neuron.load(path, io, recipe, threads)
