"""The engine of text generation on OpenVINO (CPU plugin): paged attention over a pool of cache blocks.

A graph file has no attention in it (`penstock_optimizer.quantise.decoder`). The plugin's paged attention is put in when
the file is loaded, since that operation cannot be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import PartialShape, Type
from openvino import _pyopenvino as binding
from openvino import opset13 as op

from penstock.errors import ArtefactError
from penstock.manifest import DecoderFacts
from penstock.recipe import BF16_REST, CACHE_U8, Precision, Recipe
from penstock_runtime.engines.base import BLOCK_SIZE
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import StepRow

ACTIVATION_GROUP = 32
"""Activations of a token that share a scale."""


@dataclass(frozen=True)
class EngineOptions:
    """How the plugin computes."""

    threads: int
    precision: str = "f32"
    """Of products and of everything between them: `f32` or `bf16`."""
    cache: str = "f32"
    """Of keys and values in the cache: `f32`, `bf16` or `u8`."""
    group: int = 0
    """Activations that share a scale where products are computed in 8 bits; 0: products in `precision`."""

    @classmethod
    def of(cls, recipe: Recipe, threads: int) -> EngineOptions:
        """The options of a recipe."""
        is_bf16 = recipe.precision is Precision.BF16 or BF16_REST in recipe.options
        precision = "bf16" if is_bf16 else "f32"
        is_rowwise = recipe.precision in {Precision.INT8_ROWWISE, Precision.INT4_ROWWISE}
        cache = "u8" if CACHE_U8 in recipe.options else precision
        return cls(threads, precision, cache, ACTIVATION_GROUP if is_rowwise else 0)


class OpenVinoStepEngine:
    """See `StepEngine`. Create it with `load`."""

    def __init__(self, request: Any, facts: DecoderFacts, caches: dict[str, Any], blocks: int) -> None:
        self._request = request
        self.vocabulary, self.context = facts.vocabulary, facts.context
        self.block_size, self.blocks = BLOCK_SIZE, blocks
        self._caches = caches
        for name, tensor in caches.items():
            request.set_tensor(name, tensor)

    def step(self, rows: Sequence[StepRow]) -> NDArray[np.float32]:
        """See `StepEngine`. InferenceFailed if the library fails."""
        lengths = np.array([len(row.tokens) for row in rows], np.int32)
        ends = np.cumsum(lengths, dtype=np.int32)
        past = np.array([row.position for row in rows], np.int32)
        counts = np.array([len(row.blocks) for row in rows], np.int32)
        wanted = [np.arange(end - row.logits, end, dtype=np.int32) for row, end in zip(rows, ends, strict=True)]
        places = [np.arange(row.position, row.position + len(row.tokens), dtype=np.int64) for row in rows]
        selected = np.concatenate(wanted)
        inputs = {
            "input_ids": np.concatenate([row.tokens for row in rows]).astype(np.int64),
            "position_ids": np.concatenate(places),
            # The plugin does not run a product of no rows: the last token's logits are computed, and left out below.
            "logit_rows": selected if len(selected) else ends[-1:] - 1,
            "past_lens": past,
            "subsequence_begins": np.concatenate([[0], ends]).astype(np.int32),
            "block_indices": np.concatenate([row.blocks for row in rows]).astype(np.int32),
            "block_indices_begins": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "max_context_len": np.array((past + lengths).max(), np.int32),
        }
        try:
            for name, array in inputs.items():
                self._request.set_tensor(name, ov.Tensor(array))
            self._request.infer(share_outputs=True)
            logits: NDArray[np.float32] = np.array(self._request.get_tensor("logits").data[: len(selected)])
        except RuntimeError as error:
            raise InferenceFailed(f"openvino: {error}", remedy="Report it with the model and the prompt") from error
        return logits

    def close(self) -> None:
        """See `StepEngine`."""
        self._request = None
        self._caches = {}


def block_bytes(facts: DecoderFacts, options: EngineOptions) -> int:
    """Bytes of a block of the cache, in all layers. The plugin keeps a scale and a zero point, 8 bytes, for each head
    of a token in 8 bits."""
    number = {"f32": 4 * facts.head_size, "bf16": 2 * facts.head_size, "u8": facts.head_size + 8}[options.cache]
    return 2 * len(facts.scales) * BLOCK_SIZE * facts.key_heads * number


def load(path: Path, facts: DecoderFacts, options: EngineOptions, *, blocks: int) -> OpenVinoStepEngine:
    """Load a graph file and make its pool of `blocks` cache blocks. ArtefactError when it does not load."""
    if not path.is_file():
        raise ArtefactError(f"{path} is missing", remedy="Run penstock optimize again")
    core = ov.Core()
    try:
        model = _with_attention(core.read_model(str(path)), facts)
        compiled = core.compile_model(model, "CPU", _properties(options))
    except RuntimeError as error:
        raise ArtefactError(
            f"{path} does not load in openvino {ov.get_version()}: {error}", remedy="Run penstock optimize again"
        ) from error
    caches = {}
    for port in compiled.inputs:
        name = port.get_any_name()
        if name.startswith(("key_cache.", "value_cache.")):
            shape = [blocks, *(axis.get_length() for axis in list(port.get_partial_shape())[1:])]
            caches[name] = ov.Tensor(port.get_element_type(), ov.Shape(shape))
    return OpenVinoStepEngine(compiled.create_infer_request(), facts, caches, blocks)


def _properties(options: EngineOptions) -> dict[str, Any]:
    return {
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": options.threads,
        # penstock_runtime.host pins the process to its cores.
        "ENABLE_CPU_PINNING": False,
        "ENABLE_HYPER_THREADING": False,
        # By default the plugin computes in bf16 if the processor has it: answers would depend on the processor.
        "INFERENCE_PRECISION_HINT": options.precision,
        "KV_CACHE_PRECISION": options.cache,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": options.group,
    }


def _with_attention(model: Any, facts: DecoderFacts) -> Any:
    """The graph with paged attention between the outputs `query.N`, `key.N`, `value.N` and the input `attention.N`."""
    parameters = {parameter.output(0).get_any_name(): parameter for parameter in model.get_parameters()}
    sources = {result.output(0).get_any_name(): result.input_value(0) for result in model.get_results()}
    shared = {
        name: _parameter(name, Type.i32, shape)
        for name, shape in (
            ("past_lens", [-1]),
            ("subsequence_begins", [-1]),
            ("block_indices", [-1]),
            ("block_indices_begins", [-1]),
            ("max_context_len", []),
        )
    }
    caches = []
    for index, (scale, window) in enumerate(zip(facts.scales, facts.windows, strict=True)):
        pair = [_parameter(f"{kind}_cache.{index}", Type.dynamic, [-1, -1, -1, -1]) for kind in ("key", "value")]
        caches += pair
        inputs = [
            *(sources[f"{name}.{index}"] for name in ("query", "key", "value")),
            *(cache.output(0) for cache in pair),
            *(shared[name].output(0) for name in list(shared)[:4]),
            *_options(scale, window, shared["max_context_len"]),
        ]
        attention = binding.op._PagedAttentionExtension(inputs)  # noqa: SLF001 - the binding has no public name for it
        for name, number in (
            ("num_k_heads", facts.key_heads),
            ("num_v_heads", facts.key_heads),
            ("k_head_size", facts.head_size),
            ("v_head_size", facts.head_size),
        ):
            attention.get_rt_info()[name] = number
        hole = parameters.pop(f"attention.{index}")
        hole.output(0).replace(attention.output(0))
    logits = next(result for result in model.get_results() if result.output(0).get_any_name() == "logits")
    return ov.Model([logits], [*parameters.values(), *shared.values(), *caches], "decoder")


def _options(scale: float, window: int, longest: Any) -> list[Any]:
    """Inputs 9 to 27 of the operation (2026.4): scale, window, slopes of ALiBi, the longest context, and 15 inputs of
    features that are not used here (scores, rotation of the cache, sparse attention, sinks, adaptive eviction, biases
    between queries, token types), which are empty or zero."""
    none_f32, none_i32 = np.zeros(0, np.float32), np.zeros(0, np.int32)
    zero = np.array(0, np.int32)
    constants = [
        none_i32, none_i32, none_i32, none_f32, none_f32, zero, zero, np.zeros((0, 0, 0, 0), np.float32), zero,
        none_i32, none_i32, none_i32, none_i32, np.zeros(0, np.uint8), none_i32,
    ]  # fmt: skip
    first = [op.constant(np.array(scale, np.float32)), op.constant(np.array(window, np.int32)), op.constant(none_f32)]
    return [node.output(0) for node in (*first, longest, *(op.constant(value) for value in constants))]


def _parameter(name: str, kind: Any, shape: list[int]) -> Any:
    parameter = op.parameter(PartialShape(shape), kind, name=name)
    parameter.output(0).set_names({name})
    return parameter
