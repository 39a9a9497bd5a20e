"""The reranking API of Cohere, which Jina, vLLM and others share: `/v1/rerank` and `/v2/rerank`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.api.bodies import answer_response, checked, dumps, fields_named, read_json
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.fields import Boolean, Either, Integer, JsonSchema, ListOf, Object, Others, Text, json_words

TAG = "Cohere"
LARGEST = 2**31 - 1
UNUSED_LIMIT = "Not used: a text is cut at the model's own limit."
RESULTS: JsonSchema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "model": {"type": "string"},
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "index": {"type": "integer"},
                    "relevance_score": {"type": "number"},
                    "document": {
                        "type": "object",
                        "properties": {"text": {"type": "string"}},
                        "required": ["text"],
                    },
                },
                "required": ["index", "relevance_score"],
            },
        },
        "meta": {"type": "object"},
        "usage": {"type": "object", "properties": {"total_tokens": {"type": "integer"}}},
    },
    "required": ["id", "model", "results", "meta", "usage"],
}


@dataclass(frozen=True)
class RankFields:
    """The fields of a document to rank by: only `text` is supported."""

    words: str = '["text"]'
    python: type = list

    def parse(self, value: Any, where: str) -> list[str]:
        """The list; InvalidInput for any other."""
        if value == ["text"]:
            return ["text"]
        given = "other fields" if isinstance(value, list) else json_words(value)
        raise InvalidInput(
            f"{where} must be {self.words}, not {given}",
            field=where,
            remedy="Write all that is to be ranked into each document's text, and leave rank_fields out",
        )

    def schema(self) -> JsonSchema:
        """That list alone."""
        return {"type": "array", "items": {"const": "text"}, "minItems": 1, "maxItems": 1}


def body(limits: RequestLimits) -> Object:
    """The body of both routes."""
    document = Object(required={"text": Text()}, words="an object with text", others=Others.KEPT)
    return Object(
        required={
            "query": Text(),
            "documents": ListOf(Either((Text(), document)), limits.items, words="a list of documents"),
        },
        optional={
            "model": (Text("the name of a model"), None),
            "top_n": (Integer(1, 1_000_000), None),
            "return_documents": (Boolean(), False),
            "max_tokens_per_doc": (Integer(1, LARGEST), None),
            "max_chunks_per_doc": (Integer(1, LARGEST), None),
            "priority": (Integer(-LARGEST, LARGEST), None),
            "rank_fields": (RankFields(), None),
        },
        notes={
            "model": "Not used: an endpoint has one model.",
            "top_n": "Only this many documents, the best first. Default: all.",
            "return_documents": "Repeat each document with its score and all its fields.",
            "max_tokens_per_doc": UNUSED_LIMIT,
            "max_chunks_per_doc": UNUSED_LIMIT,
            "priority": "Not used: requests are answered in their order.",
            "rank_fields": "The text of a document is what is ranked.",
        },
        others=Others.IGNORED,
    )


class Cohere:
    """The handlers."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        self._body = body(limits)

    async def rerank(self, request: Request) -> Response:
        """The documents by relevance to the query."""
        body = checked(self._body, read_json(request))
        texts = [one if isinstance(one, str) else one["text"] for one in body["documents"]]
        repeated = _repeated(body["documents"]) if body["return_documents"] else None
        parameters = {} if body["top_n"] is None else {"top_k": body["top_n"]}
        with fields_named({"inputs.texts": "documents", "inputs.": ""}, absent=["truncate"]):
            answer = await self._service.predict(request, {"query": body["query"], "texts": texts}, parameters)
        results: list[dict[str, Any]] = []
        for one in answer.value:
            result: dict[str, Any] = {"index": one["index"], "relevance_score": one["score"]}
            if repeated is not None:
                result["document"] = repeated[one["index"]]
            results.append(result)
        value = {
            "id": request.identifier.decode("ascii"),
            "model": self._service.status.name,
            "results": results,
            "meta": {"api_version": {"version": _version(request.path)}, "billed_units": {"search_units": 1}},
            "usage": {"total_tokens": answer.tokens},
        }
        return answer_response(answer, value)


def _version(path: str) -> str:
    """Of the API: 1 or 2; 2 for `/rerank`, which has none in its path."""
    return "1" if path.startswith("/v1/") else "2"


def _repeated(documents: Sequence[Any]) -> list[Any]:
    """The documents as repeated in the answer: a text as an object with it, an object as it was sent."""
    repeated: list[Any] = []
    for index, document in enumerate(documents):
        if isinstance(document, str):
            repeated.append({"text": document})
            continue
        try:
            repeated.append(orjson.Fragment(dumps(document)))
        except orjson.JSONEncodeError as error:  # orjson reads deeper nesting than it writes
            raise InvalidInput(
                f"documents[{index}] is nested too deeply to be repeated",
                field=f"documents[{index}]",
                remedy="Leave return_documents out, or send flatter documents",
            ) from error
    return repeated


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    cohere = Cohere(service, limits)
    schema = body(limits).schema() | {
        "examples": [{"query": "What is deep learning?", "documents": ["Cheese.", "A kind of machine learning."]}]
    }
    return tuple(
        Route(
            "POST", path, cohere.rerank, "How well documents answer a query", TAG,
            tasks=frozenset({TaskName.TEXT_RANKING, TaskName.FEATURE_EXTRACTION}), inference=True,
            request=schema, response=RESULTS,
        )
        for path in ("/v1/rerank", "/v2/rerank")
    )  # fmt: skip
