"""From a model folder to the fp32 graph: built from the weights, the model's own, or through torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import UnsupportedModel
from penstock.manifest import GraphIO
from penstock.tasks import Head
from penstock_optimizer.export.build import build
from penstock_optimizer.export.families import FAMILIES
from penstock_optimizer.export.operators import FUSED_OPERATORS, Flavour
from penstock_optimizer.export.reader import NotBuildable
from penstock_runtime.models.folder import ModelFolder

GRAPH_NAME = "model.onnx"

How = Literal["builder", "own-onnx", "torch"]


@dataclass(frozen=True)
class Exported:
    """The fp32 graph on disk."""

    path: Path
    """`model.onnx`; weights of over 1.5 GB stand beside it in `model.onnx.data`."""
    io: GraphIO
    fused_nodes: dict[str, int]
    """How many nodes of each fused operator the graph has; empty: none, which is a finding, unless the flavour is
    plain."""
    how: How
    parameters: int
    """Numbers in the weights that the graph uses, each shared one once."""


def export(folder: ModelFolder, head: Head, out: Path, *, flavour: Flavour = Flavour.FUSED) -> Exported:
    """Write the graph into the folder `out`, which is made; what stood there under its name is replaced.

    CorruptModel names the file and the tensor or field that is missing or does not fit. UnsupportedModel says what no
    way here can take.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        return _from_weights(folder, head, out / GRAPH_NAME, flavour)
    except NotBuildable as reason:
        raise UnsupportedModel(str(reason)) from reason


def _from_weights(folder: ModelFolder, head: Head, path: Path, flavour: Flavour) -> Exported:
    family_type = FAMILIES.get(folder.model_type)
    if family_type is None:
        raise NotBuildable(f"its model_type is {folder.model_type or 'not stated'}")
    family = family_type(folder)
    encoder = family.encoder()
    top = family.top(head, encoder)
    graph, io = build(encoder, top, flavour)
    graph.save(path)
    return Exported(path, io, graph.count(FUSED_OPERATORS), "builder", family.parameters)
