"""Makes the linear layers of a graph 8-bit: decides the values, and writes them in the operators of an engine.

`quantise_graph` observes the activations of a graph, chooses the strength of smoothing, and rewrites the graph.

SmoothQuant shifts the outliers of activations into the weights, which the product does not notice: x W = (x / s) (s W)
for any positive s per input channel. A channel of x with a large range would coarsen the grid of the whole tensor;
divided by its s it no longer does, and the weights, which have a scale per output channel, bear it.

`IntegerWriter` uses ONNX Runtime's own operators, each of which does what else takes four. `RowwiseWriter` quantises
activations token by token at run time, for the native engine. No library has such an operator, so it is an ONNX
function of standard ones, with which ONNX Runtime computes the same numbers in floating point: so the strength of
smoothing is chosen. `native.steps` reads it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper, version_converter
from threadpoolctl import threadpool_limits

from penstock.errors import OptimizationError
from penstock.manifest import GraphIO
from penstock.recipe import COMPENSATED, PER_CHANNEL, REDUCED_RANGE, SMOOTH, Precision, Recipe
from penstock_optimizer.export.build.graph import MICROSOFT, OPSET
from penstock_optimizer.quantise.linear import (
    Group,
    LinearGraph,
    Seen,
    attributes,
    difference,
    observe,
    outputs,
    save,
    together,
)
from penstock_optimizer.quantise.rounding import (
    BITS,
    SMALLEST_SCALE,
    QuantisationGrid,
    QuantisedWeight,
    grid,
    quantise_weight,
)
from penstock_optimizer.search import recipes
from penstock_runtime.rows import Float, Row

SMALLEST = 1e-5
"""Ranges below it count as this: a channel that is always zero needs no factor."""


def factors(magnitudes: Float, weights: Sequence[Float], alpha: float) -> Float:
    """The divisors [in] of activations with channels of up to `magnitudes` [in], going into `weights` [in, out].

    `alpha` 0 leaves all the difficulty with the activations, 1 moves all of it to the weights. The geometric mean of
    the divisors is 1: a common factor changes nothing.
    """
    activation = np.maximum(magnitudes, SMALLEST)
    weight = np.maximum(np.max([np.abs(w).max(axis=1) for w in weights], axis=0), SMALLEST)
    logarithms = alpha * np.log(activation) - (1 - alpha) * np.log(weight)
    return np.asarray(np.exp(logarithms - logarithms.mean()), np.float32)


@dataclass(frozen=True, eq=False)
class Smoothed:
    """A group with divided activations."""

    by: Float
    """[in]"""
    names: Mapping[str, str]
    """The name of each activation after division."""
    nodes: tuple[tuple[Any, Any], ...]
    """A node that divides, and the node that it is to stand in front of."""


def smooth(graph: LinearGraph, group: Group, seen: Mapping[str, Seen], alpha: float) -> Smoothed:
    """Divide a group's activations: at no cost where the attention that makes them can do it (the graph's constants
    are changed then), else by a node. The weights are not touched: multiply them by `by` when they are quantised."""
    magnitude = np.max([seen[value].magnitude for value in group.values], axis=0)
    by = factors(magnitude, [graph.matrix(node) for node in group.nodes], alpha)
    if _fold(graph, group, by):
        return Smoothed(by, {value: value for value in group.values}, ())
    inverse = graph.constant(np.float32(1) / by, f"{group.weights[0]}/smoothing")
    names, nodes = {}, []
    for value in group.values:
        names[value] = f"{value}/smoothed"
        first = next(node for node in group.nodes if node.input[0] == value)
        nodes.append((helper.make_node("Mul", [value, inverse], [names[value]], names[value]), first))
    return Smoothed(by, names, tuple(nodes))


def _fold(graph: LinearGraph, group: Group, by: Float) -> bool:
    """Let the value projection of a fused attention divide. False where something else reads the values or it."""
    makers = [maker for maker in map(graph.producer, group.values) if maker is not None]
    if len(makers) < len(group.values):
        return False
    if not all(maker.op_type == "Attention" and graph.is_linear(maker) for maker in makers):
        return False
    own = {id(node) for node in group.nodes}
    if any(graph.is_output(value) or any(id(n) not in own for n in graph.readers(value)) for value in group.values):
        return False
    projections = dict.fromkeys(name for maker in makers for name in (maker.input[1], maker.input[2]))
    ours = {id(maker) for maker in makers}
    if any(id(reader) not in ours for name in projections for reader in graph.readers(name)):
        return False
    for name in projections:
        array = graph.array(name).copy()
        array[..., -by.size :] /= by
        graph.change(name, array)
    return True


_ONE: Float = np.ones((), np.float32)


@dataclass(frozen=True)
class Style:
    """How to quantise."""

    static: bool
    """Activations by calibrated ranges; else by their own range at each run."""
    per_channel: bool = True
    limit_pairs: bool = False
    """Neighbouring weights are limited, so that AVX2 cannot saturate (`rounding.PAIR`)."""
    weight_bits: int = BITS
    """4 to 8."""
    smoothing: float | None = None
    """The alpha of SmoothQuant; None: off."""
    compensated: bool = False
    """Rounding errors of weights are made good by other weights, and their mean by the bias."""

    @property
    def calibrated(self) -> bool:
        """True when calibration has something to tell."""
        return self.static or self.smoothing is not None or self.compensated


@dataclass(frozen=True, eq=False)
class Product:
    """One linear node, ready to be written."""

    node: Any
    source: str
    """The float activation, smoothed."""
    alone: bool
    """No other linear node reads the activation."""
    grid: QuantisationGrid | None
    """Of the activation; None: found at run time."""
    name: str
    """For the weight's constants: the same for nodes that share it."""
    weight: QuantisedWeight
    bias: str
    """A constant [out] to be added to the product, with what rounding changed in its mean; empty: nothing to add."""
    output: str
    """The name of the sum."""


class Writer(Protocol):
    """Writes products in the operators of an engine."""

    opset: ClassVar[int]
    """The oldest version of the standard operators that has those which it writes."""

    def write(self, graph: LinearGraph, product: Product) -> tuple[list[Any], list[Any]]:
        """The nodes in front of the product's node, and the nodes instead of it. Constants are added."""


def quantise(graph: LinearGraph, style: Style, seen: Mapping[str, Seen], writer: Writer, *, threads: int = 1) -> None:
    """Rewrite all linear layers of the graph. `seen` holds each of `graph.values` where the style is
    calibrated."""
    before: dict[int, list[Any]] = defaultdict(list)
    instead: dict[int, list[Any]] = {}
    smoothed: dict[int, Smoothed] = {}
    # All of them before any weight is read: a fold changes the weights of another group.
    if style.smoothing is not None:
        for index, group in enumerate(graph.groups):
            smoothed[index] = smooth(graph, group, seen, style.smoothing)
            for divide, reader in smoothed[index].nodes:
                before[id(reader)].append(divide)
    divisors = [smoothed[index].by if index in smoothed else _ONE for index in range(len(graph.groups))]
    weights = _weights(graph, style, seen, divisors, threads)
    for index, group in enumerate(graph.groups):
        for node in group.nodes:
            value, name = node.input[0], node.input[1]
            weight, correction = weights[name]
            addition = graph.bias_after(node)
            product = Product(
                node=node,
                source=smoothed[index].names[value] if index in smoothed else value,
                alone=sum(graph.is_linear(reader) for reader in graph.readers(value)) == 1,
                grid=_grid(seen[value], divisors[index]) if style.static else None,
                name=f"{name}/int8",
                weight=weight,
                bias=_bias(graph, node, addition, correction, f"{name}/int8"),
                output=str((node if addition is None else addition).output[0]),
            )
            front, place = writer.write(graph, product)
            before[id(node)] += front
            instead[id(node)] = place
            if addition is not None:
                instead[id(addition)] = []
    graph.replace(before, instead)


def _bias(graph: LinearGraph, node: Any, addition: Any | None, correction: Float | None, name: str) -> str:
    """The addition to a product, as one constant: its bias, or the bias of the Add after it, and the correction."""
    own = [str(one) for one in (addition.input if addition is not None else node.input[2:3]) if one != node.output[0]]
    if correction is None:
        return own[0] if own else ""
    total = sum((graph.array(one) for one in own), correction)
    return graph.constant(np.asarray(total, np.float32), f"{name}.bias{f' of {own[0]}' if own else ''}")


def _grid(span: Seen, by: Float) -> QuantisationGrid:
    return grid(float((span.low / by).min()), float((span.high / by).max()))


Weighed = tuple[QuantisedWeight, Float | None]


def _weights(
    graph: LinearGraph, style: Style, seen: Mapping[str, Seen], divisors: Sequence[Float], threads: int
) -> dict[str, Weighed]:
    """Every weight on its grid, with the mean change of its product; side by side, as each of them is
    too small for its algebra to use all threads well."""
    jobs = {
        node.input[1]: (node, group, by)
        for group, by in zip(graph.groups, divisors, strict=True)
        for node in group.nodes
    }

    def weigh(name: str) -> Weighed:
        node, group, by = jobs[name]
        met = together([seen[one] for one in group.values_of(name)]) if style.compensated else None
        return _weight(graph.matrix(node), by, style, met)

    with ThreadPoolExecutor(threads) as pool, threadpool_limits(1):
        return dict(zip(jobs, pool.map(weigh, jobs), strict=True))


def _weight(matrix: Float, by: Float, style: Style, met: Seen | None) -> Weighed:
    """The weight on its grid, and the mean change of the product."""
    scaled = matrix * (by[:, np.newaxis] if by.ndim else by)
    weight = quantise_weight(
        scaled,
        per_channel=style.per_channel,
        limit_pairs=style.limit_pairs,
        bits=style.weight_bits,
        samples=None if met is None else met.samples / by,
    )
    if met is None:
        return weight, None
    return weight, np.asarray((met.mean / by) @ (scaled - weight.float()), np.float32)


ALPHAS = (0.65, 0.7, 0.75, 0.8)
"""Tried for `smooth`, the best by the graph's own outputs over some calibration rows is taken. Outside of these no
model seen was better; MiniLM's best is 0.75 (0.5: min cosine 0.95, 0.75: 0.99, 0.95: 0.98)."""
PROBES = 32
"""Rows that an alpha is judged with."""
PROBE_TOKENS = 128
"""Longer rows are left out of the probes: they cost much and tell little more."""


def quantise_graph(
    recipe: Recipe,
    graph: Path,
    io: GraphIO,
    calibration: Sequence[Row],
    path: Path,
    *,
    writer: Callable[[], Writer],
    threads: int,
) -> tuple[Any, tuple[str, ...]]:
    """Write the int8 version of a graph to `path`, by the recipe's options and, for `smooth`, the best alpha. The
    model and what calibration decided. OptimizationError as for `build`."""
    options = set(recipe.options)
    style = Style(
        static=recipe.precision is Precision.INT8_STATIC,
        per_channel=PER_CHANNEL in options,
        limit_pairs=REDUCED_RANGE in options,
        weight_bits=recipes.weight_bits(recipe),
        compensated=COMPENSATED in options,
    )
    linear = LinearGraph(_load(graph, writer().opset))
    if not linear.groups:
        raise OptimizationError(
            f"{graph.name} has no product with a constant weight that could be quantised",
            remedy="Allow fp32 in spec.optimization.precisions, or give the model as safetensors",
        )
    seen: Mapping[str, Seen] = {}
    if style.calibrated or SMOOTH in options:
        if not calibration:
            raise OptimizationError(
                f"{recipe.name} wants calibration texts", remedy="Give some, or leave the recipe out"
            )
        scratch = path.with_name("observed.onnx")
        seen = observe(linear.model, linear.values, io.inputs, calibration, threads=threads, scratch=scratch)
    if SMOOTH in options:
        probes = [row for row in calibration if row.length <= PROBE_TOKENS] or list(calibration)
        step = max(1, len(probes) // PROBES)
        style = _smoothest(style, graph, seen, _Probe(io, probes[::step][:PROBES], path, writer, threads))
    quantise(linear, style, seen, writer(), threads=threads)
    save(linear.model, path)
    return linear.model, () if style.smoothing is None else (f"alpha {style.smoothing:g}",)


def _load(graph: Path, opset: int) -> Any:
    """The graph, in the standard operators of at least this version: a model's own file may be older than those that
    are to be written. OptimizationError where it cannot be brought up to it."""
    model = onnx.load(str(graph))
    version = next((one.version for one in model.opset_import if one.domain in {"", "ai.onnx"}), opset)
    if version >= opset:
        return model
    try:
        return version_converter.convert_version(model, opset)
    except Exception as error:  # the converter's errors have no common class
        raise OptimizationError(
            f"{graph.name} is of opset {version}, and onnx does not convert it to {opset}, which 8-bit products want",
            remedy=f"Export the model with opset {opset} or newer",
        ) from error


@dataclass(frozen=True, eq=False)
class _Probe:
    """Shared by the trials of a style."""

    io: GraphIO
    rows: Sequence[Row]
    path: Path
    """Overwritten by each trial."""
    writer: Callable[[], Writer]
    threads: int

    def outputs(self, graph: Path) -> list[list[Float]]:
        return outputs(graph, self.io.inputs, self.rows, self.threads)


def _smoothest(style: Style, graph: Path, seen: Mapping[str, Seen], probe: _Probe) -> Style:
    """The style with the alpha that gives the outputs nearest to fp32, judged without the slow rounding."""
    reference = probe.outputs(graph)
    best = (float("inf"), 0.0)
    for alpha in ALPHAS:
        linear = LinearGraph(_load(graph, probe.writer().opset))
        quantise(
            linear, replace(style, smoothing=alpha, compensated=False), seen, probe.writer(), threads=probe.threads
        )
        save(linear.model, probe.path)
        best = min(best, (difference(reference, probe.outputs(probe.path)), alpha))
    return replace(style, smoothing=best[1])


class IntegerWriter:
    """One for each graph: activations that several products read are quantised once."""

    opset: ClassVar[int] = 11
    """DynamicQuantizeLinear."""

    def __init__(self) -> None:
        self._quantised: dict[str, tuple[str, str, str]] = {}

    def write(self, graph: LinearGraph, product: Product) -> tuple[list[Any], list[Any]]:
        """See `Writer`."""
        weight = graph.constant(product.weight.values, product.name)
        scale = graph.constant(product.weight.scale, f"{product.name}.scale")
        zero = graph.constant(np.zeros(product.weight.scale.shape, np.int8), f"{product.name}.zero")
        node = product.node
        if product.grid is None and product.alone and node.op_type != "Attention":
            inputs = [product.source, weight, scale, zero, product.bias]
            return [], [_node("DynamicQuantizeMatMul", inputs, product)]
        front, (x, x_scale, x_zero) = self._activation(graph, product)
        if node.op_type == "Attention":
            mask = node.input[3] if len(node.input) > 3 else ""
            inputs = [x, weight, product.bias, x_scale, scale, mask, x_zero, zero]
            return front, [_node("QAttention", inputs, product, **attributes(node))]
        inputs = [x, weight, x_scale, scale, x_zero, zero, product.bias]
        return front, [_node("MatMulIntegerToFloat", inputs, product)]

    def _activation(self, graph: LinearGraph, product: Product) -> tuple[list[Any], tuple[str, str, str]]:
        source = product.source
        if source in self._quantised:
            return [], self._quantised[source]
        name = f"{source}/quantised"
        names = self._quantised[source] = (name, f"{name}.scale", f"{name}.zero")
        if product.grid is None:
            return [helper.make_node("DynamicQuantizeLinear", [source], list(names), name)], names
        graph.constant(np.asarray(product.grid.step, np.float32), names[1])
        graph.constant(np.asarray(product.grid.zero, np.uint8), names[2])
        return [helper.make_node("QuantizeLinear", [source, names[1], names[2]], [name], name)], names


def _node(operator: str, inputs: list[str], product: Product, **given: Any) -> Any:
    while not inputs[-1]:
        inputs.pop()
    name = product.node.name
    return helper.make_node(operator, inputs, [product.output], name, domain=MICROSOFT, **given)


DOMAIN = "penstock"
OPERATOR = "RowwiseLinear"
"""Inputs: activation [..., in], weight int8 [in, out], scale [out], bias [out]."""


class RowwiseWriter:
    """See `Writer`."""

    opset: ClassVar[int] = 1
    """Any: the function states the version of its operators."""

    def write(self, graph: LinearGraph, product: Product) -> tuple[list[Any], list[Any]]:
        """The product; of a fused attention the three products as one, and the rest of the attention."""
        _declare(graph.model)
        node, weight = product.node, product.weight
        outputs = weight.values.shape[1]
        inputs = [
            product.source,
            graph.constant(weight.values, product.name),
            graph.constant(np.broadcast_to(weight.scale, outputs).copy(), f"{product.name}.scale"),
            product.bias or graph.constant(np.zeros(outputs, np.float32), f"no bias {outputs}"),
        ]
        if node.op_type != "Attention":
            return [], [helper.make_node(OPERATOR, inputs, [product.output], node.name, domain=DOMAIN)]
        together = f"{node.name}/together"
        parts = [f"{node.name}/{part}" for part in ("query", "key", "value")]
        mask = [node.input[3]] if len(node.input) > 3 else []
        return [], [
            helper.make_node(OPERATOR, inputs, [together], together, domain=DOMAIN),
            helper.make_node("Split", [together], parts, f"{node.name}/Split", axis=-1),
            helper.make_node(
                "MultiHeadAttention",
                [*parts, *([""] if mask else []), *mask],
                [product.output],
                node.name,
                domain=node.domain,
                **{name: value for name, value in attributes(node).items() if name != "unidirectional"},
            ),
        ]


def _declare(model: Any) -> None:
    """Add the function to the model, once."""
    if any(function.name == OPERATOR for function in model.functions):
        return

    def constant(name: str, value: float) -> Any:
        return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, TensorProto.FLOAT, [], [value]))

    nodes = [
        *starmap(constant, (("nought", 0.0), ("steps", 255.0), ("least", float(SMALLEST_SCALE)))),
        helper.make_node("ReduceMin", ["x"], ["lowest"], axes=[-1], keepdims=1),
        helper.make_node("ReduceMax", ["x"], ["highest"], axes=[-1], keepdims=1),
        helper.make_node("Min", ["lowest", "nought"], ["low"]),
        helper.make_node("Max", ["highest", "nought"], ["high"]),
        helper.make_node("Sub", ["high", "low"], ["span"]),
        helper.make_node("Div", ["span", "steps"], ["raw"]),
        helper.make_node("Max", ["raw", "least"], ["step"]),
        helper.make_node("Neg", ["low"], ["depth"]),
        helper.make_node("Div", ["depth", "step"], ["shift"]),
        helper.make_node("Round", ["shift"], ["zero"]),
        helper.make_node("Div", ["x", "step"], ["scaled"]),
        helper.make_node("Round", ["scaled"], ["rounded"]),
        helper.make_node("Add", ["rounded", "zero"], ["shifted"]),
        helper.make_node("Clip", ["shifted", "nought", "steps"], ["stored"]),
        helper.make_node("Sub", ["stored", "zero"], ["centred"]),
        helper.make_node("Mul", ["centred", "step"], ["again"]),
        helper.make_node("Cast", ["w"], ["whole"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["whole", "scale"], ["weight"]),
        helper.make_node("MatMul", ["again", "weight"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    opset = [helper.make_opsetid("", OPSET)]
    model.functions.append(helper.make_function(DOMAIN, OPERATOR, ["x", "w", "scale", "bias"], ["y"], nodes, opset))
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
