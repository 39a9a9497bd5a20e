"""The reranking API of Cohere, which Jina and vLLM have as well: `/v1/rerank` and `/v2/rerank`."""

from __future__ import annotations

from penstock.tasks import TaskName
from penstock_runtime.http.api.cohere.answers import RESULTS, rerank_answer
from penstock_runtime.http.api.cohere.requests import rerank_body
from penstock_runtime.http.api.core.bodies import checked, fields_named, read_json
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits

TAG = "Cohere"


class Cohere:
    """The handler."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        self.body = rerank_body(limits)

    async def rerank(self, request: Request) -> Response:
        """The documents by relevance to the query."""
        body = checked(self.body, read_json(request))
        texts = [one if isinstance(one, str) else one["text"] for one in body["documents"]]
        parameters = {} if body["top_n"] is None else {"top_k": body["top_n"]}
        with fields_named({"inputs.texts": "documents", "inputs.": ""}, absent=["truncate"]):
            answer = await self._service.predict(request, {"query": body["query"], "texts": texts}, parameters)
        return rerank_answer(self._service, request, body, answer)


def routes(cohere: Cohere) -> tuple[Route, ...]:
    """The table. `/rerank`, which is also TEI's, is in TEI's."""
    example = {"query": "What is deep learning?", "documents": ["Cheese.", "A kind of machine learning."]}
    return tuple(
        Route(
            "POST", path, cohere.rerank, "How well documents answer a query", TAG,
            tasks=frozenset({TaskName.TEXT_RANKING, TaskName.FEATURE_EXTRACTION}), inference=True,
            request=cohere.body.schema() | {"examples": [example]}, response=RESULTS,
        )
        for path in ("/v1/rerank", "/v2/rerank")
    )  # fmt: skip
