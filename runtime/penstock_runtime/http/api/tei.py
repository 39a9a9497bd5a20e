"""The API of text-embeddings-inference: `/embed`, `/embed_all`, `/embed_sparse`, `/rerank`, `/similarity`, `/tokenize`,
`/decode`.

As there, fields that are not known are ignored: its clients send those of newer versions and of similar servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput, Overloaded
from penstock_runtime.http.api.bodies import answer_response, checked, fields_named, json_response, read_json
from penstock_runtime.http.api.cohere import RESULTS, Cohere
from penstock_runtime.http.api.cohere import body as cohere_body
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.api.token_ids import ABOUT_IDS, ID, LONGEST, TextsOrIds
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.serving.predictor import characters
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.classification import text_ranking
from penstock_runtime.tasks.embeddings import feature_extraction, sentence_similarity
from penstock_runtime.tasks.fields import Boolean, Either, FieldKind, JsonSchema, ListOf, Object, Others, Text
from penstock_runtime.tokens import Tokenizer

T = TypeVar("T")

TAG = "text-embeddings-inference"
TOKEN_BYTES = 80
"""JSON bytes of a token, without its text."""
ROOT = {"inputs": "inputs", "parameters.": ""}
OF_PREDICT = ("outputs", "top_k", "return_text")
"""Parameters of `/predict` alone: each route here has one output."""


class Tei:
    """The handlers. In this API parameters are on the level of the inputs."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        self._cohere = Cohere(service, limits)
        notes = {**feature_extraction.PARAMETERS.notes, "inputs": ABOUT_IDS}
        every = feature_extraction.PARAMETERS.optional
        defaults: dict[str, tuple[FieldKind, Any]] = {
            "normalize": (Boolean(), None),
            "pooling": (every["pooling"][0], feature_extraction.AUTO),
        }
        self.embed_body = Object(
            required={"inputs": TextsOrIds(limits)},
            optional={**without(every, *OF_PREDICT, "sparse_format"), **defaults},
            notes={
                **notes,
                "normalize": "Make vectors of length 1. Default: true; with pooling none it must be left out.",
                "pooling": "How token vectors become one: none gives them all; auto: by the model's own files, mean "
                "where they have none.",
            },
            others=Others.IGNORED,
        )
        self.embed_all_body = Object(
            required={"inputs": TextsOrIds(limits)},
            optional=without(every, *OF_PREDICT, "normalize", "pooling", "dimensions", "sparse_format"),
            notes=notes,
            others=Others.IGNORED,
        )
        self.embed_sparse_body = Object(
            required={"inputs": TextsOrIds(limits)},
            optional={
                **without(every, *OF_PREDICT, "normalize", "pooling", "dimensions"),
                "sparse_format": (every["sparse_format"][0], str(feature_extraction.SparseFormat.PAIRS)),
            },
            notes={
                **notes,
                "sparse_format": 'pairs: [{"index", "value"}] for each text, as text-embeddings-inference; tokens: '
                '{token: value}, as OpenSearch takes it; arrays: {"indices", "values"}, as Qdrant takes it; dense: '
                "all values in one list.",
            },
            others=Others.IGNORED,
        )
        self.tokenize_body = Object(
            required={"inputs": Either((Text(), ListOf(Text(), limits.items)))},
            optional={"add_special_tokens": (Boolean(), True), "prompt_name": (Text("the name of a prompt"), None)},
            notes={"prompt_name": "Not supported: put the prompt's text before the input."},
            others=Others.IGNORED,
        )
        ids = ListOf(ID, LONGEST, words="a list of token ids")
        self.decode_body = Object(
            required={"ids": TokenRows(ids, ListOf(ids, limits.items, words="a list of lists of token ids"))},
            optional={"skip_special_tokens": (Boolean(), True)},
            others=Others.IGNORED,
        )
        self._limits = limits
        ranking = {name: kind for name, kind in text_ranking.PARAMETERS.optional.items() if name != "top_k"}
        self.rerank_body = Object(
            required={"query": Text(), "texts": ListOf(Text(), limits.items)},
            optional=ranking,
            notes=text_ranking.PARAMETERS.notes,
            others=Others.IGNORED,
        )
        if service.status.task is TaskName.FEATURE_EXTRACTION:
            # text-embeddings-inference counts the source sentence as one of the texts.
            limits = replace(limits, items=max(limits.items - 1, 1))
        self.similarity_body = Object(
            required={"inputs": replace(sentence_similarity.inputs(limits), others=Others.IGNORED)},
            optional={"parameters": (replace(sentence_similarity.PARAMETERS, others=Others.IGNORED), {})},
            others=Others.IGNORED,
        )

    async def embed(self, request: Request) -> Response:
        """`/embed`: a vector for each text."""
        body = checked(self.embed_body, read_json(request))
        inputs = body.pop("inputs")
        if body["normalize"] is None:
            body["normalize"] = body["pooling"] != "none"
        with fields_named(ROOT):
            answer = await self._service.predict(request, inputs, given(body))
        return answer_response(answer, answer.value)

    async def embed_all(self, request: Request) -> Response:
        """`/embed_all`: the vectors of all tokens of each text."""
        body = checked(self.embed_all_body, read_json(request))
        inputs = body.pop("inputs")
        with fields_named(ROOT):
            answer = await self._service.predict(request, inputs, {**given(body), "pooling": "none"})
        # Of one text [1, tokens, width]; of several a list of these.
        value = [matrix[0] for matrix in answer.value] if isinstance(answer.value, list) else answer.value
        return answer_response(answer, value)

    async def embed_sparse(self, request: Request) -> Response:
        """`/embed_sparse`: a weight for each token of the vocabulary, without those that are 0."""
        body = checked(self.embed_sparse_body, read_json(request))
        inputs = body.pop("inputs")
        with fields_named(ROOT):
            answer = await self._service.predict(request, inputs, given(body))
        return answer_response(answer, answer.value)

    async def rerank(self, request: Request) -> Response:
        """`/rerank`: the texts by relevance to the query.

        `documents` without `texts` is the body of Cohere's API, which clients of vLLM and Jina send to this path.
        """
        given_body = read_json(request)
        if isinstance(given_body, dict) and "documents" in given_body and "texts" not in given_body:
            return await self._cohere.rerank(request)
        body = checked(self.rerank_body, given_body)
        inputs = {"query": body.pop("query"), "texts": body.pop("texts")}
        parameters = given(body)
        if self._service.status.task is TaskName.FEATURE_EXTRACTION:
            parameters = {
                name: value for name, value in parameters.items() if name not in {"raw_scores", "prompt_name"}
            }
        with fields_named({"inputs.": "", "parameters.": ""}):
            answer = await self._service.predict(request, inputs, parameters)
        return answer_response(answer, answer.value)

    async def similarity(self, request: Request) -> Response:
        """`/similarity`: a cosine for each sentence."""
        body = checked(self.similarity_body, read_json(request))
        inputs, parameters = body["inputs"], given(body["parameters"])
        if self._service.status.task is TaskName.SENTENCE_SIMILARITY:
            answer = await self._service.predict(request, inputs, parameters)
            return answer_response(answer, answer.value)
        # An endpoint for vectors: the answer is computed from their cosines.
        # The sentences first, so that errors have their indices.
        sentences = inputs["sentences"]
        texts = [*sentences, inputs["source_sentence"]]
        with fields_named({f"inputs[{len(sentences)}]": "inputs.source_sentence", "inputs": "inputs.sentences"}):
            vectorising = {"pooling": feature_extraction.AUTO, "normalize": True}
            answer = await self._service.predict(request, texts, {**parameters, **vectorising})
        vectors = np.asarray(answer.value)
        return answer_response(answer, np.clip(vectors[:-1] @ vectors[-1], -1, 1))

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`: the tokens of each text."""
        body = checked(self.tokenize_body, read_json(request))
        if body["prompt_name"] is not None:
            raise InvalidInput(
                "this route has no prompts", field="prompt_name", remedy="Put the prompt's text before the input"
            )
        texts = [body["inputs"]] if isinstance(body["inputs"], str) else body["inputs"]
        work = partial(tokens_of, texts, body["add_special_tokens"], self._limits)
        return json_response(await self._service.with_tokenizer(work, characters(texts)))

    async def decode(self, request: Request) -> Response:
        """`/decode`: the text of each list of token ids."""
        body = checked(self.decode_body, read_json(request))
        rows = body["ids"]

        def work(tokenizer: Tokenizer) -> list[str]:
            return tokenizer.decode(rows, skip_special=body["skip_special_tokens"])

        return json_response(await self._service.with_tokenizer(work, 4 * sum(map(len, rows))))


@dataclass(frozen=True)
class TokenRows:
    """Token ids of one text, or of several; decided by the first entry."""

    one: ListOf
    several: ListOf
    words: str = "a list of token ids, or a list of these"
    python: type = list

    def parse(self, value: Any, where: str) -> list[list[int]]:
        """The rows."""
        if isinstance(value, list) and value and isinstance(value[0], list):
            rows: list[list[int]] = self.several.parse(value, where)
            return rows
        return [self.one.parse(value, where)]

    def schema(self) -> JsonSchema:
        """Either form."""
        return {"anyOf": [self.one.schema(), self.several.schema()]}


def tokens_of(texts: list[str], with_special: bool, limits: RequestLimits, tokenizer: Tokenizer) -> list[list[Any]]:
    """The tokens of each text, as `/tokenize` answers: places in bytes, none for special tokens around the text.

    InvalidInput for an answer over the limit, and for a text that cannot be split into tokens.
    """
    found = []
    template = tokenizer.single
    before, after = (template.before, template.after) if with_special else ((), ())
    count = 0
    for index, text in enumerate(texts):
        (pieces,) = tokenizer.split([text], offsets=True)
        if max(pieces.ids, default=0) >= tokenizer.vocabulary_size:
            tokenizer.require_embedded(pieces.ids, f"inputs[{index}]")
        count += len(pieces) + template.specials
        limits.check_answer(count * TOKEN_BYTES, "inputs", "Send fewer or shorter texts at a time")
        places = [0, *accumulate(len(character.encode()) for character in text)]
        found.append(
            [
                *(_special(tokenizer, one) for one in before),
                *(
                    {"id": one, "text": text[start:end], "special": False, "start": places[start], "stop": places[end]}
                    for one, (start, end) in zip(pieces.ids, pieces.offsets or (), strict=True)
                ),
                *(_special(tokenizer, one) for one in after),
            ]
        )
    return found


def _special(tokenizer: Tokenizer, number: int) -> dict[str, Any]:
    return {"id": number, "text": tokenizer.token(number), "special": True, "start": None, "stop": None}


def given(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without parameters that are None, which the task treats as not given."""
    return {name: value for name, value in parameters.items() if value is not None}


def without(kinds: Mapping[str, T], *names: str) -> dict[str, T]:
    """The fields but these."""
    return {name: kind for name, kind in kinds.items() if name not in names}


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    tei = Tei(service, limits)
    scores: JsonSchema = {"type": "array", "items": {"type": "number"}}
    return (
        Route(
            "POST", "/embed", tei.embed, "Texts to vectors", TAG,
            tasks=frozenset({TaskName.FEATURE_EXTRACTION}), inference=True,
            request=tei.embed_body.schema() | {"examples": [{"inputs": ["a text", "another one"]}]},
            response=feature_extraction.response_schema(),
        ),
        Route(
            "POST", "/embed_all", tei.embed_all, "Texts to the vectors of their tokens", TAG,
            tasks=frozenset({TaskName.FEATURE_EXTRACTION}), inference=True,
            request=tei.embed_all_body.schema() | {"examples": [{"inputs": ["a text", "another one"]}]},
            response={"type": "array", "items": {"type": "array", "items": scores}},
        ),
        Route(
            "POST", "/embed_sparse", tei.embed_sparse, "Texts to sparse vectors", TAG,
            tasks=frozenset({TaskName.FEATURE_EXTRACTION}), inference=True,
            request=tei.embed_sparse_body.schema() | {"examples": [{"inputs": ["a text", "another one"]}]},
            response=feature_extraction.sparse_response_schema(),
        ),
        Route(
            "POST", "/rerank", tei.rerank, "How well texts answer a query", TAG,
            tasks=frozenset({TaskName.TEXT_RANKING, TaskName.FEATURE_EXTRACTION}), inference=True,
            request={"anyOf": [tei.rerank_body.schema(), cohere_body(limits).schema()]}
            | {"examples": [{"query": "What is deep learning?", "texts": ["Cheese.", "A kind of machine learning."]}]},
            response={"anyOf": [text_ranking.response_schema(), RESULTS]},
        ),
        Route(
            "POST", "/tokenize", tei.tokenize, "Texts to tokens", TAG, errors=(Overloaded,),
            request=tei.tokenize_body.schema() | {"examples": [{"inputs": ["a text"]}]},
            response={"type": "array", "items": {"type": "array", "items": {"type": "object"}}},
        ),
        Route(
            "POST", "/decode", tei.decode, "Token ids to texts", TAG, errors=(Overloaded,),
            request=tei.decode_body.schema() | {"examples": [{"ids": [[1, 2]]}]},
            response={"type": "array", "items": {"type": "string"}},
        ),
        Route(
            "POST", "/similarity", tei.similarity, "How alike a sentence is to others", TAG,
            tasks=frozenset({TaskName.SENTENCE_SIMILARITY, TaskName.FEATURE_EXTRACTION}), inference=True,
            request=tei.similarity_body.schema() | {"examples": list(sentence_similarity.EXAMPLES)},
            response=scores,
        ),
    )  # fmt: skip
