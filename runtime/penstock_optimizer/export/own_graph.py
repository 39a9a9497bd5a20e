"""A model's own ONNX file: taken as it is, once it is seen to run and to answer in a known form."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from penstock.errors import CorruptModel, UnsupportedModel
from penstock.manifest import GRAPH_OUTPUTS, Axes, GraphIO
from penstock.tasks import Head
from penstock_optimizer.export.exported import Exported, open_session
from penstock_optimizer.export.graph import fused_nodes
from penstock_runtime.models.files import copy_within
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.graph import check_data, graph_data

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OUTPUTS: dict[Head, dict[str, Axes]] = {**GRAPH_OUTPUTS, Head.MASKED_LM: {"logits": Axes.TOKENS}}
"""What such graphs are called to answer with: as ours, but every token of a masked language model."""
RANKS = {Head.ENCODER: 3, Head.SEQUENCE: 2, Head.TOKEN: 3, Head.SPAN: 2, Head.MASKED_LM: 3}
PROBE = (2, 7)
"""Rows and tokens of the run that shows the outputs' real shapes."""


def take_own_graph(folder: ModelFolder, head: Head, path: Path) -> Exported:
    """Copy the graph to `path`; its external weights, under any names, to `<path>.data`.

    Outputs under other names than ours are renamed, by rank and order; those of another float type become float32.
    CorruptModel when it does not load, or lacks a file with weights; UnsupportedModel when it wants inputs or gives
    outputs that no task here knows, naming them.
    """
    source = folder.onnx
    if source is None:
        raise CorruptModel(f"{folder.path} has no model.onnx", remedy="Fetch the model again")
    check_data(folder.path, source)
    data = graph_data(folder.path, source)
    with TemporaryDirectory(prefix="own-", dir=path.parent) as place:
        # A copy: the libraries open files by name, and a link of the folder may be replaced after it was checked.
        copy = Path(place, source.name)
        for file in (source, *data):
            copy_within(folder.path, file, Path(place, file.relative_to(source.parent)))
        model = _load(source, copy)
        inputs = _inputs(source, model)
        shapes = _probe(source, copy, inputs)
        chosen = _outputs(source, head, shapes, len(folder.labels))
        kinds = {ours: shapes[theirs][1] for ours, theirs in chosen.items()}
        as_ours = all(ours == theirs and kinds[ours] == np.float32 for ours, theirs in chosen.items())
        if as_ours and not data:
            copy.replace(path)
        else:
            if not as_ours:
                _rename(model, chosen, kinds)
            _save(model, copy, path, external=bool(data))
    return Exported(
        path=path,
        io=GraphIO(inputs=inputs, outputs=OUTPUTS[head]),
        fused_nodes=fused_nodes(model.graph.node),
        how="own-onnx",
        parameters=sum(math.prod(tensor.dims) for tensor in model.graph.initializer),
    )


def _load(source: Path, copy: Path) -> Any:
    try:
        return onnx.load(str(copy), load_external_data=False)
    except Exception as error:  # protobuf's errors have no common class that is public
        raise CorruptModel(f"{source} is not an ONNX model: {error}", remedy="Fetch the model again") from error


def _inputs(source: Path, model: Any) -> tuple[str, ...]:
    weights = {tensor.name for tensor in model.graph.initializer}
    found = {value.name: value.type.tensor_type for value in model.graph.input if value.name not in weights}
    unknown = sorted(set(found) - set(INPUTS))
    remedy = f"Export it with the inputs {', '.join(INPUTS)} (int64), or put the safetensors weights next to it"
    if unknown or "input_ids" not in found:
        what = f"wants the inputs {', '.join(unknown)}" if unknown else "has no input input_ids"
        raise UnsupportedModel(f"{source} {what}", remedy=remedy)
    for name, kind in found.items():
        dims = kind.shape.dim
        if kind.elem_type != TensorProto.INT64 or len(dims) != 2 or any(dim.HasField("dim_value") for dim in dims):
            raise UnsupportedModel(f"{source}: input {name} is not int64 [batch, tokens] with free axes", remedy=remedy)
    return tuple(name for name in INPUTS if name in found)


Shapes = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""What a run has shown of each output: its axes and its type."""


def _outputs(source: Path, head: Head, shapes: Shapes, labels: int) -> dict[str, str]:
    """Our names to those of the graph."""
    wanted = list(OUTPUTS[head])
    floats = [
        name for name, (shape, kind) in shapes.items() if len(shape) == RANKS[head] and np.issubdtype(kind, np.floating)
    ]
    if head is not Head.ENCODER and head is not Head.SPAN:
        floats = [name for name in floats if head is Head.MASKED_LM or shapes[name][0][-1] == labels]
    # Of half precision where there is nothing better.
    fitting = [name for name in floats if shapes[name][1] == np.float32] or floats
    if set(wanted) <= set(fitting):
        return {name: name for name in wanted}
    if len(fitting) != len(wanted):
        described = ", ".join(f"{name} {kind} {list(shape)}" for name, (shape, kind) in shapes.items())
        raise UnsupportedModel(
            f"{source} answers {PROBE[0]} rows of {PROBE[1]} tokens with {described}, "
            f"of which nothing is {' and '.join(wanted)} of a {head.value} model with {labels} labels",
            remedy="Export it for this task, or put the safetensors weights next to it",
        )
    return dict(zip(wanted, fitting, strict=True))


def _probe(source: Path, copy: Path, inputs: tuple[str, ...]) -> Shapes:
    feed = {
        name: np.zeros(PROBE, np.int64) if name == "token_type_ids" else np.ones(PROBE, np.int64) for name in inputs
    }
    try:
        session = open_session(copy)
        names = [node.name for node in session.get_outputs()]
        answers = session.run(names, feed)
    except Exception as error:  # its errors derive from Exception only
        raise CorruptModel(f"{source} does not run: {error}", remedy="Fetch the model again") from error
    return {
        name: (answer.shape, answer.dtype)
        for name, answer in zip(names, answers, strict=True)
        if isinstance(answer, np.ndarray)
    }


def _rename(model: Any, chosen: dict[str, str], kinds: dict[str, np.dtype[Any]]) -> None:
    """Put our names on the outputs, by nodes that copy nothing, or cast to float32; the other outputs are left out."""
    types = {value.name: value.type for value in model.graph.output}
    # What is to be cast may be called as the result has to be.
    inner = {theirs: f"{theirs}/own" for ours, theirs in chosen.items() if theirs in chosen}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [inner.get(name, name) for name in names]
    del model.graph.output[:]
    for ours, theirs in chosen.items():
        source = inner.get(theirs, theirs)
        is_ours = kinds[ours] == np.float32
        kind = {} if is_ours else {"to": TensorProto.FLOAT}
        operator = "Identity" if is_ours else "Cast"
        model.graph.node.append(helper.make_node(operator, [source], [ours], name=f"penstock/{ours}", **kind))
        value = model.graph.output.add(name=ours)
        value.type.CopyFrom(types[theirs])
        value.type.tensor_type.elem_type = TensorProto.FLOAT


def _save(model: Any, copy: Path, path: Path, *, external: bool) -> None:
    """Weights that stand in files of their own go into one that is named like the graph."""
    if not external:
        path.write_bytes(model.SerializeToString())
        return
    weights = path.with_name(f"{path.name}.data")
    weights.unlink(missing_ok=True)  # onnx appends
    onnx.load_external_data_for_model(model, str(copy.parent))
    onnx.save_model(model, str(path), save_as_external_data=True, location=weights.name)
