"""The machine's ceiling for matrix products: the best rate that any engine here reaches on a graph of nothing else.

The graph is a chain of square products in the wanted precision, large enough to be bound by arithmetic and not by
memory. It has the inputs of a model, so that the very engines that serve run it, at the plan's threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.manifest import Axes, GemmShare, GraphIO
from penstock.recipe import EngineName, Precision, Recipe
from penstock_optimizer.candidate.operations import EncoderShape
from penstock_runtime.engines.base import Engine, Threads
from penstock_runtime.rows import Batch

ROWS = 256
SIZE = 1024
CHAIN = 16
"""Products in a row: casting the inputs before the first and reducing the last then weigh little."""
OPERATIONS = 2 * ROWS * SIZE * SIZE * CHAIN
IO = GraphIO(inputs=("input_ids",), outputs={"logits": Axes.ROW})
RUNS = 7

_INT8 = frozenset({Precision.INT8_DYNAMIC, Precision.INT8_STATIC, Precision.INT8_ROWWISE})


def write_chain(path: Path, *, int8: bool) -> None:
    """Write the chain of products as ONNX: float32, or int8 throughout in the form (quantise, dequantise, multiply)
    that engines turn into integer products."""
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


def chain_recipes(precision: Precision, engines: Sequence[EngineName]) -> tuple[Recipe, ...]:
    """How to run the chain in a precision, with each engine that has it."""
    plain = Precision.INT8_STATIC if precision in _INT8 else precision
    return tuple(
        Recipe(engine=engine, precision=plain)
        for engine in engines
        # Our own engine runs encoders, not any graph: its products are held against what the libraries reach.
        if engine is not EngineName.NATIVE
        if plain is not Precision.BF16 or engine is EngineName.OPENVINO
    )


def is_int8(precision: Precision) -> bool:
    """True when the linear layers multiply 8-bit integers."""
    return precision in _INT8


def measure_chain(engine: Engine, *, runs: int = RUNS, clock: Callable[[], float] = time.perf_counter) -> float:
    """The rate of a loaded chain, 10^9 operations a second: of its fastest run, since a ceiling is what can be had."""
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


def chain_threads(cores: int) -> Threads:
    """One run on all the cores, as latency is measured."""
    return Threads(streams=1, per_stream=cores)
