"""Makes the linear layers of a graph 8-bit: what to write is decided here, how it is written by a `Writer`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from penstock_optimizer.quantise.linear import LinearGraph
from penstock_optimizer.quantise.rounding import BITS, QuantisationGrid, QuantisedWeight, grid, quantise_weight
from penstock_optimizer.quantise.seen import Seen, together
from penstock_optimizer.quantise.smoothing import Smoothed, smooth
from penstock_runtime.rows import Float

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
        """The nodes to stand in front of the product's node, and those in its place. Constants are added."""
        ...


def quantise(graph: LinearGraph, style: Style, seen: Mapping[str, Seen], writer: Writer, *, threads: int = 1) -> None:
    """Rewrite all linear layers of the graph in place. `seen` holds each of `graph.values` where the style is
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
    """What is added to a product, as one constant: its own bias or that of the Add after it, and the correction."""
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
    """Every weight on its grid, with the mean of what that changes in its product; side by side, as each of them is
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
    """The weight on its grid, and the mean of what that changes in the product."""
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
