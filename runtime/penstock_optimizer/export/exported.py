"""What an export leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.manifest import GraphIO


@dataclass(frozen=True)
class Exported:
    """The fp32 graph on disk."""

    path: Path
    """`model.onnx`; large weights are next to it in `model.onnx.data`."""
    io: GraphIO
    fused_nodes: dict[str, int]
    """How many nodes the graph has of each operator that does in one what several do: `Attention`,
    `MultiHeadAttention`, `Gelu`, `LayerNormalization`, ... No attention in the fused flavour is a finding."""
    how: Literal["builder", "own-onnx", "torch"]
    """Built from the weights, the model's own file, or exported by torch."""
    parameters: int
    """Numbers in the weights that the graph uses, each shared one once."""
