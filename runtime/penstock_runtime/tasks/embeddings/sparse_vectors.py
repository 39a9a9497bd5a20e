"""feature-extraction of models with sparse vectors (SPLADE): a weight for each token of the vocabulary, most of them 0.

The graph gives all weights (`Head.SPARSE`). Here they become a sparse vector in the form that the client wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.resources.endpoint_parts.serving import Prompts
from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float, Int, Outputs, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, NUMBER_BYTES, Prepared, RequestLimits
from penstock_runtime.tasks.embeddings.feature_extraction import (
    PARAMETERS,
    SparseFormat,
    TokenIds,
    inputs,
    pieces_of,
    prefixed,
    refuse_others,
    texts_of,
    vector_label,
)
from penstock_runtime.tasks.fields import parse_parameters
from penstock_runtime.tasks.scores import finite
from penstock_runtime.tasks.texts import Fitter, PromptedTask, Truncation
from penstock_runtime.tokens import Pieces, Tokenizer

PAIR = np.dtype([("index", np.int64), ("value", np.float32)])
"""A token and its weight."""
USUAL_ANSWER_BYTES = 8_192
"""JSON of a text's sparse vector: some 250 tokens of 32 bytes. The real size is known after the model has run."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """The weights of a text that are not 0."""

    indices: Int
    """Token ids, ascending."""
    values: Float
    width: int
    """Size of the vocabulary."""

    def pairs(self) -> NDArray[Any]:
        """[n] of `PAIR`."""
        found = np.empty(len(self.indices), PAIR)
        found["index"], found["value"] = self.indices, self.values
        return found

    def dense(self) -> Float:
        """[width]"""
        vector = np.zeros(self.width, np.float32)
        vector[self.indices] = self.values
        return vector


@dataclass(frozen=True, slots=True)
class SparseRequest:
    """A checked request."""

    texts: list[str] | list[Pieces]
    single: bool
    """One text, not a list of them."""
    form: SparseFormat
    rule: Truncation
    label: bytes
    """See `Prepared.vectors`."""


class SparseVectors(PromptedTask):
    """The task."""

    name = TaskName.FEATURE_EXTRACTION

    def __init__(
        self,
        fitter: Fitter,
        folder: ModelFolder,
        limits: RequestLimits = DEFAULT_LIMITS,
        prompts: Prompts | None = None,
    ) -> None:
        super().__init__(fitter, folder, limits, prompts)
        self._inputs = inputs(limits)

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> SparseRequest:
        """See `Task`."""
        given = texts_of(self._inputs, inputs)
        values = parse_parameters(parameters, PARAMETERS)
        refuse_others(values)
        for name in ("normalize", "dimensions", "pooling"):
            if values[name] is not None:
                raise InvalidInput(
                    "this model gives sparse vectors, and the request asks for dense ones",
                    field=f"parameters.{name}",
                    remedy="Use /embed_sparse, or /predict without normalize, dimensions and pooling",
                )
        prefix = self._prompts.text(values["prompt_name"])
        form = SparseFormat(values["sparse_format"] or SparseFormat.PAIRS)
        rule = self._fitter.rule.asked(values["truncate"], values["truncation_direction"])
        label = vector_label(prompt=values["prompt_name"] or self._prompts.default_name, kind="sparse")
        if isinstance(given, TokenIds):
            texts = pieces_of(given, prefix, self.tokenizer.embedded_size)
            return SparseRequest(texts, given.single, form, rule, label)
        return SparseRequest(prefixed(given, prefix), isinstance(given, str), form, rule, label)

    def prepare(self, request: SparseRequest) -> Prepared:
        """See `Task`."""
        where = ["inputs"] if request.single else [f"inputs[{index}]" for index in range(len(request.texts))]
        rows, cut = self._fitter.singles(request.texts, where, request.rule)
        if request.form is SparseFormat.DENSE:
            size = len(rows) * self.tokenizer.embedded_size * NUMBER_BYTES
            self._limits.check_answer(size, "inputs", "Send fewer texts at a time, or ask for another sparse_format")
        size = len(rows) * USUAL_ANSWER_BYTES
        return Prepared(rows=rows, memo=request, truncated=cut, answer_bytes=size, vectors=request.label)

    def reduce(self, row: Row, outputs: Outputs) -> SparseVector:  # noqa: ARG002 - of Task
        """See `Task`. InferenceFailed if a weight is not finite."""
        weights = finite(outputs["weights"])
        (indices,) = np.nonzero(weights > 0)
        return SparseVector(indices, weights[indices], weights.size)

    def judged(self, row: Row, reduced: SparseVector) -> tuple[NDArray[Any], ...]:  # noqa: ARG002 - of Judged
        """See `Judged`."""
        return (reduced.pairs(),)

    def assemble(self, prepared: Prepared, reduced: Sequence[SparseVector]) -> Any:
        """For each text its vector in the requested form; float32 [texts, vocabulary] for `SparseFormat.DENSE`."""
        request: SparseRequest = prepared.memo
        if request.form is SparseFormat.DENSE:
            return np.stack([one.dense() for one in reduced])
        return [formed(one, request.form, self.tokenizer) for one in reduced]


def formed(vector: SparseVector, form: SparseFormat, tokenizer: Tokenizer) -> Any:
    """The vector as JSON in the requested form, but `SparseFormat.DENSE`."""
    if form is SparseFormat.ARRAYS:
        return {"indices": vector.indices, "values": vector.values}
    # The values stay float32, which JSON has with fewer digits.
    pairs = zip(vector.indices.tolist(), vector.values, strict=True)
    if form is SparseFormat.TOKENS:
        # Vocabularies may be padded: their last entries are no tokens.
        return {tokenizer.token(index): value for index, value in pairs if index < tokenizer.vocabulary_size}
    return [{"index": index, "value": value} for index, value in pairs]
