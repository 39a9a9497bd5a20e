"""Reads a graph for the native engine: its state (steps, buffers, tensors, meanings of values), and the attention:
queries, keys and values with their norms and rotary positions, the bias on the scores, and scores by distance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from penstock_optimizer.quantise.linear import attributes
from penstock_optimizer.quantise.native.values import (
    INPUTS,
    BufferPart,
    Buffers,
    Column,
    DistanceTable,
    GraphValue,
    HeadNorm,
    Heads,
    Mask,
    MaskedLines,
    ScoreBias,
    TableSum,
    distance_table,
    narrow,
    refusal,
    side_by_side,
    spread_bias,
)
from penstock_runtime.engines.native.graph_file import DISTANCES_SPARE, Activation, GraphStep, Operator

WIDTH = 32
"""Widths of hidden states are multiples of it, widths of heads of half of it: the kernels have no tails."""
ACTIVATIONS: Mapping[str, Activation] = {
    "Gelu": "gelu", "FastGelu": "gelu-tanh", "Relu": "relu", "Tanh": "tanh",
}  # fmt: skip


class Reading:
    """The base of the readers of nodes."""

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

    def _embed(self, node: Any, tables: TableSum) -> GraphValue:
        if not tables.words:
            raise refusal(f"{node.name}, embeddings without words")
        words = self._array(tables.words) * np.float32(tables.scale)
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
        return target

    def _activation_after(self, node: Any) -> tuple[Any, Activation]:
        after = self._only_reader(node)
        if after is None or after.op_type not in ACTIVATIONS:
            return node, "none"
        return self._take(after), ACTIVATIONS[after.op_type]

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

    def _find(self, node: Any, index: int) -> Any:
        return self._known.get(node.input[index])

    def _buffer(self, node: Any, index: int) -> GraphValue:
        value = self._find(node, index)
        if isinstance(value, TableSum):
            value = self._embed(node, value)
            self._set_value(node.input[index], value)
        if not isinstance(value, GraphValue):
            raise refusal(f"{node.name}, which reads what is no hidden state")
        return value

    def _array(self, name: str) -> Any:
        if name not in self._constants:
            raise refusal(f"{name}, which is no constant")
        return numpy_helper.to_array(self._constants[name])

    def _is_output(self, node: Any) -> bool:
        """True if only the graph's caller reads the result of a node."""
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

    def _set_value(self, name: str, value: GraphValue) -> None:
        """The buffer of a value that is written."""
        self._known[name] = value
        self._left[value.buffer] = self._readers[name]

    def _set(self, node: Any, value: Any) -> None:
        self._known[node.output[0]] = value

    def _write(self, node: Any, target: GraphValue, *read: GraphValue) -> None:
        """The node's result is written, and each value that it read has one reader less."""
        self._set_value(node.output[0], target)
        for value in read:
            self._left[value.buffer] -= 1
            if not self._left[value.buffer]:
                self._buffers.give(replace(value, factors=""))

    def _step(self, node: Any, operator: Operator, *, outputs: int, inputs: int = 0, **fields: Any) -> None:
        widths = {
            "linear8": (inputs, outputs), "largest": (inputs, outputs), "linear32": (inputs,),
            **dict.fromkeys(("first", "last", "chosen", "average"), ()),
        }.get(operator, (outputs,))  # fmt: skip
        for width in widths:
            if width % WIDTH:
                raise refusal(f"{node.name}, whose width of {width} is no multiple of {WIDTH}")
        self._steps.append(GraphStep(operator=operator, outputs=outputs, inputs=inputs, **fields))


MOST_ROWS = 2**15
"""Vectors of distances: their numbers have 16 bits in the file."""


@dataclass(frozen=True, eq=False)
class DistanceTerms:
    """Products of queries, and of keys, with vectors of the distance from query to key."""

    rows: NDArray[np.int64]
    """[2 * positions - 1]: the vector for each distance, from a key that is furthest before its query to one that is
    furthest after it."""
    first: bool
    """For the first token's query alone."""
    queries: GraphValue | None = None
    """What `query_vectors` are multiplied with."""
    query_vectors: str = ""
    """A constant: [heads, rows, width of a head]."""
    keys: GraphValue | None = None
    key_vectors: str = ""

    def plus(self, other: DistanceTerms) -> DistanceTerms | None:
        """The sum; None if both are products with the same, or their distances differ."""
        one, two = (self, other) if self.queries is not None else (other, self)
        if one.keys is not None or two.queries is not None or one.first != two.first:
            return None
        if not np.array_equal(one.rows, two.rows):
            return None
        return DistanceTerms(one.rows, one.first, one.queries, one.query_vectors, two.keys, two.key_vectors)

    @property
    def positions(self) -> int:
        """The number of tokens that it is for."""
        return (len(self.rows) + 1) // 2


class DistanceReading(Reading):
    """The nodes between queries and keys and the terms of their scores."""

    def _transpose(self, node: Any) -> None:
        """Heads of queries or keys before their tokens. The attention itself reads these where they are."""
        value = self._find(node, 0)
        if isinstance(value, MaskedLines):
            raise refusal(f"a convolution over neighbouring tokens ({node.name})")
        if not isinstance(value, Heads) or value.grouped or attributes(node).get("perm") != [0, 2, 1, 3]:
            raise refusal(f"the operator Transpose ({node.name})")
        self._left[value.whole.buffer] -= 1
        self._set(node, value)

    def _distance_products(self, node: Any, heads: Heads, vectors: DistanceTable) -> None:
        """MatMul of heads with vectors, of which each line takes its distances; or, of the keys for the
        first token's query, Mul and ReduceSum."""
        chain = [node]
        while (after := self._only_reader(chain[-1])) is not None and after.op_type in {
            "Reshape", "Slice", "ReduceSum", "Transpose",
        }:  # fmt: skip
            chain.append(self._take(after))
        names = [one.op_type for one in chain]
        of_keys = names[-1] == "Transpose"
        expected = {
            (False, False): ["MatMul", "Reshape", "Slice", "Reshape", "Slice"],
            (False, True): ["MatMul", "Reshape", "Slice", "Reshape", "Slice", "Transpose"],
            (True, False): ["MatMul"],
            (True, True): ["Mul", "ReduceSum", "Transpose"],
        }[vectors.first, of_keys]
        if names != expected or vectors.turned != (names[0] == "MatMul") or not self._shifts(chain[1:5]):
            raise refusal(f"{node.name}, products with vectors of distances in another order")
        if of_keys and attributes(chain[-1]).get("perm") != [0, 1, 3, 2]:
            raise refusal(f"{chain[-1].name}, scores in another order")
        rows = self._rows(node, vectors, of_keys=of_keys)
        if of_keys:
            scores = DistanceTerms(rows, vectors.first, keys=heads.whole, key_vectors=vectors.table)
        else:
            scores = DistanceTerms(rows, vectors.first, queries=heads.whole, query_vectors=vectors.table)
        self._set(chain[-1], scores)

    def _shifts(self, nodes: list[Any]) -> bool:
        """Whether the nodes after a product leave out one number less in each line, then all but as many as tokens; or
        add up the numbers of each vector."""
        if len(nodes) < 4:
            return all(self._array(one.input[1]).tolist() == [3] for one in nodes if one.op_type == "ReduceSum")
        flat, skipped, lines, shifted = nodes
        return all(
            (
                self._array(flat.input[1]).tolist() == [0, 0, -1],
                (self._find(skipped, 1), self._array(skipped.input[3]).tolist()) == ("length less 1", [2]),
                self._find(lines, 1) == "lines of distances",
                self._array(shifted.input[1]).tolist() == [0],
                (self._find(shifted, 2), self._array(shifted.input[3]).tolist()) == ("length", [3]),
            )
        )

    def _rows(self, node: Any, vectors: DistanceTable, *, of_keys: bool) -> NDArray[np.int64]:
        """`DistanceTerms.rows`, from the constant in the order of the products.

        The products are made of the constant from number positions - length on; token i reads them from number
        length - 1 - i on. So number n of the constant is for the token n - (positions - 1) after token i.
        """
        order = self._array(vectors.order)
        positions = len(order) - 1 if vectors.first else len(order) // 2
        table = self._constants[vectors.table].dims
        if positions < 1 or len(table) != 3 or (not vectors.first and vectors.middle != positions):
            raise refusal(f"{node.name}, vectors of distances in another order")
        if not 0 <= order.min() <= order.max() < min(table[1], MOST_ROWS):
            raise refusal(f"{node.name}, distances without a vector")
        if vectors.first:  # no key is before its query
            return np.concatenate([np.repeat(order[:1], positions - 1), order[:positions]])
        return np.asarray(order[::-1][1:] if of_keys else order[:-1])


class AttentionReading(DistanceReading):
    """The nodes around an attention."""

    def _reshape(self, node: Any) -> None:
        """Into heads, or back."""
        if node.input[1] not in self._constants:
            raise refusal(f"{node.name}, which changes the shape of what are no heads")
        value, shape = self._find(node, 0), self._array(node.input[1]).tolist()
        match value, shape:
            case GraphValue(per="token", factors=""), [0, 0, -1, width]:
                self._set(node, Heads(value, width))
            case GraphValue(factors=""), [0, 0, heads, width] if heads * width == value.width:
                self._set(node, Heads(value, width))
            case GraphValue(per="token", factors=""), [0, 0, heads, 1, -1]:
                self._set(node, Heads(value, value.width // heads, grouped=True))
            case GraphValue(per="token"), [-1, width] if width == value.width:
                self._known[node.output[0]] = value  # all rows' tokens one after the other, as they are
                self._left[value.buffer] += self._readers[node.output[0]] - 1
            case Heads(whole=whole), [0, 0, -1]:
                self._set(node, whole)
                self._left[whole.buffer] += self._readers[node.output[0]] - 1
            case _:
                raise refusal(f"{node.name}, which changes the shape of what are no heads")

    def _expand(self, node: Any) -> None:
        """Each head of keys or values for several heads of queries, which read it where it is."""
        value, shape = self._find(node, 0), self._array(node.input[1]).tolist()
        if not isinstance(value, Heads) or not value.grouped or shape != [1, 1, 1, shape[3], 1]:
            raise refusal(f"{node.name}, which repeats what are no keys or values")
        self._set(node, Heads(replace(value.whole, repeated=shape[3]), value.width))

    def _root_mean_square_norm(self, node: Any) -> None:
        """Of hidden states, or of each head by itself, which the attention that reads the value applies."""
        value = self._find(node, 0)
        if not isinstance(value, Heads):
            value = self._buffer(node, 0)
        nodes = [node]
        for operator in ("ReduceMean", "Add", "Sqrt", "Div", "Mul"):
            after = self._only_reader(nodes[-1])
            if after is None or after.op_type != operator:
                raise refusal(f"the operator Pow ({node.name})")
            nodes.append(self._take(after))
        power, _, added, _, divided, last = nodes
        weights = [name for name in last.input if name != divided.output[0]]
        if self._array(power.input[1]).tolist() != 2 or divided.input[0] != power.input[0] or len(weights) != 1:
            raise refusal(f"the operator Pow ({node.name})")
        epsilon = float(self._array(added.input[1]))
        if isinstance(value, Heads):
            if value.grouped or value.width % WIDTH:
                raise refusal(f"normalised heads of {value.width} numbers, no multiple of {WIDTH}")
            norm = HeadNorm(self._keep(weights[0]), epsilon)
            self._set(last, replace(value, whole=replace(value.whole, head_norm=norm)))
            return
        if value.factors:
            raise refusal(f"{node.name}, which normalises what is smoothed")
        last, residual = self._residual_after(last)
        target = self._buffers.take(value.width, value.per)
        self._step(
            node, "norm", source=value.buffer, target=target.buffer, outputs=value.width, epsilon=epsilon,
            residual=residual.buffer if residual else -1, tensors={"weights": self._keep(weights[0])},
        )  # fmt: skip
        self._write(last, target, value, value, *([residual] if residual else []))

    def _rotary(self, node: Any) -> None:
        """Rotary positions, which the attention that reads the value applies."""
        value, given = self._buffer(node, 0), attributes(node)
        if self._array(node.input[1]).tolist() != [0] or given.get("interleaved") or given.get("rotary_embedding_dim"):
            raise refusal(f"{node.name}, rotary positions of another kind")
        if value.factors or value.per != "token":
            raise refusal(f"{node.name}, rotary positions of what are no queries or keys")
        self._known[node.output[0]] = replace(value, rotary=(self._keep(node.input[2]), self._keep(node.input[3])))
        self._left[value.buffer] += self._readers[node.output[0]] - 1

    def _attention(self, node: Any) -> None:
        """Of three parts of one product, or of three products; the node may have the biases of the products."""
        if len(node.input) < 5 or not isinstance(self._find(node, 4), Mask):
            raise refusal(f"{node.name}, an attention without the mask")
        given = attributes(node)
        heads, group = int(given["num_heads"]), 1
        parts = [self._find(node, index) for index in range(3)]
        if all(isinstance(part, BufferPart) and (part.index, part.count) == (at, 3) for at, part in enumerate(parts)):
            queries = keys = values = parts[0].whole
            width = queries.width // 3
        elif all(isinstance(part, GraphValue) and not part.factors for part in parts):
            if node.input[3]:
                bias = self._array(node.input[3])
                spread_bias(self._steps, self._tensors, [part.buffer for part in parts], bias, node.input[3])
            queries, keys, values = self._together(parts)
            width, group = parts[0].width, parts[1].repeated
        else:
            raise refusal(f"{node.name}, an attention of what are no products")
        if queries.per == "chosen" or any(one.per != "token" for one in (keys, values)):
            raise refusal(f"{node.name}, an attention over other than all tokens")
        if width % (heads * WIDTH // 2):
            raise refusal(f"heads of {width // heads} numbers, no multiple of {WIDTH // 2}")
        if group > 1 and any((part.repeated, part.width) != (group, width // group) for part in parts[1:]):
            raise refusal(f"{node.name}, whose keys and values have different heads")
        if isinstance(parts[0], GraphValue):
            self._prepare(node, parts[:2], queries is keys, heads, group)
        bias = self._bias_of(node, heads, parts, queries)
        target = self._buffers.take(width, queries.per)
        self._step(
            node, "attention", source=queries.buffer, keys=keys.buffer, values=values.buffer,
            target=target.buffer, outputs=width, heads=heads, key_heads=heads // group if group > 1 else 0,
            epsilon=float(given.get("scale", 0.0)) or (width // heads) ** -0.5, **bias,
        )  # fmt: skip
        self._write(node, target, *dict.fromkeys((queries, keys, values)))

    def _prepare(self, node: Any, parts: Sequence[GraphValue], together: bool, heads: int, group: int) -> None:
        """Norms and rotary positions of queries and keys, which are parts of one buffer if they are `together`."""
        buffer = self._steps[-1].target
        for part, start, count in zip(parts, (0, parts[0].width), (heads, heads // group), strict=True):
            if part.head_norm is not None:
                at = buffer if together else part.buffer
                self._step(
                    node, "head-norm", source=at, target=at, inputs=start if together else 0, outputs=part.width,
                    heads=count, epsilon=part.head_norm.epsilon, tensors={"weights": part.head_norm.weights},
                )  # fmt: skip
        tables = [part.rotary for part in parts]
        if together and tables[0] is not None and tables[0] == tables[1]:
            self._rotate(node, buffer, sum(part.width for part in parts), heads + heads // group, tables[0])
        elif together and any(tables):
            raise refusal(f"{node.name}, rotary positions of queries or keys alone")
        else:
            for part, table, count in zip(parts, tables, (heads, heads // group), strict=True):
                if table is not None:
                    self._rotate(node, part.buffer, part.width, count, table)

    def _rotate(self, node: Any, buffer: int, width: int, heads: int, tables: tuple[str, str]) -> None:
        cosines, sines = tables
        self._step(
            node, "rotate", source=buffer, target=buffer, outputs=width, heads=heads,
            positions=len(self._tensors[cosines]), tensors={"cosines": cosines, "sines": sines},
        )  # fmt: skip

    def _bias_of(self, node: Any, heads: int, parts: Sequence[Any], queries: GraphValue) -> dict[str, Any]:
        """The bias on the scores, as fields of the attention's step; its tensors are put into the file."""
        if not any(node.input[5:]):
            return {}
        bias = self._find(node, 5)
        if isinstance(bias, DistanceTerms):
            return self._distances_of(node, heads, parts, bias)
        if any(node.input[6:]) or not isinstance(bias, ScoreBias):
            raise refusal(f"{node.name}, which adds to the scores what is no bias of distances")
        if bias.first != (queries.per == "row"):
            raise refusal(f"{node.name}, whose bias on the scores is for other queries")
        fields = {"before": bias.before, "after": bias.after}
        if not bias.table:
            return fields
        name = f"{bias.table}/distances"
        if name not in self._tensors:
            table = distance_table(bias, self._array(bias.table))
            if table is None or len(table) != heads:
                raise refusal(f"{node.name}, a bias on the scores that is not one of distances")
            self._tensors[name] = table
        positions = (self._tensors[name].shape[1] - DISTANCES_SPARE + 1) // 2
        return {**fields, "positions": positions, "tensors": {"distances": name}}

    def _distances_of(
        self, node: Any, heads: int, parts: Sequence[GraphValue], scores: DistanceTerms
    ) -> dict[str, Any]:
        """The fields of a step with vectors of distances."""
        found = ((scores.queries, scores.query_vectors, parts[0]), (scores.keys, scores.key_vectors, parts[1]))
        own = all(value is None or value is part for value, _, part in found)
        if not own or scores.first != (parts[0].per == "row"):
            raise refusal(f"{node.name}, whose bias on the scores is for other queries or keys")
        named = {
            role: name for role, (_, name, _) in zip(("distance_keys", "distance_queries"), found, strict=True) if name
        }
        shapes = {self._constants[name].dims[1] for name in named.values()}
        width = parts[0].width // heads
        if any(list(self._constants[name].dims) != [heads, *shapes, width] for name in named.values()):
            raise refusal(f"{node.name}, vectors of distances of other heads")
        rows = f"{next(iter(named.values()))}/rows"
        self._tensors[rows] = scores.rows.astype(np.int16)
        tensors = {**{role: self._keep(name) for role, name in named.items()}, "distance_rows": rows}
        return {"inputs": min(shapes), "positions": scores.positions, "tensors": tensors}

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
