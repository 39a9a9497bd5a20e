"""Small native graphs around one step, whose source can be any numbers: a table of positions holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock_runtime.engines.base import EngineFacts, Threads
from penstock_runtime.engines.native import NativeEngine, library_path
from penstock_runtime.engines.native.graph_file import GraphOutput, GraphStep, NativeGraph
from penstock_runtime.engines.native.library import Kernels, best_kernels
from penstock_runtime.rows import Batch, Float

needs_library = pytest.mark.skipif(not library_path().is_file(), reason="the native engine was not compiled")
AVAILABLE = [kernels for kernels in Kernels if library_path().is_file() and kernels <= best_kernels()]
"""Every instruction set that this processor has."""


def source(tokens: Float) -> tuple[GraphStep, dict[str, Any]]:
    """A step that fills buffer 0 with `tokens` [tokens, width] for each row, and its tensors."""
    count, width = tokens.shape
    step = GraphStep(
        operator="embed", target=0, inputs=1, outputs=width, positions=count,
        tensors={"weights": "words", "scales": "scale", "position_table": "rows"},
    )  # fmt: skip
    words = {"words": np.zeros((1, width), np.int16), "scale": np.ones(1, np.float32)}
    return step, {**words, "rows": tokens.astype(np.float32)}


def engine(
    steps: list[GraphStep], tensors: dict[str, Any], *, kernels: Kernels, threads: int = 1, per_row: bool = False
) -> NativeEngine:
    """The engine of these steps, which gives the last one's target."""
    last = steps[-1]
    output = GraphOutput(name="y", buffer=last.target, width=last.outputs, per_row=per_row)
    facts = EngineFacts("native", "test", Threads(streams=1, per_stream=threads), "i8")
    return NativeEngine(NativeGraph(tuple(steps), output, tensors), facts, helpers=True, kernels=kernels)


def batch(rows: int, tokens: int, real: int | None = None) -> Batch:
    """Rows of the only word, the first `real` tokens of each of them not padding."""
    mask = np.zeros((rows, tokens), np.int64)
    mask[:, : tokens if real is None else real] = 1
    zeros = np.zeros((rows, tokens), np.int64)
    return Batch(zeros, mask, zeros)


def run(
    steps: list[GraphStep], tensors: dict[str, Any], tokens: Float, *, kernels: Kernels, threads: int = 1,
    real: int | None = None, per_row: bool = False,
) -> Float:  # fmt: skip
    """The steps' result for one row of `tokens` [tokens, width]."""
    first, first_tensors = source(tokens)
    made = engine(
        [first, *steps], {**first_tensors, **tensors}, kernels=kernels, threads=threads, per_row=per_row
    )  # fmt: skip
    try:
        return np.asarray(made.run(batch(1, len(tokens), real))["y"][0])
    finally:
        made.close()
