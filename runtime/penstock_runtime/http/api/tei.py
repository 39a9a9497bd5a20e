"""The API of text-embeddings-inference: `/embed`, `/embed_all`, `/rerank`, `/similarity`.

As there, fields that are not known are ignored: its clients send those of newer versions and of similar servers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.tasks import TaskName
from penstock_runtime.http.api.bodies import answer_response, checked, fields_named, read_json
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.api.token_ids import ABOUT_IDS, TextsOrIds
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.tasks import feature_extraction, sentence_similarity, text_ranking
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.fields import Boolean, FieldKind, JsonSchema, ListOf, Object, Others, Text

TAG = "text-embeddings-inference"
ROOT = {"inputs": "inputs", "parameters.": ""}


class Tei:
    """The handlers. In this API parameters are on the level of the inputs."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        notes = {**feature_extraction.PARAMETERS.notes, "inputs": ABOUT_IDS}
        every = feature_extraction.PARAMETERS.optional
        defaults: dict[str, tuple[FieldKind, Any]] = {
            "normalize": (Boolean(), None),
            "pooling": (every["pooling"][0], feature_extraction.AUTO),
        }
        self.embed_body = Object(
            required={"inputs": TextsOrIds(limits)},
            optional={**every, **defaults},
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
            optional={name: kind for name, kind in every.items() if name not in {"normalize", "pooling", "dimensions"}},
            notes=notes,
            others=Others.IGNORED,
        )
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

    async def rerank(self, request: Request) -> Response:
        """`/rerank`: the texts by relevance to the query."""
        body = checked(self.rerank_body, read_json(request))
        inputs = {"query": body.pop("query"), "texts": body.pop("texts")}
        with fields_named({"inputs.": "", "parameters.": ""}):
            answer = await self._service.predict(request, inputs, given(body))
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


def given(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without parameters that are None, which the task treats as not given."""
    return {name: value for name, value in parameters.items() if value is not None}


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
            "POST", "/rerank", tei.rerank, "How well texts answer a query", TAG,
            tasks=frozenset({TaskName.TEXT_RANKING}), inference=True,
            request=tei.rerank_body.schema()
            | {"examples": [{"query": "What is deep learning?", "texts": ["Cheese.", "A kind of machine learning."]}]},
            response=text_ranking.response_schema(),
        ),
        Route(
            "POST", "/similarity", tei.similarity, "How alike a sentence is to others", TAG,
            tasks=frozenset({TaskName.SENTENCE_SIMILARITY, TaskName.FEATURE_EXTRACTION}), inference=True,
            request=tei.similarity_body.schema() | {"examples": list(sentence_similarity.EXAMPLES)},
            response=scores,
        ),
    )  # fmt: skip
