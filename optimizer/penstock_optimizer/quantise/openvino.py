"""Makes the graphs that OpenVINO serves: the fp32 graph as IR, bf16 by the engine's rounding, int8 by our quantiser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import openvino as ov
from onnx import helper
from openvino import opset13 as opset

from penstock.errors import OptimizationError
from penstock.manifest import GraphIO
from penstock.recipe import GROUP_32, Precision, Recipe
from penstock_optimizer.quantise.linear import LinearGraph, weights_file
from penstock_optimizer.quantise.quantiser import Product, quantise_graph
from penstock_optimizer.quantise.rounding import SMALLEST_SCALE
from penstock_runtime.rows import Row

GROUP_OPTION = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
GROUPS = {GROUP_32: 32}
"""Activations that share a scale. The plugin accepts only sizes that divide every layer's inputs, and ignores
other sizes without a message."""


def make_model(
    recipe: Recipe, graph: Path, io: GraphIO, calibration: Sequence[Row], path: Path, *, threads: int
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Write `path`, with `.bin` next to it, for a recipe from a plain fp32 graph; the counts of operators, and notes.
    OptimizationError when nothing could be quantised or the recipe is none of ours."""
    notes: tuple[str, ...] = ()
    match recipe.precision:
        case Precision.FP32 | Precision.BF16:
            model = _read(graph, threads)  # the precision is set when the engine loads the graph
        case Precision.INT8_STATIC:
            model, notes = _by_ourselves(
                recipe, graph, io, calibration, path.with_name("quantised.onnx"), threads=threads
            )
            _check_quantised(model, graph)
        case Precision.INT8_ROWWISE:
            model = _read(graph, threads)
            _compress_weights(model)
            group = next((size for option, size in GROUPS.items() if option in recipe.options), 32)
            model.set_rt_info(str(group), ["runtime_options", GROUP_OPTION])
            _check_quantised(model, graph)
        case _:
            raise OptimizationError(
                f"OpenVINO has no {recipe.precision.value} recipe", remedy="Use ONNX Runtime for it"
            )
    ov.save_model(model, str(path), compress_to_fp16=False)
    return _counts(model), notes


def _read(graph: Path, threads: int) -> Any:
    core = ov.Core()
    core.set_property({"INFERENCE_NUM_THREADS": threads})
    return core.read_model(str(graph))


def _by_ourselves(
    recipe: Recipe, graph: Path, io: GraphIO, calibration: Sequence[Row], written: Path, *, threads: int
) -> tuple[Any, tuple[str, ...]]:
    """Our own quantiser's graph as OpenVINO reads it, and the notes. `written` is a file path to write and remove."""
    try:
        _, notes = quantise_graph(recipe, graph, io, calibration, written, writer=QdqWriter, threads=threads)
        model = _read(written, threads)
        # Read whole: its weights may still be mapped from the file that goes now.
        return model.clone(), notes
    finally:
        for path in (written, weights_file(written)):
            path.unlink(missing_ok=True)


def _compress_weights(model: Any) -> None:
    """Store the weights of matrix products and embedding tables in int8, with a scale for each output channel or row of
    the table. Changes the model.

    The CPU plugin recognises Constant, Convert, Multiply before a product: it keeps the int8 values and quantises the
    activations at run time. The largest number of a channel becomes -128, so that the whole range is used.
    """
    for constant in [node for node in model.get_ops() if node.get_type_name() == "Constant"]:
        axis = _summed_axis(constant)
        if axis is None:
            continue
        weight = constant.get_data()
        highest, lowest = weight.max(axis=axis, keepdims=True), weight.min(axis=axis, keepdims=True)
        scale = np.where(-lowest >= highest, -lowest, -highest) / np.float32(128)
        scale[np.abs(scale) < SMALLEST_SCALE] = SMALLEST_SCALE
        values = np.clip(np.rint(weight / scale), -128, 127).astype(np.int8)
        name = constant.get_friendly_name()
        users = constant.output(0).get_target_inputs()
        stored = opset.constant(values, name=name)
        restored = opset.multiply(
            opset.convert(stored, "f32"), opset.constant(scale, name=f"{name}/scale"), name=f"{name}/restored"
        )
        for user in users:
            user.replace_source_output(restored.output(0))


def _summed_axis(constant: Any) -> int | None:
    """The axis with one scale: the one that the products sum over, or the values of a table's row. None if the constant
    is neither weight nor table, or if its users differ in the axis."""
    if len(constant.get_output_shape(0)) != 2 or constant.get_element_type() != ov.Type.f32:
        return None
    axes = set()
    for user in constant.output(0).get_target_inputs():
        node = user.get_node()
        match node.get_type_name(), user.get_index():
            case "MatMul", 1:
                axes.add(1 if node.get_attributes()["transpose_b"] else 0)
            case "Gather", 0:
                axes.add(1)
            case _:
                return None
    return axes.pop() if len(axes) == 1 else None


def _check_quantised(model: Any, graph: Path) -> None:
    """A graph without int8 weights is a failure, not a slow success."""
    if not _counts(model).get(INT8_WEIGHTS):
        raise OptimizationError(
            f"nothing was found to quantise in {graph.name}",
            remedy="Allow fp32 in spec.optimization.precisions, or give the model as safetensors",
        )


INT8_WEIGHTS = "int8 weights"
_COUNTED = frozenset({"FakeQuantize", "MatMul", "MVN", "Gelu"})


def _counts(model: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for node in model.get_ops():
        kind = node.get_type_name()
        if kind in _COUNTED:
            counts[kind] += 1
        elif kind == "Constant" and node.get_element_type() in {ov.Type.i8, ov.Type.u8}:
            counts[INT8_WEIGHTS] += len(node.get_output_shape(0)) > 1
    return dict(sorted(counts.items()))


class QdqWriter:
    """Standard operators: both sides quantised and dequantised, then multiplied in float. OpenVINO recognises the pairs
    as quantisation, and multiplies integers. One for each graph: activations that several products read are quantised
    once.

    For calibrated activations (static styles) and graphs of MatMul and Gemm.
    """

    opset: ClassVar[int] = 13
    """DequantizeLinear by channels."""

    def __init__(self) -> None:
        self._quantised: dict[str, str] = {}
        self._weights: dict[str, str] = {}

    def write(self, graph: LinearGraph, product: Product) -> tuple[list[Any], list[Any]]:
        """See `Writer`."""
        if product.grid is None or product.node.op_type == "Attention":
            raise ValueError("QdqWriter wants calibrated activations and plain products")
        front: list[Any] = []
        if product.source not in self._quantised:
            name = f"{product.source}/quantised"
            step = graph.constant(np.asarray(product.grid.step, np.float32), f"{name}.scale")
            zero = graph.constant(np.asarray(product.grid.zero, np.uint8), f"{name}.zero")
            self._quantised[product.source] = f"{name}.float"
            front += [
                helper.make_node("QuantizeLinear", [product.source, step, zero], [name], name),
                helper.make_node("DequantizeLinear", [name, step, zero], [f"{name}.float"], f"{name}.float"),
            ]
        if product.name not in self._weights:
            name = self._weights[product.name] = f"{product.name}.float"
            weight = graph.constant(product.weight.values, product.name)
            scale = graph.constant(product.weight.scale, f"{product.name}.scale")
            zero = graph.constant(np.zeros(product.weight.scale.shape, np.int8), f"{product.name}.zero")
            front.append(helper.make_node("DequantizeLinear", [weight, scale, zero], [name], name, axis=1))
        return front, self._product(product)

    def _product(self, product: Product) -> list[Any]:
        inputs = [self._quantised[product.source], self._weights[product.name]]
        if not product.bias:
            return [helper.make_node("MatMul", inputs, [product.output], product.node.name)]
        name = f"{product.output}/product"
        return [
            helper.make_node("MatMul", inputs, [name], name),
            helper.make_node("Add", [name, product.bias], [product.output], product.node.name),
        ]
