"""Measures the machine's ceiling for matrix products, and counts the operations of an encoder to compare with it.

The ceiling is the best rate that any engine reaches on a chain of square products in the wanted precision, large enough
to be bound by arithmetic and not by memory. The chain has the inputs of a model, so that the engines that serve run it,
with the plan's threads.

One product of M x K and K x N counts 2 x M x K x N operations. Element-wise work (softmax, normalisation, activations)
is left out, as the ceiling has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.manifest import Axes, GemmShare, GraphIO
from penstock.recipe import EngineName, Precision, Recipe
from penstock.tasks import Head
from penstock_runtime.engines.base import Engine
from penstock_runtime.rows import Batch

_HIDDEN = ("hidden_size", "dim", "d_model", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_FEED_FORWARD = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "n_inner")


@dataclass(frozen=True)
class EncoderShape:
    """The sizes that decide an encoder's work."""

    hidden: int
    layers: int
    feed_forward: int
    first_only: bool = False
    """The last layer is computed for the first token only, which is all that is read of it; its keys and values are of
    all tokens."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, head: Head = Head.ENCODER, how: str = "") -> EncoderShape | None:
        """Read the sizes from `config.json`, under any of the names that families use; None when a size is missing.

        `head` and `how` describe the graph (as in `ExportedFacts`). Graphs that are built from the weights leave out
        the parts that a sequence classification does not read.
        """
        sizes = [
            next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)
            for names in (_HIDDEN, _LAYERS, _FEED_FORWARD)
        ]
        if None in sizes:
            return None
        hidden, layers, feed_forward = (size for size in sizes if size is not None)
        return cls(hidden, layers, feed_forward, first_only=head is Head.SEQUENCE and how == "builder")

    def operations(self, tokens: int, rows: int = 1) -> int:
        """Multiplications and additions of the encoder's matrix products: projections (query, key, value, output),
        attention scores and their sums, and the two feed-forward products."""
        layer = self._layer(tokens, tokens)
        last = self._layer(tokens, 1) if self.first_only else layer
        return rows * ((self.layers - 1) * layer + last)

    def _layer(self, tokens: int, queries: int) -> int:
        """Operations of one layer that computes only `queries` of the tokens."""
        keys_and_values = 2 * 2 * tokens * self.hidden * self.hidden
        queries_and_output = 2 * 2 * queries * self.hidden * self.hidden
        attention = 2 * 2 * queries * tokens * self.hidden
        feed_forward = 2 * 2 * queries * self.hidden * self.feed_forward
        return keys_and_values + queries_and_output + attention + feed_forward


ROWS = 256
SIZE = 1024
CHAIN = 16
"""Products in a row: casting the inputs and reducing the last result then weigh little."""
OPERATIONS = 2 * ROWS * SIZE * SIZE * CHAIN
IO = GraphIO(inputs=("input_ids",), outputs={"logits": Axes.ROW})
RUNS = 7

INT8 = frozenset({Precision.INT8_DYNAMIC, Precision.INT8_STATIC, Precision.INT8_ROWWISE})
"""Precisions in which linear layers multiply 8-bit integers."""


def write_chain(path: Path, *, int8: bool) -> None:
    """Write the chain of products as ONNX: float32, or int8 throughout in the form (quantise, dequantise, multiply)
    that engines convert to integer products."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    generator = np.random.default_rng(0)
    weights = (generator.standard_normal((SIZE, SIZE)) / np.sqrt(SIZE)).astype(np.float32)
    constants: list[onnx.TensorProto] = [numpy_helper.from_array(np.float32(SIZE), "scale")]
    nodes: list[onnx.NodeProto] = [
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["numbers", "scale"], ["x0"]),
    ]
    weight = "weights"
    if int8:
        step = np.float32(np.abs(weights).max() / 127)
        constants += [
            numpy_helper.from_array(np.clip(np.round(weights / step), -127, 127).astype(np.int8), "weights_int8"),
            numpy_helper.from_array(step, "weight_step"),
            numpy_helper.from_array(np.int8(0), "weight_zero"),
            numpy_helper.from_array(np.float32(8 / 255), "step"),
            numpy_helper.from_array(np.uint8(128), "zero"),
        ]
    else:
        constants.append(numpy_helper.from_array(weights, "weights"))
    for index in range(CHAIN):
        x = f"x{index}"
        if int8:
            nodes += [
                helper.make_node("QuantizeLinear", [x, "step", "zero"], [f"{x}_q"]),
                helper.make_node("DequantizeLinear", [f"{x}_q", "step", "zero"], [f"{x}_dq"]),
                helper.make_node(
                    "DequantizeLinear", ["weights_int8", "weight_step", "weight_zero"], [f"weights_{index}"]
                ),
            ]
            x, weight = f"{x}_dq", f"weights_{index}"
        nodes.append(helper.make_node("MatMul", [x, weight], [f"x{index + 1}"]))
    nodes.append(helper.make_node("ReduceMax", [f"x{CHAIN}"], ["logits"], axes=[1], keepdims=1))
    graph = helper.make_graph(
        nodes,
        "gemm",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save_model(model, path)


def chain_recipes(precision: Precision) -> tuple[Recipe, ...]:
    """The recipes that run the chain in a precision, one for each engine that has it."""
    plain = Precision.INT8_STATIC if precision in INT8 else precision
    return tuple(
        Recipe(engine=engine, precision=plain)
        for engine in EngineName
        # The native engine runs encoders, not any graph: its products are compared with the rate of the libraries.
        # Neuron's are computed by a device.
        if engine not in {EngineName.NATIVE, EngineName.NEURON}
        if plain is not Precision.BF16 or engine is EngineName.OPENVINO
    )


def measure_chain(engine: Engine, *, runs: int = RUNS, clock: Callable[[], float] = time.perf_counter) -> float:
    """The rate of a loaded chain, 10^9 operations a second, of its fastest run: a ceiling is the best that can be
    reached."""
    ids = np.random.default_rng(1).integers(0, SIZE, (ROWS, SIZE), dtype=np.int64)
    batch = Batch(input_ids=ids, attention_mask=np.ones_like(ids), token_type_ids=np.zeros_like(ids))
    engine.run(batch)
    fastest = float("inf")
    for _ in range(runs):
        begin = clock()
        engine.run(batch)
        fastest = min(fastest, clock() - begin)
    return OPERATIONS / fastest / 1e9


def gemm_shares(shape: EncoderShape, milliseconds: Mapping[int, float], ceiling_gops: float) -> tuple[GemmShare, ...]:
    """The share of the ceiling that a model of this shape reaches at each measured length (batch 1)."""
    shares = []
    for tokens in sorted(milliseconds):
        reached = shape.operations(tokens) / (milliseconds[tokens] * 1e-3) / 1e9
        shares.append(
            GemmShare(tokens=tokens, ceiling_gops=ceiling_gops, reached_gops=reached, share=reached / ceiling_gops)
        )
    return tuple(shares)
