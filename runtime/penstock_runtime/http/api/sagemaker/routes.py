"""SageMaker's `/invocations` and `/ping`: the bodies of the two containers of Hugging Face for SageMaker."""

from __future__ import annotations

from penstock.tasks import TaskName
from penstock_runtime.http.api.core.bodies import PLAIN, Envelope, answer_response, read_json
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.tei.routes import Tei
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.factory import request_schema, response_schema
from penstock_runtime.tasks.fields import JsonSchema

TAG = "SageMaker"
RANKING = frozenset({TaskName.FEATURE_EXTRACTION, TaskName.TEXT_RANKING})
"""Tasks with models that rank texts."""


class SageMaker:
    """The handlers."""

    def __init__(self, service: ModelService, limits: RequestLimits, tei: Tei) -> None:
        self._service = service
        self._tei = tei
        self._envelope = Envelope(request_schema(service.status.task, limits))

    async def invoke(self, request: Request) -> Response:
        """The bodies of the two containers of Hugging Face for SageMaker, by task.

        Vectors, similarities and rankings are answered as text-embeddings-inference does; all other tasks, and rankings
        of `inputs`, as `/predict`, without the outer list for one text of a text-classification.
        """
        task = self._service.status.task
        if task is TaskName.SENTENCE_SIMILARITY:
            return await self._tei.similarity(request)
        body = read_json(request)
        if task in RANKING and isinstance(body, dict) and "query" in body and "inputs" not in body:
            return await self._tei.rerank(request)
        if task is TaskName.FEATURE_EXTRACTION:
            return await self._tei.embed(request)
        inputs, parameters = self._envelope.open(body)
        answer = await self._service.predict(request, inputs, parameters)
        flat = task is TaskName.TEXT_CLASSIFICATION and not isinstance(inputs, list)
        return answer_response(answer, answer.value[0] if flat else answer.value)

    def ping(self, _: Request) -> Response:
        """`/ping`: as `/readyz`."""
        self._service.require_ready()
        return Response(b"ready\n", content_type=PLAIN)

    def request(self) -> JsonSchema:
        """The schema of the body."""
        match self._service.status.task:
            case TaskName.FEATURE_EXTRACTION:
                bodies = [self._tei.bodies.embed.schema(), self._tei.bodies.rerank.schema()]
                return {"anyOf": bodies, "examples": [{"inputs": ["a text", "another one"]}]}
            case TaskName.SENTENCE_SIMILARITY:
                return self._tei.bodies.similarity.schema() | {"examples": self._envelope.document()["examples"]}
            case TaskName.TEXT_RANKING:
                whole = self._envelope.document()
                return {"anyOf": [self._tei.bodies.rerank.schema(), whole], "examples": whole["examples"]}
            case _:
                return self._envelope.document()

    def response(self) -> JsonSchema:
        """The schema of the answer."""
        task = self._service.status.task
        whole = response_schema(task)
        if task is TaskName.FEATURE_EXTRACTION:
            return {"anyOf": [whole, response_schema(TaskName.TEXT_RANKING)]}
        return {"anyOf": [whole, whole["items"]]} if task is TaskName.TEXT_CLASSIFICATION else whole


def routes(service: ModelService, limits: RequestLimits, tei: Tei) -> tuple[Route, ...]:
    """The table. `tei` answers the bodies of text-embeddings-inference."""
    sagemaker = SageMaker(service, limits, tei)
    return (
        Route(
            "POST", "/invocations", sagemaker.invoke, "Ask the model", TAG, inference=True,
            request=sagemaker.request(), response=sagemaker.response(),
        ),
        Route(
            "GET", "/ping", sagemaker.ping, "Are requests welcome?", TAG, public=True,
            content_type="text/plain", response={"type": "string"},
        ),
    )  # fmt: skip
