"""SmoothQuant: shift the outliers of activations into the weights, which the product does not notice.

x W = (x / s) (s W) for any positive s per input channel. A channel of x with a large range would coarsen the grid of
the whole tensor; divided by its s it no longer does, and the weights, which have a scale per output channel, bear it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper

from penstock_optimizer.quantise.linear import Group, LinearGraph
from penstock_optimizer.quantise.seen import Seen
from penstock_runtime.rows import Float

SMALLEST = 1e-5
"""Ranges below it count as this: a channel that is always zero needs no factor."""


def factors(magnitudes: Float, weights: Sequence[Float], alpha: float) -> Float:
    """The divisors [in] of activations whose channels reach `magnitudes` [in], going into `weights` [in, out].

    `alpha` 0 leaves all the difficulty with the activations, 1 moves all of it to the weights. The geometric mean of
    the divisors is 1: a common factor changes nothing.
    """
    activation = np.maximum(magnitudes, SMALLEST)
    weight = np.maximum(np.max([np.abs(w).max(axis=1) for w in weights], axis=0), SMALLEST)
    logarithms = alpha * np.log(activation) - (1 - alpha) * np.log(weight)
    return np.asarray(np.exp(logarithms - logarithms.mean()), np.float32)


@dataclass(frozen=True, eq=False)
class Smoothed:
    """A group whose activations are divided."""

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
