"""feature-extraction of models with a vector for each token (ColBERT), and of BGE-M3, which has three outputs.

Both are computed from the encoder's token vectors, by linear layers that are small next to it. A text is a document,
unless the request names the prompt `query`. A query with texts is answered with the texts by MaxSim: for each token of
the query the largest product with a token of the text, summed (Khattab and Zaharia, "ColBERT", arXiv 2004.12832).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UnsupportedModel
from penstock.resources.endpoint_parts.serving import Prompts
from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.multi_vector import DOCUMENT, QUERY, SPARSE_HEAD, TOKEN_HEAD, MultiVector
from penstock_runtime.models.vector_modules import DenseModule
from penstock_runtime.rows import AnyPooling, Float, Outputs, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, NUMBER_BYTES, Prepared, RequestLimits
from penstock_runtime.tasks.embeddings.embedding import pool, width
from penstock_runtime.tasks.embeddings.feature_extraction import (
    PARAMETERS,
    EmbeddingRequest,
    FeatureExtraction,
    Output,
    SparseFormat,
    TokenIds,
    pieces_of,
    prefixed,
    refuse_others,
    vector_label,
)
from penstock_runtime.tasks.embeddings.sparse_vectors import USUAL_ANSWER_BYTES, SparseVector, formed
from penstock_runtime.tasks.fields import Either, ListOf, Object, Text, parse_parameters
from penstock_runtime.tasks.scores import descending, finite
from penstock_runtime.tasks.texts import Fitter, PromptedTask, Truncation
from penstock_runtime.tokens import Pieces, Template


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenRow(Row):
    """A row that is answered with its token vectors."""

    kept: tuple[int, ...]
    """Positions of the tokens with a vector in the answer."""


@dataclass(frozen=True)
class TextKind:
    """How queries, or documents, become rows."""

    fitter: Fitter
    """With the length of these texts as its limit."""
    template: Template
    marker: str
    """What goes before each text, where the template does not have it."""
    skipped: frozenset[int]


@dataclass(frozen=True, slots=True)
class MultiVectorRequest:
    """A checked request."""

    texts: list[str] | list[Pieces]
    where: list[str]
    kinds: list[str]
    """`QUERY` or `DOCUMENT` for each text."""
    single: bool
    dimensions: int | None
    rule: Truncation
    ranked: list[str] | None = None
    """The texts to rank for the first one; None: the answer has vectors."""
    top_k: int | None = None
    return_text: bool = False


class MultiVectors(PromptedTask):
    """The task of models with a vector for each token."""

    name = TaskName.FEATURE_EXTRACTION

    def __init__(
        self,
        fitter: Fitter,
        folder: ModelFolder,
        limits: RequestLimits = DEFAULT_LIMITS,
        prompts: Prompts | None = None,
    ) -> None:
        super().__init__(fitter, folder, limits, prompts)
        model = folder.multi_vector
        if model is None:
            raise UnsupportedModel(f"{folder.path} has no vectors of tokens", remedy="Use another model")
        self._model = model
        self._kinds = {name: _kind(name, model, fitter) for name in (QUERY, DOCUMENT)}
        self._width = model.width or width(folder.config)
        texts = ListOf(Text(), limits.items)
        ranking = Object(required={"query": Text(), "texts": texts}, words="an object with query and texts")
        self._inputs = Either((Text(), texts, ranking))
        self._filler = _filler(model, fitter)
        self._longest = fitter.max_tokens

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> MultiVectorRequest:
        """See `Task`."""
        values = parse_parameters(parameters, PARAMETERS)
        self._refuse_other_vectors(values)
        if values["dimensions"] is not None and self._width is not None and values["dimensions"] > self._width:
            raise InvalidInput(
                f"parameters.dimensions is {values['dimensions']}; this model's vectors have {self._width}",
                field="parameters.dimensions",
                remedy=f"Ask for {self._width} or fewer",
            )
        given: Any = inputs if isinstance(inputs, TokenIds) else self._inputs.parse(inputs, "inputs")
        rule = self._rule.asked(values["truncate"], values["truncation_direction"])
        if isinstance(given, dict):
            return self._ranking(given, values, rule)
        refuse_others(values, ("top_k", "return_text"))
        name = values["prompt_name"] or self._prompts.default_name
        kind = QUERY if name == QUERY else DOCUMENT
        prefix = self._kinds[kind].marker + self._prompts.text(DOCUMENT if name is None else name)
        texts: list[str] | list[Pieces]
        if isinstance(given, TokenIds):
            single, texts = given.single, pieces_of(given, prefix, self.tokenizer.embedded_size)
        else:
            single, texts = isinstance(given, str), prefixed(given, prefix)
        where = ["inputs"] if single else [f"inputs[{index}]" for index in range(len(texts))]
        return MultiVectorRequest(texts, where, [kind] * len(texts), single, values["dimensions"], rule)

    @staticmethod
    def _refuse_other_vectors(values: Mapping[str, Any]) -> None:
        refuse_others(values, ("outputs",))
        asked = next((name for name in ("normalize", "sparse_format") if values[name] not in {None, False}), None)
        if asked is None and values["pooling"] not in {None, "none"}:
            asked = "pooling"
        if asked is not None:
            raise InvalidInput(
                "this model gives a vector for each token (ColBERT), and the request asks for one vector for each text",
                field=f"parameters.{asked}",
                remedy="Use /embed_all, /rerank, or /predict without normalize, pooling and sparse_format",
            )

    def _ranking(self, given: Mapping[str, Any], values: Mapping[str, Any], rule: Truncation) -> MultiVectorRequest:
        documents: list[str] = given["texts"]
        query = prefixed(given["query"], self._kinds[QUERY].marker + self._prompts.text(QUERY))
        texts = [*query, *prefixed(documents, self._kinds[DOCUMENT].marker + self._prompts.text(DOCUMENT))]
        return MultiVectorRequest(
            texts=texts,
            where=["inputs.query", *(f"inputs.texts[{index}]" for index in range(len(documents)))],
            kinds=[QUERY, *[DOCUMENT] * len(documents)],
            single=False,
            dimensions=values["dimensions"],
            rule=rule,
            ranked=documents,
            top_k=values["top_k"],
            return_text=values["return_text"] is True,
        )

    def prepare(self, request: MultiVectorRequest) -> Prepared:
        """See `Task`."""
        rows: list[Row] = []
        cut = 0
        # A ranking has the query first, then its texts.
        for name in dict.fromkeys(request.kinds):
            kind = self._kinds[name]
            chosen = [index for index, one in enumerate(request.kinds) if one == name]
            texts: Any = [request.texts[index] for index in chosen]
            where = [request.where[index] for index in chosen]
            plain, more = kind.fitter.singles(texts, where, request.rule, template=kind.template)
            rows += [self._row(row, name, kind) for row in plain]
            cut += more
        size, label = 0, b""
        if request.ranked is None:
            size = sum(row.length for row in rows) * (request.dimensions or self._width or 1) * NUMBER_BYTES
            self._limits.check_answer(size, "inputs", "Send fewer texts at a time")
            width, normalised = request.dimensions or self._width, self._model.normalized
            label = vector_label(width, normalised=normalised, prompt=request.kinds[0], kind="multi_vector")
        memo = replace(request, texts=[], where=[], kinds=[])  # it may stay in the cache
        return Prepared(rows=rows, memo=memo, truncated=cut, answer_bytes=size, vectors=label)

    def _row(self, row: Row, name: str, kind: TextKind) -> TokenRow:
        expansion, ids, types = self._model.expansion, row.ids, row.type_ids
        attended = None
        wide = 0 if name != QUERY or expansion is None else min(expansion.tokens, self._longest)
        if expansion is not None and row.length < wide and self._filler is not None:
            more = wide - row.length
            attended = None if expansion.attended else row.length
            ids = [*ids, *[self._filler] * more]
            types = None if types is None else [*types, *[0] * more]
        kept = tuple(place for place, token in enumerate(ids) if token not in kind.skipped or place >= row.length)
        return TokenRow(ids, types, attended=attended, kept=kept)

    def reduce(self, row: Row, outputs: Outputs) -> Float:
        """The encoder's vectors [kept tokens, width]."""
        if not isinstance(row, TokenRow):
            raise TypeError("these rows are made by prepare")
        return finite(outputs["last_hidden_state"][list(row.kept)])

    def judged(self, row: Row, reduced: Float) -> tuple[Float, ...]:  # noqa: ARG002 - of Judged
        """See `Judged`."""
        return (self._vectors(reduced, None),)

    def _vectors(self, states: Float, dimensions: int | None) -> Float:
        """[tokens, dimensions] of the encoder's [tokens, width]."""
        for module in self._model.projections:
            states = module.of_tokens(states)
        return (
            scaled(states[:, :dimensions]) if self._model.normalized else np.ascontiguousarray(states[:, :dimensions])
        )

    def assemble(self, prepared: Prepared, reduced: Sequence[Float]) -> Any:
        """float32 [1, tokens, dimensions], in a list for a list of texts; a ranking for a query with texts."""
        request: MultiVectorRequest = prepared.memo
        matrices = [self._vectors(one, request.dimensions) for one in reduced]
        if request.ranked is None:
            nested = [matrix[np.newaxis] for matrix in matrices]
            return nested[0] if request.single else nested
        query, *documents = matrices
        scores: Float = np.array([max_sim(query, document) for document in documents], dtype=np.float32)
        values: list[float] = scores.tolist()
        return [
            {"index": index, "score": values[index], **({"text": request.ranked[index]} if request.return_text else {})}
            for index in descending(scores)[: request.top_k]
        ]


def max_sim(query: Float, document: Float) -> float:
    """The sum over the tokens of a query of the largest product with a token of the document, 0 without tokens."""
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


def scaled(vectors: Float) -> Float:
    """Each vector [n, width] scaled to length 1; a zero vector stays as it is."""
    squares: Float = np.add.reduce(np.square(vectors), axis=1, keepdims=True)
    lengths = np.maximum(np.sqrt(squares), 1e-12).astype(np.float32)
    result: Float = (vectors / lengths).astype(np.float32, copy=False)
    return result


def _kind(name: str, model: MultiVector, fitter: Fitter) -> TextKind:
    tokenizer = fitter.tokenizer
    longest = min(fitter.max_tokens, model.longest.get(name, fitter.max_tokens))
    template, marker = tokenizer.single, model.markers.get(name, "")
    # With its space (PyLate), or without (colbert-ai).
    words = (marker, *marker.split(maxsplit=1)[:1])
    token = next((token for word in words if word and (token := tokenizer.id_of(word)) is not None), None)
    if token is not None:
        before, first, between, second, after = template.types
        at = min(1, len(template.before))
        template = replace(
            template,
            before=(*template.before[:at], token, *template.before[at:]),
            types=((*before[:at], 0, *before[at:]), first, between, second, after),
        )
        marker = ""
    # PyLate, sentence-transformers and colbert-ai read a word that is no token of the vocabulary as the unknown token:
    # then all unknown tokens of a document are skipped.
    found = {tokenizer.id_of(word) for word in (model.skipped if name in model.skipped_for else ())}
    tokens = (tokenizer.unk_id if token is None else token for token in found)
    skipped = frozenset(token for token in tokens if token is not None)
    own = Fitter(tokenizer, longest, truncate=fitter.rule.cut, pairs=False)
    return TextKind(own, template, marker, skipped)


def _filler(model: MultiVector, fitter: Fitter) -> int | None:
    """The token that queries are filled up with; None without expansion."""
    if model.expansion is None:
        return None
    tokenizer, token = fitter.tokenizer, model.expansion.token
    if token is not None and (named := tokenizer.id_of(token)) is not None:
        return named
    return tokenizer.mask_id if tokenizer.mask_id is not None else next(iter(tokenizer.single.after), None)


@dataclass(frozen=True, slots=True)
class ThreeVectorsRequest:
    """A checked request: as for dense vectors, and the requested outputs."""

    dense: EmbeddingRequest
    outputs: tuple[Output, ...]
    named: bool
    """The answer is an object with a field for each output."""
    form: SparseFormat


@dataclass(frozen=True, slots=True, eq=False)
class ThreeVectors:
    """The requested parts of a text's answer."""

    dense: Float | None
    """[width], pooled, not yet normalised."""
    sparse: SparseVector | None
    states: Float | None
    """[tokens, width]: of the tokens with a vector."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StatesRow(Row):
    """A row, with the token vectors for its outputs."""

    pooled_by: AnyPooling | None
    """Of the dense vector."""


class ThreeOutputs(FeatureExtraction):
    """The task of BGE-M3: dense vectors, weights of tokens, and a vector for each token, from one run.

    Chen et al., "BGE M3-Embedding", arXiv 2402.03216. The weight of a token is relu(w h), the largest of its positions;
    special tokens have none. The vectors of tokens leave the first one out.
    """

    judging_parameters: Mapping[str, Any]

    def __init__(
        self,
        fitter: Fitter,
        folder: ModelFolder,
        limits: RequestLimits = DEFAULT_LIMITS,
        prompts: Prompts | None = None,
    ) -> None:
        super().__init__(fitter, folder, limits, prompts)
        heads: dict[str, DenseModule] = folder.heads
        self._token_head, self._sparse_head = heads.get(TOKEN_HEAD), heads.get(SPARSE_HEAD)
        absent = {Output.SPARSE} if self._sparse_head is None else set()
        absent |= {Output.MULTI_VECTOR} if self._token_head is None else set()
        self._present = tuple(output for output in Output if output not in absent)
        self.judging_parameters = {"outputs": [str(output) for output in self._present]}
        tokenizer = fitter.tokenizer
        single = tokenizer.single
        specials = (tokenizer.cls_id, tokenizer.pad_id, tokenizer.unk_id, *single.before, *single.after)
        self._specials = [token for token in specials if token is not None]

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> ThreeVectorsRequest:  # type: ignore[override] # the task alone reads its requests
        """See `Task`."""
        values = parse_parameters(parameters, PARAMETERS)
        given = values["outputs"]
        if given is not None:
            outputs = tuple(output for output in Output if output in given)
        elif values["sparse_format"] is not None:
            outputs = (Output.SPARSE,)
        elif values["pooling"] == "none":
            outputs = (Output.MULTI_VECTOR,)
        else:
            outputs = (Output.DENSE,)
        for output in outputs:
            if output not in self._present:
                raise InvalidInput(
                    f"this model has no {output} output: its folder lacks "
                    f"{SPARSE_HEAD if output is Output.SPARSE else TOKEN_HEAD}",
                    field="parameters.outputs",
                    remedy="Make that file of the model's own (docs/how-to/convert-a-model.md#bge-m3)",
                )
        if Output.DENSE in outputs and values["pooling"] == "none":
            raise InvalidInput(
                "parameters.pooling is none, and the dense output is a pooled vector",
                field="parameters.pooling",
                remedy="Leave pooling out, or ask for the output multi_vector",
            )
        others = {"outputs", "sparse_format"} | ({"pooling"} if outputs == (Output.MULTI_VECTOR,) else set())
        kept = {name: value for name, value in parameters.items() if name not in others}
        dense = super().parse(inputs, kept)
        form = SparseFormat(values["sparse_format"] or SparseFormat.PAIRS)
        return ThreeVectorsRequest(dense, outputs, given is not None, form)

    def prepare(self, request: ThreeVectorsRequest) -> Prepared:  # type: ignore[override] # as above
        """See `Task`."""
        prepared = super().prepare(request.dense)
        if request.outputs != (Output.DENSE,):
            # All token vectors are needed: the engine must not pool.
            prepared.rows = [StatesRow(row.ids, row.type_ids, pooled_by=row.pooling) for row in prepared.rows]
        size = 0
        if Output.MULTI_VECTOR in request.outputs and self._token_head is not None:
            size += prepared.tokens * self._token_head.width * NUMBER_BYTES
        if Output.SPARSE in request.outputs:
            dense = self.tokenizer.embedded_size * NUMBER_BYTES
            size += len(prepared.rows) * (dense if request.form is SparseFormat.DENSE else USUAL_ANSWER_BYTES)
        self._limits.check_answer(size, "inputs", "Send fewer texts at a time, or ask for fewer outputs")
        prepared.memo, prepared.answer_bytes = request, size
        if request.outputs != (Output.DENSE,):
            prepared.vectors = vector_label(kind="+".join(request.outputs))
        return prepared

    def reduce(self, row: Row, outputs: Outputs) -> ThreeVectors:  # type: ignore[override] # as above
        """See `Task`."""
        if row.pooling is not None:
            return ThreeVectors(super().reduce(row, outputs), None, None)
        states = finite(np.array(outputs["last_hidden_state"]))
        pooled = pool(states, row.pooled_by) if isinstance(row, StatesRow) and row.pooled_by is not None else None
        sparse = None if self._sparse_head is None else self._weights(row, self._sparse_head.of_tokens(states)[:, 0])
        return ThreeVectors(pooled, sparse, states[1:])

    def _weights(self, row: Row, weights: Float) -> SparseVector:
        ids = np.array(row.ids, np.int64)
        counted = (weights > 0) & ~np.isin(ids, self._specials)
        indices, places = np.unique(ids[counted], return_inverse=True)
        values = np.zeros(len(indices), np.float32)
        np.maximum.at(values, places, weights[counted])
        return SparseVector(indices, values, self.tokenizer.embedded_size)

    def judged(self, row: Row, reduced: ThreeVectors) -> tuple[NDArray[Any], ...]:  # noqa: ARG002 - of Judged
        """See `Judged`."""
        arrays: list[NDArray[Any]] = [] if reduced.dense is None else [reduced.dense]
        if reduced.sparse is not None:
            arrays.append(reduced.sparse.pairs())
        if self._token_head is not None and reduced.states is not None:
            arrays.append(scaled(self._token_head.of_tokens(reduced.states)))
        return tuple(arrays)

    def assemble(self, prepared: Prepared, reduced: Sequence[ThreeVectors]) -> Any:  # type: ignore[override] # as above
        """The one requested output as other models have it, or an object of the outputs that `outputs` names."""
        request: ThreeVectorsRequest = prepared.memo
        answers = {str(output): self._output(output, request, reduced) for output in request.outputs}
        if request.named:
            return answers
        (answer,) = answers.values()
        return answer

    def _output(self, output: Output, request: ThreeVectorsRequest, reduced: Sequence[ThreeVectors]) -> Any:
        match output:
            case Output.DENSE:
                vectors = [one.dense for one in reduced if one.dense is not None]
                return super().assemble(Prepared(rows=(), memo=request.dense), vectors)
            case Output.SPARSE:
                found = [one.sparse for one in reduced if one.sparse is not None]
                if request.form is SparseFormat.DENSE:
                    return np.stack([one.dense() for one in found])
                return [formed(one, request.form, self.tokenizer) for one in found]
            case Output.MULTI_VECTOR:
                head = self._token_head
                states = [one.states for one in reduced if one.states is not None]
                matrices = [] if head is None else [scaled(head.of_tokens(one)) for one in states]
                if request.named:
                    return matrices
                nested = [matrix[np.newaxis] for matrix in matrices]
                return nested[0] if request.dense.single else nested
