"""Quantises a graph with calibration: observes its activations, chooses the strength of smoothing, rewrites it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import version_converter

from penstock.errors import OptimizationError
from penstock.manifest import GraphIO
from penstock.recipe import COMPENSATED, PER_CHANNEL, REDUCED_RANGE, SMOOTH, Precision, Recipe
from penstock_optimizer.quantise.linear import LinearGraph
from penstock_optimizer.quantise.observe import difference, observe, outputs, save
from penstock_optimizer.quantise.quantiser import Style, Writer, quantise
from penstock_optimizer.quantise.seen import Seen
from penstock_optimizer.search import recipes
from penstock_runtime.rows import Float, Row

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
    """What trials of a style share."""

    io: GraphIO
    rows: Sequence[Row]
    path: Path
    """Overwritten by each trial."""
    writer: Callable[[], Writer]
    threads: int

    def outputs(self, graph: Path) -> list[list[Float]]:
        return outputs(graph, self.io.inputs, self.rows, self.threads)


def _smoothest(style: Style, graph: Path, seen: Mapping[str, Seen], probe: _Probe) -> Style:
    """The style with the alpha whose outputs are nearest to fp32, judged without the slow rounding."""
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
