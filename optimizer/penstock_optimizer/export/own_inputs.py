"""The inputs of a model's own ONNX graph: those that tasks give, and those that nodes can make of them.

Exports of decoders, and of encoders without positions of their own, have further inputs, which a server of language
models fills: the positions of tokens, and keys and values of earlier tokens, of which there are none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from penstock.errors import UnsupportedModel
from penstock_runtime.models.limits import first_position

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
POSITIONS = frozenset({"position_ids", "cache_position"})
PAST, CACHE_BRANCH = "past_key_values.", "use_cache_branch"
SHOWN = 4


def read_inputs(source: Path, model: Any, config: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """The inputs to give to the graph, and whether nodes were added that make the others. UnsupportedModel names the
    inputs that cannot be made."""
    weights = {tensor.name for tensor in model.graph.initializer}
    found = {value.name: value for value in model.graph.input if value.name not in weights}
    remedy = f"Export it with the inputs {', '.join(INPUTS)} (int64), or put the safetensors weights next to it"
    made = {name for name, value in found.items() if _can_be_made(name, value.type.tensor_type)}
    unknown = sorted(set(found) - set(INPUTS) - made)
    if unknown or "input_ids" not in found:
        names = ", ".join(unknown[:SHOWN]) + (f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")
        what = f"wants the inputs {names}" if unknown else "has no input input_ids"
        raise UnsupportedModel(f"{source} {what}", remedy=remedy)
    for name in (name for name in INPUTS if name in found):
        kind = found[name].type.tensor_type
        dims = kind.shape.dim
        if kind.elem_type != TensorProto.INT64 or len(dims) != 2 or any(dim.HasField("dim_value") for dim in dims):
            raise UnsupportedModel(f"{source}: input {name} is not int64 [batch, tokens] with free axes", remedy=remedy)
    if made:
        _make(model.graph, {name: found[name].type.tensor_type for name in found if name in made}, config)
    return tuple(name for name in INPUTS if name in found), bool(made)


def _can_be_made(name: str, kind: Any) -> bool:
    dims = kind.shape.dim
    if name in POSITIONS:
        return bool(kind.elem_type == TensorProto.INT64 and len(dims) in {1, 2})
    if name == CACHE_BRANCH:
        return bool(kind.elem_type == TensorProto.BOOL)
    return name.startswith(PAST) and len(dims) == 4 and all(dims[axis].dim_value > 0 for axis in (1, 3))


def _make(graph: Any, kinds: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Replace these inputs by nodes: positions by counting, keys and values by tensors without tokens."""
    kept = [value for value in graph.input if value.name not in kinds]
    del graph.input[:]
    graph.input.extend(kept)

    def constant(name: str, value: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), f"penstock/{name}"))
        return f"penstock/{name}"

    zero, one = constant("zero", np.int64(0)), constant("one", np.int64(1))
    first = constant("first", np.int64(first_position(config)))
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["penstock/shape"]),
        helper.make_node("Gather", ["penstock/shape", one], ["penstock/tokens"]),
        helper.make_node("Gather", ["penstock/shape", constant("row_axis", [0])], ["penstock/rows"]),
        helper.make_node("Add", ["penstock/tokens", first], ["penstock/end"]),
        helper.make_node("Range", [first, "penstock/end", one], ["penstock/positions"]),
        helper.make_node("Range", [zero, "penstock/tokens", one], ["penstock/counted"]),
    ]
    for name, kind in kinds.items():
        dims = kind.shape.dim
        if name in POSITIONS and len(dims) == 2:
            nodes.append(helper.make_node("Expand", ["penstock/positions", "penstock/shape"], [name]))
        elif name in POSITIONS:
            nodes.append(helper.make_node("Identity", ["penstock/counted"], [name]))
        elif name == CACHE_BRANCH:
            graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.bool_), name))
        else:
            shape = f"penstock/shape/{name}"
            rest = constant(f"rest/{name}", [dims[1].dim_value, 0, dims[3].dim_value])
            nodes.append(helper.make_node("Concat", ["penstock/rows", rest], [shape], axis=0))
            fill = helper.make_tensor("value", kind.elem_type, [1], [0])
            nodes.append(helper.make_node("ConstantOfShape", [shape], [name], value=fill))
    for index, node in enumerate(nodes):
        graph.node.insert(index, node)
