"""Counts operators in a serialised ONNX graph, without the onnx package (a serving process has none).

An ONNX file is one protobuf message; only the fields on the way to a node's `op_type` are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.errors import ArtefactError

_MODEL_GRAPH = 7
_GRAPH_NODE = 1
_NODE_OP_TYPE = 4


def count_operators(model: bytes) -> Counter[str]:
    """How many nodes of each `op_type` the main graph has. ArtefactError when the bytes are not an ONNX model."""
    found: Counter[str] = Counter()
    try:
        for graph in _fields(memoryview(model), _MODEL_GRAPH):
            for node in _fields(graph, _GRAPH_NODE):
                found.update(bytes(name).decode() for name in _fields(node, _NODE_OP_TYPE))
    except (IndexError, ValueError) as error:
        raise ArtefactError("the optimised graph cannot be read", remedy="Run penstock optimize again") from error
    return found


def _fields(message: memoryview, number: int) -> Iterator[memoryview]:
    """The contents of all length-delimited fields of this number."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, at = _varint(message, at)
                if at + size > len(message):
                    raise ValueError("truncated")
                if tag >> 3 == number:
                    yield message[at : at + size]
                at += size
            case other:
                raise ValueError(f"wire type {other}")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
