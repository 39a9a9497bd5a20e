"""The answer of Cohere's reranking API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock_runtime.http.api.core.bodies import answer_response
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.transport.message import Request, Response
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.tasks.fields import JsonSchema

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
                    "document": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
                },
                "required": ["index", "relevance_score"],
            },
        },
        "meta": {"type": "object"},
        "usage": {"type": "object", "properties": {"total_tokens": {"type": "integer"}}},
    },
    "required": ["id", "model", "results", "meta", "usage"],
}


def rerank_answer(service: ModelService, request: Request, body: Mapping[str, Any], answer: Answer) -> Response:
    """The documents by relevance; with `return_documents` each is repeated, a text as an object with it."""
    results: list[dict[str, Any]] = []
    for one in answer.value:
        result: dict[str, Any] = {"index": one["index"], "relevance_score": one["score"]}
        if body["return_documents"]:
            document = body["documents"][one["index"]]
            result["document"] = {"text": document} if isinstance(document, str) else document
        results.append(result)
    value = {
        "id": request.identifier.decode("ascii"),
        "model": service.status.name,
        "results": results,
        # `/rerank` has no version in its path.
        "meta": {
            "api_version": {"version": "1" if request.path.startswith("/v1/") else "2"},
            "billed_units": {"search_units": 1},
        },
        "usage": {"total_tokens": answer.tokens},
    }
    return answer_response(answer, value)
