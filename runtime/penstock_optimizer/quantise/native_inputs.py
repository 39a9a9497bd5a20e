"""What an encoder's graph makes of ids, mask and length before any hidden state.

None of it is a step of the native engine: it is what some of its steps do with every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from onnx import helper

from penstock_optimizer.quantise.native_values import Counted, Mask, Same, Where

INPUTS = {"input_ids": "ids", "attention_mask": Mask(), "token_type_ids": "types"}
"""What the graph's inputs stand for."""


def of_inputs(node: Any, values: Sequence[Any], constant: Callable[[str], Any]) -> Any | None:
    """The meaning of a node's result, from the meanings of its inputs (None: a constant, or something else). None where
    the node makes nothing known of them."""
    match node.op_type, list(values):
        case "Shape", ["ids"] if attributes(node) == {"start": 1, "end": 2}:
            return "length"
        case "Concat", ["length", "length"]:
            return "lengths"
        case "Equal", ["ids", None]:
            return Same(int(constant(node.input[1])))
        case "Not", [Same(number=number)]:
            return Counted(number)
        case ("Cast", [Mask() | Counted() as value]) | ("CumSum" | "Mul" | "Add", [Counted() as value, *_]):
            return value
        case "NonZero", [Same(number=number)]:
            return Where(number)
        case "Transpose", [Where(turned=False) as where] if attributes(node).get("perm", [1, 0]) == [1, 0]:
            return replace(where, turned=True)
    return None


def attributes(node: Any) -> dict[str, Any]:
    """A node's attributes by name."""
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}
