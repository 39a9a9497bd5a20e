"""feature-extraction: texts to vectors, pooled and normalised by the model's own files.

A plain transformers model has no pooling: it gives a vector for each token, in the nesting of transformers' pipeline.
Pooled vectors are always a list of vectors, also for one text (as `/embed` of text-embeddings-inference has it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from penstock.resources.endpoint_parts.serving import Prompts
from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import AnyPooling, Float, Outputs, Pooling, Row
from penstock_runtime.tasks.base import DEFAULT_LIMITS, NUMBER_BYTES, Prepared, RequestLimits
from penstock_runtime.tasks.embeddings.embedding import Embedding, normalise, shorten
from penstock_runtime.tasks.fields import (
    Boolean,
    Choice,
    Either,
    FieldKind,
    Integer,
    JsonSchema,
    ListOf,
    Object,
    Text,
    body_schema,
    parse_parameters,
)
from penstock_runtime.tasks.texts import (
    PROMPT,
    PROMPT_NOTES,
    TRUNCATION,
    TRUNCATION_NOTES,
    Fitter,
    PromptedTask,
    Truncation,
)
from penstock_runtime.tokens import Pieces

WIDEST = 65_536
"""More than any model has: the schema's limit of `dimensions`; the model's own width is checked too."""

AUTO = "auto"
"""The pooling that returns one vector for each text with every model."""


class SparseFormat(StrEnum):
    """The form of sparse vectors in an answer."""

    PAIRS = "pairs"
    """A list of {"index", "value"}, as text-embeddings-inference."""
    TOKENS = "tokens"
    """A table of tokens and weights, as OpenSearch."""
    ARRAYS = "arrays"
    """{"indices", "values"}, as Qdrant."""
    DENSE = "dense"
    """All weights in one list, as long as the vocabulary."""


class Output(StrEnum):
    """The outputs for a text of a model with several (BGE-M3)."""

    DENSE = "dense"
    SPARSE = "sparse"
    MULTI_VECTOR = "multi_vector"


PARAMETERS = Object(
    required={},
    optional={
        "normalize": (Boolean(), None),
        "dimensions": (Integer(1, WIDEST), None),
        "pooling": (Choice(("none", AUTO, *(str(pooling) for pooling in Pooling))), None),
        "sparse_format": (Choice(tuple(map(str, SparseFormat))), None),
        "outputs": (ListOf(Choice(tuple(map(str, Output))), len(Output), words="a list of outputs"), None),
        "top_k": (Integer(1, 1_000_000), None),
        "return_text": (Boolean(), None),
        **PROMPT,
        **TRUNCATION,
    },
    notes={
        "normalize": "Make vectors of length 1. Default: by the model's own files.",
        "dimensions": "Keep this many first values (for models trained so); normalised again where `normalize` is on. "
        "Default: the model's truncate_dim, mostly all; cut as sentence-transformers does, after the model's own "
        "normalisation.",
        "pooling": "How token vectors become one, without the model's modules after its own pooling; none gives them "
        "all; auto: by the model's own files, mean where they "
        "have none, as in sentence-transformers. Default: by the model's own files, all where they have none.",
        "sparse_format": "For models with sparse vectors only, and then instead of the three above. pairs: "
        '[{"index", "value"}] for each text; tokens: {token: value}; arrays: {"indices", "values"}; dense: all values '
        "in one list. Default: pairs.",
        "outputs": "For models with several (BGE-M3): these of one run, as an object with a field for each. Default: "
        "the dense vectors alone.",
        "top_k": "For a query with texts only: this many texts, the best first. Default: all.",
        "return_text": "For a query with texts only: repeat each text with its score.",
        **PROMPT_NOTES,
        **TRUNCATION_NOTES,
    },
)
EXAMPLES = (
    {"inputs": "I like you. I love you."},
    {"inputs": ["a text", "another one"], "parameters": {"pooling": "mean", "normalize": True}},
)


def inputs(limits: RequestLimits) -> FieldKind:
    """A text or a list of texts."""
    return Either((Text(), ListOf(Text(), limits.items)))


def request_schema(limits: RequestLimits = DEFAULT_LIMITS) -> JsonSchema:
    """The request body. Refused beyond it: unknown prompts, too many dimensions, too long without truncate, token
    vectors that make a very large answer."""
    return body_schema(inputs(limits), PARAMETERS, examples=EXAMPLES, about="Texts to vectors")


def response_schema() -> JsonSchema:
    """The answer: one vector for each text, or a matrix [1, tokens, width] for each text of a model without pooling; of
    a model with sparse vectors one of the forms of `sparse_format`."""
    vectors = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    return {
        "description": "One vector for each text; without pooling a vector for each token of each text; of a model "
        "with sparse vectors one of the forms of sparse_format",
        "anyOf": [
            vectors,
            {"type": "array", "items": vectors},
            {"type": "array", "items": {"type": "array", "items": vectors}},
            *sparse_response_schema()["anyOf"][:-1],
        ],
        "examples": [[[0.0354, -0.0178, 0.0563]]],
    }


def sparse_response_schema() -> JsonSchema:
    """Sparse vectors: one for each text, by ascending index, in the forms of `SparseFormat` in their order."""
    index, number = {"type": "integer", "minimum": 0}, {"type": "number"}
    pair = {"type": "object", "properties": {"index": index, "value": number}, "required": ["index", "value"]}
    numbers = {"type": "array", "items": number}
    arrays = {
        "type": "object",
        "properties": {"indices": {"type": "array", "items": index}, "values": numbers},
        "required": ["indices", "values"],
    }
    forms = ({"type": "array", "items": pair}, {"type": "object", "additionalProperties": number}, arrays, numbers)
    return {
        "description": "For each text the tokens with a weight, or another form (sparse_format)",
        "anyOf": [{"type": "array", "items": form} for form in forms],
        "examples": [[[{"index": 2003, "value": 0.9556}, {"index": 3899, "value": 1.2074}]]],
    }


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Inputs that a client has tokenised with this model's tokenizer, without special tokens.

    Used by the APIs of OpenAI and text-embeddings-inference, not by Hugging Face's.
    """

    texts: list[list[int]]
    single: bool
    """One text, not a list of them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How to compute the vectors of a request."""

    prefix: str
    """The prompt before each text."""
    pooling: AnyPooling | None
    own: bool
    """The pooling is the model's own, so that the model's modules follow it."""
    width: int | None
    """Values of a vector before it is cut; None if it is not known."""
    dimensions: int | None
    normalize: bool
    """Scale to length 1 after the vector was cut to `dimensions`."""
    normalize_whole: bool
    """Scale to length 1 before."""
    rule: Truncation
    label: bytes = b""
    """See `Prepared.vectors`."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A checked request."""

    texts: list[str] | list[Pieces]
    single: bool
    """One text, not a list of them."""
    wanted: Wanted


class FeatureExtraction(PromptedTask):
    """The task."""

    name = TaskName.FEATURE_EXTRACTION

    def __init__(
        self,
        fitter: Fitter,
        folder: ModelFolder,
        limits: RequestLimits = DEFAULT_LIMITS,
        prompts: Prompts | None = None,
        *,
        pooled: bool = False,
    ) -> None:
        """`pooled`: the graph gives one vector for each text, and none for tokens."""
        super().__init__(fitter, folder, limits, prompts)
        self._embedding = Embedding.of(fitter, folder, self._prompts, pooled=pooled)
        self._normalize = folder.normalize
        self._dimensions = folder.dimensions
        self._inputs = inputs(limits)
        self._by_default = self._wanted({})

    def parse(self, inputs: Any, parameters: Mapping[str, Any]) -> EmbeddingRequest:
        """See `Task`."""
        # The inputs first: /rerank sends parameters that only a model which ranks takes.
        given = texts_of(self._inputs, inputs)
        wanted = self._by_default if parameters == {} else self._wanted(parameters)
        if isinstance(given, TokenIds):
            size = self._embedding.fitter.tokenizer.embedded_size
            return EmbeddingRequest(pieces_of(given, wanted.prefix, size), given.single, wanted)
        return EmbeddingRequest(prefixed(given, wanted.prefix), isinstance(given, str), wanted)

    def plain_request(self, text: str) -> EmbeddingRequest:
        """For one vector of length 1 of a text alone: whatever the endpoint's prompts, with the model's own pooling."""
        own, pooling = self._pooling_of(AUTO, "")
        rule = self._rule.asked(None, None)
        wanted = Wanted("", pooling, own, None, None, normalize=True, normalize_whole=False, rule=rule)
        return EmbeddingRequest([text], single=True, wanted=wanted)

    def _wanted(self, parameters: Mapping[str, Any]) -> Wanted:
        values = parse_parameters(parameters, PARAMETERS)
        refuse_others(values)
        if values["sparse_format"] is not None:
            raise InvalidInput(
                "this model gives dense vectors, and the request asks for sparse ones",
                field="parameters.sparse_format",
                remedy="Use /embed, or /predict without sparse_format; a SPLADE model needs its modules.json "
                "(docs/how-to/convert-a-model.md#splade)",
            )
        embedding = self._embedding
        prefix = embedding.prompts.text(values["prompt_name"])
        own, pooling = self._pooling_of(values["pooling"], prefix)
        width = embedding.own_width if own else embedding.pooled_width(pooling)
        dimensions = self._dimensions if values["dimensions"] is None else values["dimensions"]
        normalize = self._normalize if values["normalize"] is None else values["normalize"]
        # With the model's own settings the order is as in sentence-transformers: modules first, then the cut.
        by_files = values["normalize"] is None and values["dimensions"] is None and dimensions is not None
        for name in ("normalize", "dimensions"):
            if pooling is None and values[name]:
                raise InvalidInput(
                    f"parameters.{name} is for pooled vectors; this request has a vector for each token",
                    field=f"parameters.{name}",
                    remedy="Set parameters.pooling, for instance to mean",
                )
        if values["dimensions"] is not None and width is not None and values["dimensions"] > width:
            raise InvalidInput(
                f"parameters.dimensions is {values['dimensions']}; this model's vectors have {width}",
                field="parameters.dimensions",
                remedy=f"Ask for {width} or fewer",
            )
        return Wanted(
            prefix=prefix,
            pooling=pooling,
            own=own,
            width=width,
            dimensions=dimensions,
            normalize=normalize and not by_files,
            normalize_whole=normalize and by_files,
            rule=self._rule.asked(values["truncate"], values["truncation_direction"]),
            label=vector_label(
                dimensions or width,
                normalised=bool(normalize),
                prompt=values["prompt_name"] or embedding.prompts.default_name,
                pooling="" if own else str(pooling or "none"),
            ),
        )

    def _pooling_of(self, asked: str | None, prefix: str) -> tuple[bool, AnyPooling | None]:
        """Whether it is the model's own, and the pooling; None: a vector for each token."""
        if self._embedding.pooled and asked not in {None, AUTO}:
            raise InvalidInput(
                f"pooling {asked} needs the vectors of tokens; this model's ONNX file gives one vector for each text",
                field="parameters.pooling",
                remedy="Use /embed, or /predict without pooling; for the vectors of tokens serve the model's "
                "safetensors weights, or an ONNX file with last_hidden_state as an output",
            )
        if asked == AUTO or (asked is None and self._embedding.own_pooling is not None):
            return True, self._embedding.own_pooling_after(prefix)
        return False, None if asked in {None, "none"} else Pooling(asked)

    def prepare(self, request: EmbeddingRequest) -> Prepared:
        """See `Task`."""
        where = ["inputs"] if request.single else [f"inputs[{index}]" for index in range(len(request.texts))]
        rows, cut = self._embedding.fitter.singles(request.texts, where, request.wanted.rule, request.wanted.pooling)
        if request.wanted.width is not None:
            self._check_answer(request, rows, request.wanted.width)
        return Prepared(rows=rows, memo=request, truncated=cut, vectors=request.wanted.label)

    def _check_answer(self, request: EmbeddingRequest, rows: Sequence[Row], width: int) -> None:
        if request.wanted.pooling is None:
            numbers = sum(row.length for row in rows) * width
            remedy = "Send fewer texts at a time, or set parameters.pooling, for instance to mean"
        else:
            numbers = len(rows) * (request.wanted.dimensions or width)
            remedy = "Send fewer texts at a time"
        self._limits.check_answer(numbers * NUMBER_BYTES, "inputs", remedy)

    def reduce(self, row: Row, outputs: Outputs) -> Float:
        """See `Task`."""
        return self._embedding.reduce(row, outputs)

    def assemble(self, prepared: Prepared, reduced: Sequence[Float]) -> Any:
        """float32 [texts, dimensions] when pooled; else [1, tokens, width], in a list for a list of texts."""
        request: EmbeddingRequest = prepared.memo
        wanted = request.wanted
        if wanted.pooling is not None:
            own = [self._embedding.finish(one) for one in reduced] if wanted.own else reduced
            whole = [normalise(one) for one in own] if wanted.normalize_whole else own
            vectors = [shorten(one, wanted.dimensions, normalised=wanted.normalize) for one in whole]
            return vectors[0][np.newaxis] if len(vectors) == 1 else np.stack(vectors)
        matrices = [matrix[np.newaxis] for matrix in reduced]
        return matrices[0] if request.single else matrices


def vector_label(
    dimensions: int | None = None,
    *,
    normalised: bool = False,
    prompt: str | None = None,
    pooling: str = "",
    kind: str = "",
) -> bytes:
    """What a request chose of its vectors, see `Prepared.vectors`. `pooling`: empty for the model's own; `kind`: empty
    for dense vectors."""
    chosen = {"d": dimensions, "n": int(normalised), "p": prompt, "pooling": pooling, "kind": kind}
    return "; ".join(f"{name}={value}" for name, value in chosen.items() if value not in {None, ""}).encode()


def texts_of(kind: FieldKind, inputs: Any) -> str | list[str] | TokenIds:
    """The checked texts. InvalidInput for a query with texts, which this model does not rank."""
    if isinstance(inputs, TokenIds):
        return inputs
    if isinstance(inputs, Mapping) and {"query", "texts"} <= inputs.keys():
        raise InvalidInput(
            "inputs is a query with texts, and this model ranks none: that takes a vector for each token (ColBERT)",
            field="inputs",
            remedy="Serve a reranker with task: text-ranking, or send texts and compare their vectors",
        )
    texts: str | list[str] = kind.parse(inputs, "inputs")
    return texts


def refuse_others(values: Mapping[str, Any], names: Sequence[str] = ("outputs", "top_k", "return_text")) -> None:
    """InvalidInput for parameters of models with other outputs."""
    for name in names:
        if values[name] is not None:
            raise InvalidInput(
                f"parameters.{name} is not for this model: it has one kind of vectors"
                if name == "outputs"
                else f"parameters.{name} is for a query with texts, which a model with a vector for each token takes",
                field=f"parameters.{name}",
                remedy="Leave it out",
            )


def pieces_of(given: TokenIds, prefix: str, size: int) -> list[Pieces]:
    """The texts. InvalidInput for ids that are not below `size`, and if the model needs a prompt before its texts."""
    if prefix:
        raise InvalidInput(
            "inputs are token ids, and a prompt is put before the texts of this request",
            field="inputs",
            remedy="Send texts",
        )
    for index, ids in enumerate(given.texts):
        # For all ids at once: a body may hold a million.
        if min(ids) >= 0 and max(ids) < size:
            continue
        position, one = next((place, one) for place, one in enumerate(ids) if not 0 <= one < size)
        path = f"inputs[{position}]" if given.single else f"inputs[{index}][{position}]"
        raise InvalidInput(
            f"{path} is {one}; this model's tokens are 0 to {size - 1}",
            field=path,
            remedy="Use the tokenizer of this model, or send texts",
        )
    return [Pieces(ids) for ids in given.texts]


def prefixed(given: str | list[str], prefix: str) -> list[str]:
    """A list of the texts, each after the prompt."""
    texts = [given] if isinstance(given, str) else given
    return [prefix + text for text in texts] if prefix else texts
