"""The graph of static embeddings: a table with a vector for each token."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import CorruptModel
from penstock.manifest import GRAPH_OUTPUTS, GraphIO
from penstock.tasks import Head
from penstock_optimizer.export.build.graph import Graph
from penstock_optimizer.export.reader import Exported, Weights, no_head
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sources.static_folder import IGNORED_TOKEN, TABLE
from penstock_runtime.tasks.embeddings.space import tensors_digest

ROWS = ("batch", "tokens")


def build_static(folder: ModelFolder, head: Head, path: Path) -> Exported:
    """Write the graph. UnsupportedModel for another head than an encoder's; CorruptModel if the table does not fit."""
    if head is not Head.ENCODER:
        raise no_head(folder, head, Head.ENCODER)
    weights = Weights(folder)
    size, width = folder.config.get("vocab_size"), folder.config.get("hidden_size")
    if not isinstance(size, int) or not isinstance(width, int):
        raise CorruptModel(f"{folder.path}/config.json lacks the size of the table", remedy="Fetch the model again")
    table = weights.take(TABLE, (size, width))
    graph = Graph("static")
    ids = graph.input("input_ids", ROWS)
    mask = graph.input("attention_mask", ROWS)
    vectors = graph.node("Gather", [graph.constant(table, TABLE), ids], "embeddings")
    ignored = folder.config.get(IGNORED_TOKEN)
    if isinstance(ignored, int):
        vectors = _without(graph, vectors, ids, mask, ignored)
    graph.output("last_hidden_state", vectors, (*ROWS, width))
    graph.save(path)
    outputs = dict(GRAPH_OUTPUTS[Head.ENCODER])
    io = GraphIO(inputs=("input_ids", "attention_mask"), outputs=outputs)
    return Exported(path, io, graph.fused_nodes(), "builder", table.size, tensors_digest({TABLE: table}))


def _without(graph: Graph, vectors: str, ids: str, mask: str, ignored: int) -> str:
    """Vectors with a mean in which the tokens `ignored` do not count: zero for these, the others larger."""
    is_ignored = graph.node("Equal", [ids, graph.integers(ignored, "ignored")], "ignored/Equal")
    kept = graph.node("Where", [is_ignored, graph.integers(0, "none"), mask], "ignored/Where")
    axis = graph.integers([1], "ignored.axis")
    counts = [graph.node("ReduceSum", [one, axis], "ignored/count") for one in (mask, kept)]
    every, counted = (graph.node("Cast", [one], "ignored/float", to=1) for one in counts)
    counted = graph.node("Max", [counted, graph.number(1, "ignored.one")], "ignored/Max")
    share = graph.node("Div", [every, counted], "ignored/share")
    factor = graph.node("Mul", [graph.node("Cast", [kept], "ignored/float", to=1), share], "ignored/factor")
    factor = graph.node("Unsqueeze", [factor, graph.integers([2], "ignored.last")], "ignored/Unsqueeze")
    return graph.node("Mul", [vectors, factor], "ignored/Mul")
