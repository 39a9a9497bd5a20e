"""Reads attention: queries, keys and values with their norms and rotary positions, and the bias on the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock_optimizer.quantise.linear import attributes
from penstock_optimizer.quantise.native.distances import DistanceReading, DistanceTerms
from penstock_optimizer.quantise.native.inputs import Mask, ScoreBias, distance_table
from penstock_optimizer.quantise.native.reading import WIDTH
from penstock_optimizer.quantise.native.values import (
    BufferPart,
    GraphValue,
    HeadNorm,
    Heads,
    refusal,
    side_by_side,
    spread_bias,
)
from penstock_runtime.engines.native.graph_file import DISTANCES_SPARE


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
