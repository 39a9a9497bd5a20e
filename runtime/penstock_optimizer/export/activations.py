"""Activations: transformers' names for them, and how each is written in standard operators.

The forms are those that ONNX Runtime and OpenVINO fuse into one kernel when they load a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from penstock_optimizer.export.encoder import Activation
from penstock_optimizer.export.graph import Graph

BY_NAME: Mapping[str, Activation] = {
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_accurate": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_python_tanh": Activation.GELU_TANH,
    "quick_gelu": Activation.GELU_SIGMOID,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "tanh": Activation.TANH,
    "sigmoid": Activation.SIGMOID,
    "linear": Activation.LINEAR,
}
"""`hidden_act` of config.json."""
THROUGH_TORCH = frozenset({"gelu_10", "laplace", "leaky_relu", "mish", "prelu", "relu6", "xielu"})
"""What else transformers has under a name; any other is a mistake in config.json."""

QUICK_GELU_SLOPE = 1.702


def write_activation(graph: Graph, x: str, activation: Activation, name: str) -> str:
    """Append the activation of the value `x` to the graph; returns the result's name."""
    return _WRITERS[activation](graph, x, name)


def _constant(graph: Graph, value: float) -> str:
    return graph.number(value, f"number.{value:.6g}")


def _single(operator: str) -> Callable[[Graph, str, str], str]:
    def write(graph: Graph, x: str, name: str) -> str:
        return graph.node(operator, [x], f"{name}/{operator}")

    return write


def _gelu(graph: Graph, x: str, name: str) -> str:
    share = graph.node("Div", [x, _constant(graph, math.sqrt(2))], f"{name}/Gelu/Div")
    share = graph.node("Erf", [share], f"{name}/Gelu/Erf")
    share = graph.node("Add", [share, _constant(graph, 1)], f"{name}/Gelu/Add")
    product = graph.node("Mul", [x, share], f"{name}/Gelu/Mul")
    return graph.node("Mul", [product, _constant(graph, 0.5)], f"{name}/Gelu/half")


def _gelu_tanh(graph: Graph, x: str, name: str) -> str:
    cube = graph.node("Pow", [x, _constant(graph, 3)], f"{name}/Gelu/Pow")
    cube = graph.node("Mul", [cube, _constant(graph, 0.044715)], f"{name}/Gelu/cube")
    inner = graph.node("Add", [x, cube], f"{name}/Gelu/inner")
    inner = graph.node("Mul", [inner, _constant(graph, math.sqrt(2 / math.pi))], f"{name}/Gelu/scale")
    share = graph.node("Tanh", [inner], f"{name}/Gelu/Tanh")
    share = graph.node("Add", [share, _constant(graph, 1)], f"{name}/Gelu/Add")
    half = graph.node("Mul", [x, _constant(graph, 0.5)], f"{name}/Gelu/half")
    return graph.node("Mul", [half, share], f"{name}/Gelu/Mul")


def _gelu_sigmoid(graph: Graph, x: str, name: str) -> str:
    scaled = graph.node("Mul", [x, _constant(graph, QUICK_GELU_SLOPE)], f"{name}/QuickGelu/scale")
    return graph.node("Mul", [x, graph.node("Sigmoid", [scaled], f"{name}/Sigmoid")], f"{name}/QuickGelu/Mul")


def _silu(graph: Graph, x: str, name: str) -> str:
    return graph.node("Mul", [x, graph.node("Sigmoid", [x], f"{name}/Sigmoid")], f"{name}/Silu/Mul")


def _relu_squared(graph: Graph, x: str, name: str) -> str:
    positive = graph.node("Relu", [x], f"{name}/Relu")
    return graph.node("Mul", [positive, positive], f"{name}/Relu/squared")


def _linear(_graph: Graph, x: str, _name: str) -> str:
    return x


_WRITERS: Mapping[Activation, Callable[[Graph, str, str], str]] = {
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.GELU_SIGMOID: _gelu_sigmoid,
    Activation.SILU: _silu,
    Activation.RELU: _single("Relu"),
    Activation.RELU_SQUARED: _relu_squared,
    Activation.TANH: _single("Tanh"),
    Activation.SIGMOID: _single("Sigmoid"),
    Activation.LINEAR: _linear,
}
