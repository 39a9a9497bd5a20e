"""Cohere's shape of ranking, which Jina, vLLM and others share: `/v1/rerank` and `/v2/rerank`."""

from __future__ import annotations

from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.http.body import checked, fields_named, read_json
from penstock_runtime.http.message import Request, Response
from penstock_runtime.http.replies import answer_response
from penstock_runtime.http.routes import Route
from penstock_runtime.http.service import Service
from penstock_runtime.tasks.fields import Boolean, Either, Integer, JsonSchema, ListOf, Object, Text
from penstock_runtime.tasks.limits import Limits

TAG = "Cohere"
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


def body(limits: Limits) -> Object:
    """The body of both routes."""
    document = Object(required={"text": Text()}, words="an object with text")
    return Object(
        required={
            "query": Text(),
            "documents": ListOf(Either((Text(), document)), limits.items, words="a list of documents"),
        },
        optional={
            "model": (Text("the name of a model"), None),
            "top_n": (Integer(1, 1_000_000), None),
            "return_documents": (Boolean(), False),
        },
        notes={
            "model": "Not used: an endpoint has one model.",
            "top_n": "Only this many documents, the best first. Default: all.",
            "return_documents": "Repeat each document beside its score.",
        },
    )


class Cohere:
    """The handlers."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self._service = service
        self._body = body(limits)

    async def rerank(self, request: Request) -> Response:
        """The documents by how well they answer the query."""
        body = checked(self._body, read_json(request))
        texts = [one if isinstance(one, str) else one["text"] for one in body["documents"]]
        parameters = {} if body["top_n"] is None else {"top_k": body["top_n"]}
        with fields_named({"inputs.texts": "documents", "inputs.": ""}):
            answer = await self._service.predict(request, {"query": body["query"], "texts": texts}, parameters)
        results: list[dict[str, Any]] = []
        for one in answer.value:
            result: dict[str, Any] = {"index": one["index"], "relevance_score": one["score"]}
            if body["return_documents"]:
                result["document"] = {"text": texts[one["index"]]}
            results.append(result)
        value = {
            "id": request.identifier.decode("ascii"),
            "model": self._service.status.name,
            "results": results,
            "meta": {"api_version": {"version": request.path[2]}, "billed_units": {"search_units": 1}},
            "usage": {"total_tokens": answer.tokens},
        }
        return answer_response(answer, value)


def routes(service: Service, limits: Limits) -> tuple[Route, ...]:
    """Their table."""
    cohere = Cohere(service, limits)
    schema = body(limits).schema() | {
        "examples": [{"query": "What is deep learning?", "documents": ["Cheese.", "A kind of machine learning."]}]
    }
    return tuple(
        Route(
            "POST", path, cohere.rerank, "How well documents answer a query", TAG,
            tasks=frozenset({TaskName.TEXT_RANKING}), inference=True, request=schema, response=RESULTS,
        )
        for path in ("/v1/rerank", "/v2/rerank")
    )  # fmt: skip
