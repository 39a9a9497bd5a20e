"""Writes an ONNX graph node by node. Knows ONNX; knows nothing of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

OPSET = 17
"""The first with LayerNormalization; both engines read it, and quantisers know its operators."""
IR_VERSION = 8
"""The one that belongs to opset 17."""
MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's fused operators; OpenVINO reads those used here."""
SINGLE_FILE_BYTES = 1_000_000_000
"""Larger weights go to `model.onnx.data` next to the graph: protobuf ends at 2 GB, and copies its data."""
SMALL_BYTES = 1024
"""Shapes and indices stay in the graph all the same: shape inference wants to see them."""
PAGE_BYTES = 4096
"""Weights in a separate file start at pages, so that they can be mapped."""

Make = Callable[[], NDArray[Any]]

_ELEMENT = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int32): TensorProto.INT32,
}


class Graph:
    """A graph under construction. Values are named by strings; nodes by their output, in the order of writing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._typed: list[Any] = []
        self._constants: dict[str, NDArray[Any]] = {}
        self._by_identity: dict[tuple[str, tuple[int, ...]], str] = {}
        self._literals: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._alive: list[NDArray[Any]] = []
        self._names: Counter[str] = Counter()

    def input(self, name: str, shape: Sequence[str | int]) -> str:
        """Declare an int64 input; strings are free axes."""
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.INT64, list(shape)))
        return name

    def output(self, name: str, value: str, shape: Sequence[str | int]) -> None:
        """Declare a float32 output that is `value`."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=f"{name}/Identity"))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def node(self, operator: str, inputs: Sequence[str], name: str, *, domain: str = "", **attributes: Any) -> str:
        """Append a node with one output, which is returned. An empty input is one left out."""
        unique = self._unique(name)
        self._nodes.append(helper.make_node(operator, list(inputs), [unique], name=unique, domain=domain, **attributes))
        if (
            domain == MICROSOFT or operator == "MatMul"
        ):  # onnx cannot infer the former's; quantize_dynamic asks for both
            self._typed.append(helper.make_tensor_value_info(unique, TensorProto.FLOAT, None))
        return unique

    def split(self, value: str, parts: int, axis: int, name: str) -> list[str]:
        """Split into equal parts along an axis."""
        unique = self._unique(name)
        outputs = [f"{unique}:{index}" for index in range(parts)]
        self._nodes.append(helper.make_node("Split", [value], outputs, name=unique, axis=axis))
        return outputs

    def constant(self, array: NDArray[Any], name: str) -> str:
        """An initializer; the same array object is written once, under its first name."""
        return self.derived([array], "", name, lambda: array)

    def derived(self, sources: Sequence[NDArray[Any]], role: str, name: str, make: Make) -> str:
        """An initializer made from `sources` (such as a transpose): once for the same arrays in the same role."""
        key = (role, tuple(id(source) for source in sources))
        if key not in self._by_identity:
            unique = self._unique(name)
            self._constants[unique] = make()
            self._alive.extend(sources)  # an id is only worth something while its object lives
            self._by_identity[key] = unique
        return self._by_identity[key]

    def integers(self, values: Sequence[int] | int, name: str) -> str:
        """An int64 initializer: a scalar or a vector. Equal values are written once."""
        return self._literal(np.asarray(values, np.int64), name)

    def number(self, value: float, name: str) -> str:
        """A float32 scalar initializer. Equal values are written once."""
        return self._literal(np.asarray(value, np.float32), name)

    def _literal(self, array: NDArray[Any], name: str) -> str:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._literals:
            self._literals[key] = unique = self._unique(name)
            self._constants[unique] = array
        return self._literals[key]

    def fused_nodes(self) -> dict[str, int]:
        """See `fused_nodes`."""
        return fused_nodes(self._nodes)

    def save(self, path: Path) -> None:
        """Write the graph, its weights within the file or, when they are large, next to it as `<name>.data`.

        Once: each weight is let go as soon as it is written, so that a model is not held three times over.
        """
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, value_info=self._typed)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
            ir_version=IR_VERSION,
            producer_name="penstock",
        )
        weights = path.with_name(f"{path.name}.data")
        if sum(array.nbytes for array in self._constants.values()) > SINGLE_FILE_BYTES:
            self._write_weights(weights, model.graph)
        else:
            weights.unlink(missing_ok=True)  # of an earlier graph
            for name in list(self._constants):
                array = self._constants.pop(name)
                _add_tensor(model.graph, name, array).raw_data = array.tobytes()
        path.write_bytes(model.SerializeToString())

    def _write_weights(self, path: Path, graph: Any) -> None:
        with path.open("wb") as stream:
            for name in list(self._constants):
                array = self._constants.pop(name)
                tensor = _add_tensor(graph, name, array)
                if array.nbytes < SMALL_BYTES:
                    tensor.raw_data = array.tobytes()
                    continue
                stream.write(bytes(-stream.tell() % PAGE_BYTES))
                tensor.data_location = TensorProto.EXTERNAL
                facts = {"location": path.name, "offset": stream.tell(), "length": array.nbytes}
                for key, value in facts.items():
                    tensor.external_data.add(key=key, value=str(value))
                np.ascontiguousarray(array).tofile(stream)

    def _unique(self, name: str) -> str:
        self._names[name] += 1
        count = self._names[name]
        return name if count == 1 else f"{name}.{count}"


def _add_tensor(graph: Any, name: str, array: NDArray[Any]) -> Any:
    return graph.initializer.add(name=name, data_type=_ELEMENT[array.dtype], dims=array.shape)


def fused_nodes(nodes: Iterable[Any]) -> dict[str, int]:
    """How many nodes there are of each operator that does in one what several standard ones do."""
    return dict(Counter(n.op_type for n in nodes if n.domain == MICROSOFT or n.op_type == "LayerNormalization"))
