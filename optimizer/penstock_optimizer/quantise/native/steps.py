"""From a quantised ONNX graph to the steps of the native engine. Pure.

It knows what `export.build` writes, quantised by `RowwiseWriter`, node by node, and refuses all else with the reason.
A product takes in its activation and the residual sum after it, since that saves a pass over the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from penstock_optimizer.quantise.linear import attributes
from penstock_optimizer.quantise.native.reading import ACTIVATIONS, WIDTH, AttentionReading, DistanceTerms
from penstock_optimizer.quantise.native.values import (
    BufferPart,
    Column,
    Counted,
    DistanceTable,
    GraphValue,
    Heads,
    LastPlace,
    Mask,
    MaskedLines,
    ScoreBias,
    TableSum,
    Where,
    of_inputs,
    refusal,
)
from penstock_optimizer.quantise.quantiser import OPERATOR
from penstock_runtime.engines.native.graph_file import GraphOutput, NativeGraph


def native_graph(model: Any) -> NativeGraph:
    """The steps and tensors. OptimizationError for a graph that the native engine cannot run, with the reason."""
    return _Reader(model).read()


class _Reader(AttentionReading):
    def read(self) -> NativeGraph:
        """All nodes in order."""
        nodes: Mapping[str, Callable[[Any], None]] = {
            "Gather": self._gather, "Slice": self._slice, "GatherND": self._gather_chosen, "Squeeze": self._squeeze,
            "Add": self._add, "Sum": self._add, "Mul": self._mul, "LayerNormalization": self._norm,
            "Split": self._split, "MultiHeadAttention": self._attention, OPERATOR: self._linear8,
            "MatMul": self._linear32, "Gemm": self._linear32, "Identity": self._identity,
            "RotaryEmbedding": self._rotary, "ReduceSum": self._sum, "Div": self._average,
            "Pow": self._root_mean_square_norm, "Reshape": self._reshape, "Expand": self._expand, "Where": self._where,
            "Transpose": self._transpose,
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
                where = [self._array(node.input[at]).tolist() for at in (1, 3)]
                if where != [[0, 0], [2, 3]]:
                    raise refusal(f"{node.name}, a bias on the scores that is not one of distances")
                return self._set(node, ScoreBias(table=node.input[0]))
            return self._set(node, TableSum(positions=node.input[0]))
        value, part = self._find(node, 0), [self._array(name).tolist() for name in node.input[1:4]]
        if isinstance(value, ScoreBias) and part == [[0], [1], [2]]:
            return self._set(node, replace(value, first=True))
        source = self._buffer(node, 0)
        if part != [[0], [1], [1]] or source.per != "token":
            raise refusal(f"{node.name}, which slices other than the first token")
        target = self._buffers.take(source.width, "row")
        self._step(node, "first", source=source.buffer, target=target.buffer, outputs=source.width)
        self._write(node, target, source)
        return None

    def _gather_chosen(self, node: Any) -> None:
        """The lines of the tokens of one id."""
        source, where = self._buffer(node, 0), self._find(node, 1)
        if isinstance(where, LastPlace) and source.per == "token" and not source.factors:
            target = self._buffers.take(source.width, "row")
            self._step(
                node, "last", source=source.buffer, target=target.buffer, outputs=source.width,
                padding=where.token_id, gated=where.other,
            )  # fmt: skip
            return self._write(node, target, source)
        if not isinstance(where, Where) or not where.turned or attributes(node).get("batch_dims", 0):
            raise refusal(f"{node.name}, which gathers by what is no place of tokens")
        if source.per != "token" or source.factors or self._chosen not in (-1, where.number):
            raise refusal(f"{node.name}, which gathers what is no line of tokens, or tokens of a second id")
        self._chosen = where.number
        target = self._buffers.take(source.width, "chosen")
        self._step(
            node, "chosen", source=source.buffer, target=target.buffer, outputs=source.width, padding=where.number
        )
        return self._write(node, target, source)

    def _where(self, node: Any) -> None:
        """Padding that repeats the first token, so that it changes no maximum: the maximum leaves padding out."""
        mask, states, first = (self._find(node, index) for index in range(3))
        made = self._steps[-1]
        if (
            not isinstance(mask, Mask) or not isinstance(states, GraphValue) or not isinstance(first, GraphValue)
            or (made.operator, made.source, made.target) != ("first", states.buffer, first.buffer)
        ):  # fmt: skip
            raise refusal(f"the operator Where ({node.name})")
        self._steps.pop()
        self._buffers.give(first)
        after = self._only_reader(node)
        lines = after is not None and after.op_type == "Reshape" and self._array(after.input[1]).tolist()
        if lines != [-1, states.width]:
            raise refusal(f"the operator Where ({node.name})")
        last = self._take(after)
        self._set(last, states)
        self._left[states.buffer] += self._readers[last.output[0]] - 1

    # ---- steps ----

    def _norm(self, node: Any) -> None:
        value = self._buffer(node, 0)
        target = self._buffers.take(value.width, value.per)
        epsilon = attributes(node).get("epsilon", 1e-5)
        tensors = {"weights": self._keep(node.input[1]), "bias": self._keep(node.input[2])}
        self._step(
            node, "norm", source=value.buffer, target=target.buffer, outputs=value.width, epsilon=epsilon,
            tensors=tensors,
        )  # fmt: skip
        self._write(node, target, value)

    def _linear8(self, node: Any) -> None:
        source, after = self._buffer(node, 0), self._only_reader(node)
        if after is not None and after.op_type == "Split" and len(after.output) == 2:
            return self._gated(node, after)
        if after is not None and after.op_type == "Reshape" and after.input[1] not in self._constants:
            return self._largest(node, after)
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

    def _largest(self, node: Any, reshape: Any) -> None:
        """The largest logit of each word over the tokens, and its logarithms, or their sum: a sparse vector."""
        chain, source = [reshape], self._buffer(node, 0)
        while (after := self._only_reader(chain[-1])) is not None and after.op_type != "Identity":
            chain.append(self._take(after))
        names = [one.op_type for one in chain]
        logarithms, sums = ["Add", "Log"] * names.count("Log"), names[-1] == "ReduceSum"
        expected = ["Mul", "Relu", *logarithms, "ReduceSum"] if sums else ["ReduceMax", "Relu", *logarithms]
        if names != ["Reshape", *expected] or not logarithms:
            raise refusal(f"the operator Reshape ({reshape.name})")
        axes = self._array(chain[-1].input[1]).tolist() if sums else attributes(chain[1]).get("axes")
        casts = [one for one in self._nodes if one.op_type == "Cast" and one.output[0] in chain[1].input]
        masked = not sums or any(isinstance(self._find(one, 0), Mask) for one in casts)
        if axes != [1] or not masked or any(self._array(one.input[1]) != 1 for one in chain if one.op_type == "Add"):
            raise refusal(f"weights of a sparse vector of another kind ({reshape.name})")
        if source.per != "token":
            raise refusal(f"{reshape.name}, weights of other than tokens")
        self._take(reshape)
        inputs, used = self._array(node.input[1]).shape
        outputs = -(-used // WIDTH) * WIDTH
        parts = zip(("weights", "scales", "bias"), node.input[1:4], strict=True)
        tensors = {part: self._keep(one, outputs) for part, one in parts}
        if source.factors:
            tensors["factors"] = self._keep(source.factors)
        target = replace(self._buffers.take(outputs, "row"), used=used)
        self._step(
            node, "largest", source=source.buffer, target=target.buffer, inputs=inputs, outputs=outputs,
            types=len(logarithms) // 2, gated=sums, tensors=tensors,
        )  # fmt: skip
        self._write(chain[-1], target, source)

    def _gated(self, node: Any, split: Any) -> None:
        """Of two products side by side the first is activated, then multiplied with the second."""
        self._take(split)
        up, gate = split.output
        readers = [one for one in self._nodes if up in one.input]
        activation = ACTIVATIONS.get(readers[0].op_type) if len(readers) == 1 else None
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

    def _linear32(self, node: Any) -> None:
        """A small product, left in floating point."""
        heads, vectors = self._find(node, 0), self._find(node, 1)
        if isinstance(heads, Heads) and isinstance(vectors, DistanceTable):
            return self._distance_products(node, heads, vectors)
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
        return None

    def _split(self, node: Any) -> None:
        whole = self._buffer(node, 0)
        for index, name in enumerate(node.output):
            self._known[name] = BufferPart(whole, index, len(node.output))

    def _squeeze(self, node: Any) -> None:
        """Neither the first token of each row nor one number of each line has an axis here."""
        part = self._find(node, 0)
        if (
            isinstance(part, BufferPart)
            and part.whole.width == part.count
            and self._array(node.input[1]).tolist() == [2]
        ):
            self._known[node.output[0]] = Column(part.whole, part.index)
            return
        value = self._buffer(node, 0)
        if value.per != "row":
            raise refusal(f"{node.name}, which takes an axis away")
        self._known[node.output[0]] = value
        self._left[value.buffer] += self._readers[node.output[0]] - 1

    def _add(self, node: Any) -> None:
        one, other = self._find(node, 0), self._find(node, 1)
        if isinstance(one, DistanceTerms) and isinstance(other, DistanceTerms):
            both = one.plus(other)
            if both is None:
                raise refusal(f"{node.name}, a sum of scores of different distances")
            return self._set(node, both)
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
                max(one.scale, other.scale, key=lambda scale: scale != 1),
            ),
        )

    def _mul(self, node: Any) -> None:
        """By a constant for each channel, which the quantiser of the row takes in; of word vectors by one number."""
        tables = self._find(node, 0)
        if isinstance(tables, TableSum) and node.input[1] in self._constants and not self._array(node.input[1]).shape:
            return self._set(node, replace(tables, scale=float(self._array(node.input[1]))))
        heads, vectors = tables, self._find(node, 1)
        if isinstance(heads, Heads) and isinstance(vectors, DistanceTable):
            return self._distance_products(node, heads, vectors)
        value = self._buffer(node, 0)
        if isinstance(self._find(node, 1), Mask) and value.per == "token" and not value.factors:
            return self._set(node, MaskedLines(value))
        if node.input[1] not in self._constants or value.factors:
            raise refusal(f"the product {node.name}")
        self._known[node.output[0]] = replace(value, factors=node.input[1])
        self._left[value.buffer] += self._readers[node.output[0]] - 1
        return None

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
