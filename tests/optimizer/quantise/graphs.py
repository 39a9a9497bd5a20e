"""Small graphs to quantise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock_runtime.rows import Float

MICROSOFT = "com.microsoft"
WIDTH, INNER = 128, 256


def weight(rows: int, columns: int, seed: int) -> Float:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) / np.float32(np.sqrt(rows))


def model(nodes: list[Any], constants: dict[str, Any], outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    """A graph over token ids: embedding by Gather, then `nodes` from `x` on."""
    table = weight(50, WIDTH, 99) * np.exp(weight(1, WIDTH, 98))
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["x"], "embed"), *nodes],
        "small",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(table.astype(np.float32), "table")]
        + [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feed_forward() -> onnx.ModelProto:
    """MatMul, Gemm and bias, ReLU between: an input that two products share, and an output of 4 that stays float."""
    return model(
        [
            helper.make_node("MatMul", ["x", "up"], ["up.x"], "up"),
            helper.make_node("MatMul", ["x", "gate"], ["gate.x"], "gate"),
            helper.make_node("Mul", ["up.x", "gate.x"], ["inner"], "mul"),
            helper.make_node("Relu", ["inner"], ["relu"], "relu"),
            helper.make_node("Reshape", ["relu", "flat"], ["rows"], "reshape"),
            helper.make_node("Gemm", ["rows", "down", "bias"], ["z"], "down", transB=1),
            helper.make_node("MatMul", ["z", "last"], ["y"], "last"),
        ],
        {
            "up": weight(WIDTH, INNER, 1),
            "gate": weight(WIDTH, INNER, 2),
            "down": weight(WIDTH, INNER, 3) * 3,  # [out, in]
            "bias": weight(1, WIDTH, 4)[0],
            "last": weight(WIDTH, 4, 5),
            "flat": np.array([-1, INNER], np.int64),
        },
    )


def attention(heads: int = 4, **attributes: Any) -> onnx.ModelProto:
    """A fused attention and its output projection, whose weight nothing else shares."""
    return model(
        [
            helper.make_node(
                "Attention", ["x", "qkv", "qkv.bias"], ["context"], "attention",
                domain=MICROSOFT, num_heads=heads, **attributes,
            ),
            helper.make_node("MatMul", ["context", "out"], ["y"], "out"),
        ],
        {
            "qkv": weight(WIDTH, 3 * WIDTH, 6),
            "qkv.bias": weight(1, 3 * WIDTH, 7)[0],
            "out": weight(WIDTH, WIDTH, 8),
        },
    )  # fmt: skip


def watched_attention() -> onnx.ModelProto:
    """An attention whose context something else reads as well."""
    graph = attention()
    graph.graph.node.append(helper.make_node("Relu", ["context"], ["also"], "also"))
    graph.graph.output.append(helper.make_tensor_value_info("also", TensorProto.FLOAT, None))
    return graph


def shown_attention() -> onnx.ModelProto:
    """An attention whose context is an output of the graph."""
    graph = attention()
    graph.graph.output.append(helper.make_tensor_value_info("context", TensorProto.FLOAT, None))
    return graph


def shared_attention() -> onnx.ModelProto:
    """Two attentions of one weight, and an output projection for one of them."""
    graph = attention()
    inputs = ["y", "qkv", "qkv.bias"]
    graph.graph.node.append(helper.make_node("Attention", inputs, ["z"], "again", domain=MICROSOFT, num_heads=4))
    graph.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    return graph


def tied() -> onnx.ModelProto:
    """Two layers of one weight (as ALBERT has them)."""
    return model(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
            helper.make_node("Relu", ["a"], ["b"], "relu"),
            helper.make_node("MatMul", ["b", "w"], ["y"], "second"),
        ],
        {"w": weight(WIDTH, WIDTH, 9)},
    )


def save(graph: onnx.ModelProto, path: Path) -> Path:
    onnx.save(graph, str(path))
    return path
