"""From a quantised ONNX graph to the steps of the native engine. Pure.

It knows what `export.build` writes, quantised by `RowwiseWriter`, node by node, and refuses all else with the reason.
A product takes in its activation and the residual sum after it, since that saves a pass over the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import numpy_helper

from penstock_optimizer.quantise.linear import attributes
from penstock_optimizer.quantise.native_values import (
    INPUTS,
    Buffers,
    Column,
    Counted,
    Distances,
    GraphValue,
    LocalWindow,
    Mask,
    MaskedLines,
    Part,
    TableSum,
    Where,
    by_distance,
    narrow,
    of_inputs,
    refusal,
    side_by_side,
    spread_bias,
    window_bias,
)
from penstock_optimizer.quantise.writers import OPERATOR
from penstock_runtime.engines.native.graph_file import Activation, GraphOutput, GraphStep, NativeGraph, Operator

WIDTH = 32
"""Widths of hidden states are multiples of it, and those of heads of half of it: the kernels have no tails."""
_ACTIVATIONS: Mapping[str, Activation] = {
    "Gelu": "gelu", "FastGelu": "gelu-tanh", "Relu": "relu", "Tanh": "tanh",
}  # fmt: skip


def native_graph(model: Any) -> NativeGraph:
    """The steps and tensors. OptimizationError for a graph that the native engine cannot run, with the reason."""
    return _Reader(model).read()


class _Reader:
    def __init__(self, model: Any) -> None:
        self._graph = model.graph
        self._nodes = list(model.graph.node)  # kept: nodes are known by their identity
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._readers = Counter(name for node in self._nodes for name in node.input)
        self._after = {name: node for node in self._nodes for name in node.input}
        self._done: set[int] = set()
        self._known: dict[str, Any] = dict(INPUTS)
        self._left: Counter[int] = Counter()
        self._buffers = Buffers()
        self._tensors: dict[str, Any] = {}
        self._steps: list[GraphStep] = []
        self._results: dict[str, GraphValue | Column] = {}
        self._chosen = -1

    def read(self) -> NativeGraph:
        """All nodes in order."""
        nodes: Mapping[str, Callable[[Any], None]] = {
            "Gather": self._gather, "Slice": self._slice, "GatherND": self._gather_chosen, "Squeeze": self._squeeze,
            "Add": self._add, "Sum": self._add, "Mul": self._mul, "LayerNormalization": self._norm,
            "Split": self._split, "MultiHeadAttention": self._attention, OPERATOR: self._linear8,
            "MatMul": self._linear32, "Gemm": self._linear32, "Identity": self._identity,
            "RotaryEmbedding": self._rotary, "ReduceSum": self._sum, "Div": self._average,
        }  # fmt: skip
        for node in self._nodes:
            if id(node) in self._done:
                continue
            value = of_inputs(node, [self._known.get(name) for name in node.input], self._array)
            if value is not None:
                self._set(node, value)
                continue
            known = nodes.get(node.op_type)
            if known is None:
                raise refusal(f"the operator {node.op_type} ({node.name})")
            known(node)
        used = {name for step in self._steps for name in step.tensors.values()}
        tensors = {name: array for name, array in self._tensors.items() if name in used}
        return NativeGraph(tuple(self._steps), self._output(), tensors)

    def _output(self) -> GraphOutput:
        """One buffer as one output, or each of its columns as one."""
        names = [output.name for output in self._graph.output]
        found = [self._results.get(name) for name in names]
        match found:
            case [GraphValue() as value]:
                return GraphOutput(
                    name=names[0], buffer=value.buffer, width=value.used or value.width, per_row=value.per == "row",
                    chosen_id=self._chosen if value.per == "chosen" else -1,
                )  # fmt: skip
            case [Column(whole=whole), *_]:
                columns = [one.index for one in found if isinstance(one, Column) and one.whole is whole]
                if columns == list(range(whole.width)) and whole.per == "token":
                    return GraphOutput(
                        name="columns", buffer=whole.buffer, width=whole.width, per_row=False, columns=tuple(names)
                    )
        raise refusal(f"what the outputs are: {', '.join(names)}")

    # ---- inputs and tables ----

    def _gather(self, node: Any) -> None:
        table, by = node.input[0], self._find(node, 1)
        if table not in self._constants or len(self._constants[table].dims) != 2:
            raise refusal(f"{node.name}, which looks up what is no table")
        if by == "ids":
            self._set(node, TableSum(words=table))
        elif by == "types":
            self._set(node, TableSum(types=table))
        elif isinstance(by, Counted):
            self._set(node, TableSum(positions=table, padding=by.padding))
        else:
            raise refusal(f"{node.name}, which looks up by what is no input")

    def _slice(self, node: Any) -> None:
        """The first positions of a table or of a bias on the scores, or the first token of each row."""
        if node.input[0] in self._constants:
            if self._find(node, 2) == "lengths":
                return self._set(node, self._distances(node))
            return self._set(node, TableSum(positions=node.input[0]))
        value, part = self._find(node, 0), [self._array(name).tolist() for name in node.input[1:4]]
        if isinstance(value, Distances | LocalWindow) and part == [[0], [1], [2]]:
            return self._set(node, replace(value, first=True))
        source = self._buffer(node, 0)
        if part != [[0], [1], [1]] or source.per != "token":
            raise refusal(f"{node.name}, which slices other than the first token")
        target = self._buffers.take(source.width, "row")
        self._step(node, "first", source=source.buffer, target=target.buffer, outputs=source.width)
        self._write(node, target, source)
        return None

    def _distances(self, node: Any) -> Distances:
        """Of a constant [1, heads, positions, positions] that is the same wherever key and query are as far apart."""
        bias, name = self._array(node.input[0]), f"{node.input[0]}/distances"
        table = by_distance(bias)
        where = [self._array(node.input[at]).tolist() for at in (1, 3)]
        if table is None or where != [[0, 0], [2, 3]]:
            raise refusal(f"{node.name}, a bias on the scores that is not one of distances")
        self._tensors[name] = table
        return Distances(name, bias.shape[2])

    def _gather_chosen(self, node: Any) -> None:
        """The lines of the tokens of one id."""
        source, where = self._buffer(node, 0), self._find(node, 1)
        if not isinstance(where, Where) or not where.turned or attributes(node).get("batch_dims", 0):
            raise refusal(f"{node.name}, which gathers by what is no place of tokens")
        if source.per != "token" or source.factors or self._chosen not in (-1, where.number):
            raise refusal(f"{node.name}, which gathers what is no line of tokens, or tokens of a second id")
        self._chosen = where.number
        target = self._buffers.take(source.width, "chosen")
        self._step(
            node, "chosen", source=source.buffer, target=target.buffer, outputs=source.width, padding=where.number
        )
        self._write(node, target, source)

    # ---- steps ----

    def _norm(self, node: Any) -> None:
        value = self._find(node, 0)
        if isinstance(value, TableSum):
            value = self._embed(node, value)
        elif not isinstance(value, GraphValue):
            raise refusal(f"{node.name}, which normalises what is no sum")
        target = self._buffers.take(value.width, value.per)
        epsilon = attributes(node).get("epsilon", 1e-5)
        tensors = {"weights": self._keep(node.input[1]), "bias": self._keep(node.input[2])}
        self._step(
            node, "norm", source=value.buffer, target=target.buffer, outputs=value.width, epsilon=epsilon,
            tensors=tensors,
        )  # fmt: skip
        self._write(node, target, value)

    def _embed(self, node: Any, tables: TableSum) -> GraphValue:
        if not tables.words:
            raise refusal(f"{node.name}, embeddings without words")
        words = self._array(tables.words)
        vectors, scales = f"{tables.words}/int16", f"{tables.words}/int16.scale"
        self._tensors[vectors], self._tensors[scales] = narrow(words)
        target = self._buffers.take(words.shape[1], "token")
        tensors = {
            "weights": vectors,
            "scales": scales,
            **({"position_table": self._keep(tables.positions)} if tables.positions else {}),
            **({"type_table": self._keep(tables.types)} if tables.types else {}),
        }
        self._step(
            node, "embed", target=target.buffer, inputs=len(words), outputs=target.width,
            positions=len(self._array(tables.positions)) if tables.positions else 0, padding=tables.padding,
            types=len(self._array(tables.types)) if tables.types else 0, tensors=tensors,
        )  # fmt: skip
        self._left[target.buffer] = 1
        return target

    def _linear8(self, node: Any) -> None:
        source, after = self._buffer(node, 0), self._only_reader(node)
        if after is not None and after.op_type == "Split" and len(after.output) == 2:
            return self._gated(node, after)
        name, scale, bias = node.input[1:4]
        inputs, used = self._array(name).shape
        outputs = -(-used // WIDTH) * WIDTH if self._is_output(node) else used
        parts = (("weights", name), ("scales", scale), ("bias", bias))
        tensors = {part: self._keep(one, outputs) for part, one in parts}
        if source.factors:
            tensors["factors"] = self._keep(source.factors)
        last, activation = self._activation_after(node)
        last, residual = self._residual_after(last)
        target = replace(self._buffers.take(outputs, source.per), used=used)
        self._step(
            node, "linear8", source=source.buffer, target=target.buffer, inputs=inputs, outputs=outputs,
            activation=activation, residual=residual.buffer if residual else -1, tensors=tensors,
        )  # fmt: skip
        self._write(last, target, source, *([residual] if residual else []))
        return None

    def _gated(self, node: Any, split: Any) -> None:
        """Of two products side by side the first is activated, then multiplied with the second."""
        self._take(split)
        up, gate = split.output
        readers = [one for one in self._nodes if up in one.input]
        activation = _ACTIVATIONS.get(readers[0].op_type) if len(readers) == 1 else None
        last = readers[-1]
        if [one.op_type for one in readers] == ["Sigmoid", "Mul"] and readers[0].output[0] in last.input:
            activation = "silu"
        product = self._only_reader(last)
        if activation is None or product is None or product.op_type != "Mul" or gate not in product.input:
            raise refusal(f"{split.name}, parts of a product that are no gate")
        for taken in (*readers, product):
            self._take(taken)
        source = self._buffer(node, 0)
        parts = dict(zip(("weights", "scales", "bias"), node.input[1:4], strict=True))
        width = self._array(parts["weights"]).shape[1] // 2
        first, target = self._buffers.take(width, source.per), self._buffers.take(width, source.per)
        for at, buffer, given in ((0, first, {"activation": activation}), (width, target, {"residual": first.buffer})):
            tensors = {}
            for part, name in parts.items():
                tensors[part] = f"{name}/{at}"
                self._tensors[tensors[part]] = np.ascontiguousarray(self._array(name)[..., at : at + width])
            if source.factors:
                tensors["factors"] = self._keep(source.factors)
            self._step(
                node, "linear8", source=source.buffer, target=buffer.buffer, inputs=len(self._array(parts["weights"])),
                outputs=width, gated=at > 0, tensors=tensors, **given,
            )  # fmt: skip
        self._left[first.buffer] = 1
        self._write(product, target, source, first)

    def _rotary(self, node: Any) -> None:
        """Rotary positions, which the attention that reads the value applies."""
        value, given = self._buffer(node, 0), attributes(node)
        if self._array(node.input[1]).tolist() != [0] or given.get("interleaved") or given.get("rotary_embedding_dim"):
            raise refusal(f"{node.name}, rotary positions of another kind")
        if value.factors or value.per != "token":
            raise refusal(f"{node.name}, rotary positions of what are no queries or keys")
        self._known[node.output[0]] = replace(value, rotary=(self._keep(node.input[2]), self._keep(node.input[3])))
        self._left[value.buffer] += self._readers[node.output[0]] - 1

    def _rotate(self, node: Any, buffer: int, width: int, heads: int, tables: tuple[str, str]) -> None:
        cosines, sines = tables
        self._step(
            node, "rotate", source=buffer, target=buffer, outputs=width, heads=heads,
            positions=len(self._tensors[cosines]), tensors={"cosines": cosines, "sines": sines},
        )  # fmt: skip

    def _linear32(self, node: Any) -> None:
        """A small product, left in floating point."""
        source = self._buffer(node, 0)
        weight = self._array(node.input[1])
        weight = weight if attributes(node).get("transB", 0) else weight.T
        last, bias = node, node.input[2] if len(node.input) > 2 else ""
        after = self._only_reader(node)
        if not bias and after is not None and after.op_type == "Add":
            (bias,) = [one for one in after.input if one != node.output[0]] or [""]
            if bias not in self._constants:
                raise refusal(f"{after.name}, which adds other than a bias")
            last = self._take(after)
        if source.factors or weight.ndim != 2:
            raise refusal(f"the product {node.name}")
        added = self._keep(bias) if bias else f"no bias {len(weight)}"
        self._tensors.setdefault(added, np.zeros(len(weight), np.float32))
        last, activation = self._activation_after(last)
        name = f"{node.input[1]}/rows"
        self._tensors[name] = np.ascontiguousarray(weight, np.float32)
        target = self._buffers.take(len(weight), source.per)
        self._step(
            node, "linear32", source=source.buffer, target=target.buffer, inputs=weight.shape[1], outputs=len(weight),
            activation=activation, tensors={"weights": name, "bias": added},
        )  # fmt: skip
        self._write(last, target, source)

    def _split(self, node: Any) -> None:
        whole = self._buffer(node, 0)
        for index, name in enumerate(node.output):
            self._known[name] = Part(whole, index, len(node.output))

    def _attention(self, node: Any) -> None:
        """Of three parts of one product, or of three products, whose biases may stand here."""
        if len(node.input) < 5 or not isinstance(self._find(node, 4), Mask):
            raise refusal(f"{node.name}, an attention without the mask")
        given = attributes(node)
        heads = int(given["num_heads"])
        parts = [self._find(node, index) for index in range(3)]
        if all(isinstance(part, Part) and (part.index, part.count) == (at, 3) for at, part in enumerate(parts)):
            queries = keys = values = parts[0].whole
            width = queries.width // 3
        elif all(isinstance(part, GraphValue) and not part.factors for part in parts):
            if node.input[3]:
                bias = self._array(node.input[3])
                spread_bias(self._steps, self._tensors, [part.buffer for part in parts], bias, node.input[3])
            queries, keys, values = self._together(parts)
            width = parts[0].width
        else:
            raise refusal(f"{node.name}, an attention of what are no products")
        if queries.per == "chosen" or any(one.per != "token" for one in (keys, values)):
            raise refusal(f"{node.name}, an attention over other than all tokens")
        if width % (heads * WIDTH // 2):
            raise refusal(f"heads of {width // heads} numbers, no multiple of {WIDTH // 2}")
        turned = [part.rotary if isinstance(part, GraphValue) else None for part in parts[:2]]
        if queries is keys and turned[0] is not None and turned[0] == turned[1]:
            self._rotate(node, queries.buffer, 2 * width, 2 * heads, turned[0])
        elif queries is not keys:
            for part, tables in zip((queries, keys), turned, strict=True):
                if tables is not None:
                    self._rotate(node, part.buffer, width, heads, tables)
        elif any(turned):
            raise refusal(f"{node.name}, rotary positions of queries or keys alone")
        positions = len(self._tensors[turned[1][0]]) if turned[1] else 0
        distances = self._bias_of(node, heads, queries, positions)
        target = self._buffers.take(width, queries.per)
        self._step(
            node, "attention", source=queries.buffer, keys=keys.buffer, values=values.buffer,
            target=target.buffer, outputs=width, heads=heads,
            epsilon=float(given.get("scale", 0.0)) or (width // heads) ** -0.5,
            positions=distances.positions if distances else 0,
            tensors={"distances": distances.table} if distances else {},
        )  # fmt: skip
        self._write(node, target, *dict.fromkeys((queries, keys, values)))

    def _bias_of(self, node: Any, heads: int, queries: GraphValue, positions: int) -> Distances | None:
        """What the attention adds to its scores. `positions`: of the rotary tables; 0: none."""
        if not any(node.input[5:]):
            return None
        value = self._find(node, 5)
        if isinstance(value, LocalWindow) and value.reach is not None and positions:
            name = f"window {value.reach} of {heads} heads and {positions} positions"
            if name not in self._tensors:
                self._tensors[name] = window_bias(value.reach, heads, positions)
            value = Distances(name, positions, value.first)
        if any(node.input[6:]) or not isinstance(value, Distances):
            raise refusal(f"{node.name}, which adds to the scores what is no bias of distances")
        if value.first != (queries.per == "row") or len(self._tensors[value.table]) != heads:
            raise refusal(f"{node.name}, whose bias on the scores is for other queries")
        return value

    def _together(self, values: Sequence[GraphValue]) -> Sequence[GraphValue]:
        """Three products of one source as one product that has all three results side by side."""
        steps = self._steps[-3:]
        made = side_by_side(steps, self._tensors)
        if made is None or [step.target for step in steps] != [value.buffer for value in values]:
            return values
        if any(self._left[value.buffer] > 1 for value in values):
            return values
        whole = self._buffers.take(made.outputs, values[0].per)
        self._left[whole.buffer] = 1
        for value in values:
            self._buffers.give(value)
        self._steps[-3:] = [made.model_copy(update={"target": whole.buffer})]
        return (whole, whole, whole)

    def _squeeze(self, node: Any) -> None:
        """The first token of each row has no axis of its own here, nor has one number of each line."""
        part = self._find(node, 0)
        if isinstance(part, Part) and part.whole.width == part.count and self._array(node.input[1]).tolist() == [2]:
            self._known[node.output[0]] = Column(part.whole, part.index)
            return
        value = self._buffer(node, 0)
        if value.per != "row":
            raise refusal(f"{node.name}, which takes an axis away")
        self._known[node.output[0]] = value
        self._left[value.buffer] += self._readers[node.output[0]] - 1

    def _add(self, node: Any) -> None:
        one, other = self._find(node, 0), self._find(node, 1)
        if other is None and node.input[1] in self._constants and len(self._array(node.input[1])) == 1:
            other = TableSum(types=node.input[1])  # the only type
        if not isinstance(one, TableSum) or not isinstance(other, TableSum):
            raise refusal(f"the sum {node.name}")
        return self._set(
            node,
            TableSum(
                one.words or other.words,
                one.positions or other.positions,
                one.types or other.types,
                max(one.padding, other.padding),
            ),
        )

    def _mul(self, node: Any) -> None:
        """By a constant for each channel, which the quantiser of the row takes in."""
        value = self._buffer(node, 0)
        if isinstance(self._find(node, 1), Mask) and value.per == "token" and not value.factors:
            self._set(node, MaskedLines(value))
            return
        if node.input[1] not in self._constants or value.factors:
            raise refusal(f"the product {node.name}")
        self._known[node.output[0]] = replace(value, factors=node.input[1])
        self._left[value.buffer] += self._readers[node.output[0]] - 1

    def _sum(self, node: Any) -> None:
        """Over the tokens of each row."""
        lines = self._find(node, 0)
        over_tokens = self._array(node.input[1]).tolist() == [1] and not attributes(node).get("keepdims", 1)
        if not isinstance(lines, MaskedLines) or lines.summed or not over_tokens:
            raise refusal(f"the sum {node.name}")
        self._set(node, replace(lines, summed=True))

    def _average(self, node: Any) -> None:
        """Over the tokens of each row that are not padding."""
        lines = self._find(node, 0)
        if not isinstance(lines, MaskedLines) or not lines.summed or self._find(node, 1) != "tokens of each row":
            raise refusal(f"the quotient {node.name}")
        source = lines.whole
        target = self._buffers.take(source.width, "row")
        self._step(node, "average", source=source.buffer, target=target.buffer, outputs=source.width)
        self._write(node, target, source)

    def _identity(self, node: Any) -> None:
        value = self._find(node, 0)
        whole = value.whole if isinstance(value, Column) else self._buffer(node, 0)
        if whole.factors:
            raise refusal(f"the operator Identity ({node.name})")
        self._left[whole.buffer] += 1  # the result is not overwritten
        self._results[node.output[0]] = whole if not isinstance(value, Column) else value

    # ---- what follows a product ----

    def _activation_after(self, node: Any) -> tuple[Any, Activation]:
        after = self._only_reader(node)
        if after is None or after.op_type not in _ACTIVATIONS:
            return node, "none"
        return self._take(after), _ACTIVATIONS[after.op_type]

    def _residual_after(self, node: Any) -> tuple[Any, GraphValue | None]:
        after = self._only_reader(node)
        if after is None or after.op_type not in {"Sum", "Add"} or len(after.input) != 2:
            return node, None
        (other,) = [name for name in after.input if name != node.output[0]] or [""]
        value = self._known.get(other)
        if not isinstance(value, GraphValue) or value.factors:
            raise refusal(f"the sum {after.name}")
        return self._take(after), value

    def _only_reader(self, node: Any) -> Any | None:
        return self._after[node.output[0]] if self._readers[node.output[0]] == 1 else None

    def _take(self, node: Any) -> Any:
        self._done.add(id(node))
        return node

    # ---- values ----

    def _find(self, node: Any, index: int) -> Any:
        return self._known.get(node.input[index])

    def _buffer(self, node: Any, index: int) -> GraphValue:
        value = self._find(node, index)
        if not isinstance(value, GraphValue):
            raise refusal(f"{node.name}, which reads what is no hidden state")
        return value

    def _array(self, name: str) -> Any:
        if name not in self._constants:
            raise refusal(f"{name}, which is no constant")
        return numpy_helper.to_array(self._constants[name])

    def _is_output(self, node: Any) -> bool:
        """Whether nothing but the graph's caller reads what a node makes."""
        after = self._only_reader(node)
        return after is not None and after.op_type == "Identity"

    def _keep(self, name: str, columns: int = 0) -> str:
        """Put a constant into the file, with zeros up to this number of columns."""
        array = self._array(name)
        missing = max(columns - array.shape[-1], 0)
        name = f"{name}/{columns}" if missing else name
        if name not in self._tensors:
            padded = np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, missing)])
            self._tensors[name] = np.ascontiguousarray(padded)
        return name

    def _set(self, node: Any, value: Any) -> None:
        self._known[node.output[0]] = value

    def _write(self, node: Any, target: GraphValue, *read: GraphValue) -> None:
        """The node's result is there, and what was read has a reader less."""
        self._known[node.output[0]] = target
        self._left[target.buffer] = self._readers[node.output[0]]
        for value in read:
            self._left[value.buffer] -= 1
            if not self._left[value.buffer]:
                self._buffers.give(replace(value, factors=""))

    def _step(self, node: Any, operator: Operator, *, outputs: int, inputs: int = 0, **fields: Any) -> None:
        widths = {"linear8": (inputs, outputs), "linear32": (inputs,)}.get(operator, (outputs,))
        for width in widths:
            if width % WIDTH:
                raise refusal(f"{node.name}, whose width of {width} is no multiple of {WIDTH}")
        self._steps.append(GraphStep(operator=operator, outputs=outputs, inputs=inputs, **fields))
