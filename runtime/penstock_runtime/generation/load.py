"""Loads a graph of text generation into its engine, and sizes the pool of cache blocks for the memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import HostError
from penstock.recipe import EngineName, Recipe
from penstock_runtime.engines.base import StepEngine

if TYPE_CHECKING:
    from penstock.manifest import DecoderFacts

LOADING_FACTOR = 2.2
"""Peak memory of loading per byte of the graph's files, which are mapped: file and packed weights."""
WORKING_BYTES = 256 * 2**20
"""Libraries, Python, logits and the sums of a step."""
POOL_SHARE = 0.75
"""Of the memory that remains, for the pool: the rest is for requests, and for what libraries keep."""
MOST_POOL_BYTES = 4 * 2**30
"""The pool is not made larger than this, but for one sequence of the longest context."""


def load_graph(graph: Path, facts: DecoderFacts, recipe: Recipe, threads: int, *, blocks: int) -> StepEngine:
    """Load a graph file into the engine of its recipe, with a pool of `blocks` cache blocks.

    ArtefactError when it does not load, MemoryError when the memory does not suffice.
    """
    if recipe.engine is EngineName.NATIVE:
        from penstock_runtime.generation import native_engine

        return native_engine.load(graph, facts, threads, blocks=blocks)
    # The library takes a second to import, and servers of other tasks do not need it.
    from penstock_runtime.generation import openvino_engine

    options = openvino_engine.EngineOptions.of(recipe, threads)
    return openvino_engine.load(graph, facts, options, blocks=blocks)


def block_bytes(facts: DecoderFacts, recipe: Recipe) -> int:
    """Bytes of a block of the cache, in all layers."""
    if recipe.engine is EngineName.NATIVE:
        from penstock_runtime.generation import native_engine

        return native_engine.block_bytes(facts)
    from penstock_runtime.generation import openvino_engine

    return openvino_engine.block_bytes(facts, openvino_engine.EngineOptions.of(recipe, 1))


def pool_blocks(
    facts: DecoderFacts, *, block_size: int, block_bytes: int, weights_bytes: int, memory: int | None
) -> int:
    """Cache blocks for a model with a graph of `weights_bytes`. HostError when there is no room for one."""
    longest = math.ceil(facts.context / block_size)
    most = max(MOST_POOL_BYTES // block_bytes, longest)
    if memory is None:
        return most
    left = memory - int(weights_bytes * LOADING_FACTOR) - WORKING_BYTES
    fitting = int(left * POOL_SHARE) // block_bytes
    if fitting < 1:
        needed = int(weights_bytes * LOADING_FACTOR) + WORKING_BYTES + math.ceil(block_bytes / POOL_SHARE)
        raise HostError(
            f"{memory / 2**20:.0f} MiB of memory do not suffice for the weights and the cache of text generation, "
            f"which need {needed / 2**20:.0f} MiB at least",
            remedy="Give the process more memory, or take a smaller model",
        )
    return min(most, fitting)
