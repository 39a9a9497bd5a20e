"""Loads a graph into the engine that its recipe names, and sizes the pool of cache blocks of text generation.

Each engine's library is imported only when it is needed.
"""

from __future__ import annotations

import math
from pathlib import Path

from penstock.errors import HostError
from penstock.manifest import DecoderFacts, GraphIO
from penstock.recipe import EngineName, Recipe
from penstock_runtime.engines.base import Engine, StepEngine, Threads

LOADING_FACTOR = 2.2
"""Peak memory of loading per byte of the graph's files, which are mapped: file and packed weights."""
WORKING_BYTES = 256 * 2**20
"""Libraries, Python, logits and the sums of a step."""
POOL_SHARE = 0.75
"""Of the memory that remains, for the pool: the rest is for requests, and for what libraries keep."""
MOST_POOL_BYTES = 4 * 2**30
"""The pool is not made larger than this, but for one sequence of the longest context."""


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


def load_step_engine(graph: Path, facts: DecoderFacts, recipe: Recipe, threads: int, *, blocks: int) -> StepEngine:
    """Load a graph file into the engine of its recipe, with a pool of `blocks` cache blocks.

    ArtefactError when it does not load, MemoryError when the memory does not suffice.
    """
    if recipe.engine is EngineName.NATIVE:
        from penstock_runtime.engines.native import decoder_engine

        return decoder_engine.load(graph, facts, threads, blocks=blocks)
    from penstock_runtime.engines import openvino_decoder

    options = openvino_decoder.EngineOptions.of(recipe, threads)
    return openvino_decoder.load(graph, facts, options, blocks=blocks)


def block_bytes(facts: DecoderFacts, recipe: Recipe) -> int:
    """Bytes of a block of the cache, in all layers."""
    if recipe.engine is EngineName.NATIVE:
        from penstock_runtime.engines.native import decoder_engine

        return decoder_engine.block_bytes(facts)
    from penstock_runtime.engines import openvino_decoder

    return openvino_decoder.block_bytes(facts, openvino_decoder.EngineOptions.of(recipe, 1))


def pool_blocks(
    facts: DecoderFacts,
    *,
    block_size: int,
    block_bytes: int,
    weights_bytes: int,
    memory: int | None,
    cache_bytes: int | None = None,
) -> int:
    """Cache blocks for a model with a graph of `weights_bytes`. `cache_bytes`: the setting, if there is one. HostError
    when there is no room for a block."""
    longest = math.ceil(facts.context / block_size)
    most = max(MOST_POOL_BYTES // block_bytes, longest) if cache_bytes is None else cache_bytes // block_bytes
    if most < 1:
        raise HostError(
            f"{cache_bytes} bytes do not suffice for a block of the cache, which takes {block_bytes}",
            remedy="Raise --generation-cache-bytes (PENSTOCK_GENERATION_CACHE_BYTES), or leave it out",
        )
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
