"""The API of text-embeddings-inference: `/embed`, `/embed_all`, `/embed_sparse`, `/rerank`, `/similarity`, `/tokenize`,
`/decode`, `/info`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput, Overloaded
from penstock_runtime.http.api.core.bodies import answer_response, checked, fields_named, json_response, read_json
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.tei.answers import tei_info, tokens_of
from penstock_runtime.http.api.tei.requests import TeiBodies, given
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.serving.predictor import characters
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.classification import text_ranking
from penstock_runtime.tasks.embeddings import feature_extraction, sentence_similarity
from penstock_runtime.tasks.fields import JsonSchema, Object
from penstock_runtime.tokens import Tokenizer

TAG = "text-embeddings-inference"
ROOT = {"inputs": "inputs", "parameters.": ""}


class Tei:
    """The handlers."""

    def __init__(
        self, service: ModelService, limits: RequestLimits, rerank_documents: Callable[[Request], Awaitable[Response]]
    ) -> None:
        """`rerank_documents` answers bodies of Cohere's API."""
        self._service = service
        self._limits = limits
        self._rerank_documents = rerank_documents
        self.bodies = TeiBodies(service.status.task, limits)

    async def embed(self, request: Request) -> Response:
        """`/embed`: a vector for each text."""
        body = checked(self.bodies.embed, read_json(request))
        inputs = body.pop("inputs")
        if body["normalize"] is None:
            body["normalize"] = body["pooling"] != "none"
        with fields_named(ROOT):
            answer = await self._service.predict(request, inputs, given(body))
        return answer_response(answer, answer.value)

    async def embed_all(self, request: Request) -> Response:
        """`/embed_all`: the vectors of all tokens of each text."""
        body = checked(self.bodies.embed_all, read_json(request))
        inputs = body.pop("inputs")
        with fields_named(ROOT):
            answer = await self._service.predict(request, inputs, {**given(body), "pooling": "none"})
        # Of one text [1, tokens, width]; of several a list of these.
        value = [matrix[0] for matrix in answer.value] if isinstance(answer.value, list) else answer.value
        return answer_response(answer, value)

    async def embed_sparse(self, request: Request) -> Response:
        """`/embed_sparse`: a weight for each token of the vocabulary, without those that are 0."""
        body = checked(self.bodies.embed_sparse, read_json(request))
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
            return await self._rerank_documents(request)
        body = checked(self.bodies.rerank, given_body)
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
        body = checked(self.bodies.similarity, read_json(request))
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
        body = checked(self.bodies.tokenize, read_json(request))
        if body["prompt_name"] is not None:
            raise InvalidInput(
                "this route has no prompts", field="prompt_name", remedy="Put the prompt's text before the input"
            )
        texts = [body["inputs"]] if isinstance(body["inputs"], str) else body["inputs"]
        work = partial(tokens_of, texts, body["add_special_tokens"], self._limits)
        return json_response(await self._service.with_tokenizer(request, work, characters(texts)))

    async def decode(self, request: Request) -> Response:
        """`/decode`: the text of each list of token ids."""
        body = checked(self.bodies.decode, read_json(request))
        rows = body["ids"]

        def work(tokenizer: Tokenizer) -> list[str]:
            return tokenizer.decode(rows, skip_special=body["skip_special_tokens"])

        return json_response(await self._service.with_tokenizer(request, work, 4 * sum(map(len, rows))))

    def info(self, _: Request) -> Response:
        """`/info` of the port for requests, if there is an internal port."""
        return json_response(tei_info(self._service))


def routes(tei: Tei, documents: Object, results: JsonSchema) -> tuple[Route, ...]:
    """The table. `documents` and `results`: body and answer of Cohere's API, which `/rerank` has as well."""
    bodies = tei.bodies
    scores: JsonSchema = {"type": "array", "items": {"type": "number"}}
    return (
        Route(
            "POST", "/embed", tei.embed, "Texts to vectors", TAG,
            tasks=frozenset({TaskName.FEATURE_EXTRACTION}), inference=True,
            request=bodies.embed.schema() | {"examples": [{"inputs": ["a text", "another one"]}]},
            response=feature_extraction.response_schema(),
        ),
        Route(
            "POST", "/embed_all", tei.embed_all, "Texts to the vectors of their tokens", TAG,
            tasks=frozenset({TaskName.FEATURE_EXTRACTION}), inference=True,
            request=bodies.embed_all.schema() | {"examples": [{"inputs": ["a text", "another one"]}]},
            response={"type": "array", "items": {"type": "array", "items": scores}},
        ),
        Route(
            "POST", "/embed_sparse", tei.embed_sparse, "Texts to sparse vectors", TAG,
            tasks=frozenset({TaskName.FEATURE_EXTRACTION}), inference=True,
            request=bodies.embed_sparse.schema() | {"examples": [{"inputs": ["a text", "another one"]}]},
            response=feature_extraction.sparse_response_schema(),
        ),
        Route(
            "POST", "/rerank", tei.rerank, "How well texts answer a query", TAG,
            tasks=frozenset({TaskName.TEXT_RANKING, TaskName.FEATURE_EXTRACTION}), inference=True,
            request={"anyOf": [bodies.rerank.schema(), documents.schema()]}
            | {"examples": [{"query": "What is deep learning?", "texts": ["Cheese.", "A kind of machine learning."]}]},
            response={"anyOf": [text_ranking.response_schema(), results]},
        ),
        Route(
            "POST", "/tokenize", tei.tokenize, "Texts to tokens", TAG, errors=(Overloaded,),
            request=bodies.tokenize.schema() | {"examples": [{"inputs": ["a text"]}]},
            response={"type": "array", "items": {"type": "array", "items": {"type": "object"}}},
        ),
        Route(
            "POST", "/decode", tei.decode, "Token ids to texts", TAG, errors=(Overloaded,),
            request=bodies.decode.schema() | {"examples": [{"ids": [[1, 2]]}]},
            response={"type": "array", "items": {"type": "string"}},
        ),
        Route(
            "POST", "/similarity", tei.similarity, "How alike a sentence is to others", TAG,
            tasks=frozenset({TaskName.SENTENCE_SIMILARITY, TaskName.FEATURE_EXTRACTION}), inference=True,
            request=bodies.similarity.schema() | {"examples": list(sentence_similarity.EXAMPLES)},
            response=scores,
        ),
        Route(
            "GET", "/info", tei.info, "The model and its limits, as of text-embeddings-inference", TAG,
            response={"type": "object"},
        ),
    )  # fmt: skip
