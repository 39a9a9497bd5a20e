"""Fuses a graph that torch wrote, as far as ONNX Runtime's transformer optimiser recognises it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def fuse(path: Path, config: Any, check: Callable[[Path], None], *, large: bool) -> None:
    """Fuse in place; a graph in which nothing is found, or whose answers `check` does not accept, stays as it was.

    `config` is transformers' configuration; `large` weights go to a file next to the graph.
    """
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    options = FusionOptions("bert")
    # As `operators.Fused` has it, for the reasons given there.
    options.enable_skip_layer_norm = options.enable_bias_skip_layer_norm = options.enable_bias_gelu = False
    with TemporaryDirectory(dir=path.parent) as scratch:
        fused = Path(scratch) / path.name  # the weights file of a graph is found by its name
        try:
            found = optimizer.optimize_model(
                str(path),
                model_type="bert",
                num_heads=getattr(config, "num_attention_heads", 0) or 0,
                hidden_size=getattr(config, "hidden_size", 0) or 0,
                optimization_options=options,
                opt_level=0,
            )
            _keep_sums(found.model.graph)
            found.save_model_to_file(str(fused), use_external_data_format=large)
            check(fused)
        except Exception:  # an optimiser that fails or changes answers has found nothing: the graph is used without it
            return
        for file in fused.parent.iterdir():
            file.replace(path.with_name(file.name))


def _keep_sums(graph: Any) -> None:
    """Call the additions before normalisations Sum, which ONNX Runtime does not fuse into SkipLayerNormalization."""
    additions = {node.output[0]: node for node in graph.node if node.op_type == "Add"}
    for node in graph.node:
        if node.op_type == "LayerNormalization" and node.input[0] in additions:
            additions[node.input[0]].op_type = "Sum"
