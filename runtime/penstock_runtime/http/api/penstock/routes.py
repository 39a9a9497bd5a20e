"""Penstock's own routes: `/predict` and `/` in the format of Hugging Face's tasks, and the routes for operation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from penstock.tasks import TaskName
from penstock_runtime.errors import PromptTooLong, UnsupportedOption
from penstock_runtime.http.api.core.bodies import (
    PLAIN,
    Envelope,
    answer_response,
    json_response,
    read_json,
)
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.penstock.answers import info
from penstock_runtime.http.transport.message import Internal, Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.factory import request_schema, response_schema
from penstock_runtime.tasks.fields import JsonSchema

TAG = "Hugging Face"
OPERATION = "Operation"
GENERATION_ERRORS = (PromptTooLong, UnsupportedOption)
HUB = re.compile(rb"\bhf_hub/(\d+)\.(\d+)")
"""The version in the user-agent of huggingface_hub's client."""
TOP_LEVEL = frozenset({TaskName.FEATURE_EXTRACTION, TaskName.TEXT_CLASSIFICATION})
"""Tasks with parameters next to `inputs`: huggingface_hub sends them there for the first one,
text-embeddings-inference's clients for the second."""
HUB_OF_LISTS = (1, 2)
"""From this version on, huggingface_hub expects labels of zero-shot-classification as a list of {label, score}; older
ones the object of transformers' pipeline, with `labels` and `scores`."""


class Predict:
    """The handler of inference."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        task = service.status.task
        self.envelope = Envelope(request_schema(task, limits), top_level_parameters=task in TOP_LEVEL)

    async def predict(self, request: Request) -> Response:
        """The output of the transformers pipeline, which Hugging Face's clients parse."""
        inputs, parameters = self.envelope.open(read_json(request))
        if self._service.status.task is TaskName.ZERO_SHOT_CLASSIFICATION and expects_lists(request):
            parameters = {"output_format": "list"} | {name: one for name, one in parameters.items() if one is not None}
        answer = await self._service.predict(request, inputs, parameters)
        return answer_response(answer, answer.value)


def expects_lists(request: Request) -> bool:
    """The client is a huggingface_hub that expects lists of labels."""
    found = HUB.search(request.headers.get(b"user-agent", b""))
    return found is not None and (int(found[1][:9]), int(found[2][:9])) >= HUB_OF_LISTS


class Operation:
    """The handlers of the routes for operation."""

    def __init__(self, service: ModelService, tei_info: Callable[[ModelService], dict[str, Any]]) -> None:
        """`tei_info`: the fields of TEI's `/info`, which Penstock's has as well."""
        self._service = service
        self._tei_info = tei_info

    def alive(self, _: Request) -> Response:
        """`/healthz`: the process is alive, also while it loads or drains: a restart would not help."""
        return Response(b"ok\n", content_type=PLAIN)

    def ready(self, _: Request) -> Response:
        """`/readyz`: 200 when requests are accepted, else NotReady with the reason."""
        self._service.require_ready()
        return Response(b"ready\n", content_type=PLAIN)

    def metrics(self, request: Request) -> Response:
        """`/metrics`: the text format, or OpenMetrics if requested."""
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        text, content_type = self._service.metrics.exposition(accept)
        return Response(text, content_type=content_type)

    def info(self, _: Request) -> Response:
        """`/info`: model, plan, machine, and the results of the optimisation."""
        return json_response({**self._tei_info(self._service), **info(self._service)})

    def capacity_known(self, _: Request) -> Response:
        """`POST /capacity/known`: another replica has measured the capacity, and this one is ready without that."""
        if self._service.status.capacity is not None:
            self._service.status.capacity.known.set()
        return Response(b"ok\n", content_type=PLAIN)


def routes(
    service: ModelService, limits: RequestLimits, tei_info: Callable[[ModelService], dict[str, Any]]
) -> tuple[Route, ...]:
    """The table. `tei_info`: see `Operation`."""
    task = service.status.task
    predict, operation = Predict(service, limits), Operation(service, tei_info)
    text: JsonSchema = {"type": "string"}
    return (
        *(
            Route(
                "POST", path, predict.predict, f"Ask the model: {task.value}", TAG, inference=True,
                request=predict.envelope.document(), response=response_schema(task),
                errors=GENERATION_ERRORS if task is TaskName.TEXT_GENERATION else (),
            )
            # On the root, text-generation answers as text-generation-inference does.
            for path in (("/predict",) if task is TaskName.TEXT_GENERATION else ("/predict", "/"))
        ),
        Route(
            "GET", "/healthz", operation.alive, "Is the process alive?", OPERATION, public=True,
            internal=Internal.TOO, content_type="text/plain", response=text,
        ),
        Route(
            "GET", "/readyz", operation.ready, "Are requests welcome?", OPERATION, public=True,
            internal=Internal.TOO, content_type="text/plain", response=text,
        ),
        Route(
            "GET", "/health", operation.ready, "The same, for huggingface_hub's client", OPERATION, public=True,
            internal=Internal.TOO, content_type="text/plain", response=text,
        ),
        Route(
            "GET", "/metrics", operation.metrics, "Metrics for Prometheus", OPERATION, public=True,
            internal=Internal.ONLY, content_type="text/plain", response=text,
        ),
        # Without an internal port this one answers instead of TEI's `/info`: it has all of its fields.
        Route(
            "GET", "/info", operation.info, "What is served, how, on what, with which evidence", OPERATION,
            internal=Internal.ONLY, response={"type": "object"},
        ),
        *((
            Route(
                "POST", "/capacity/known", operation.capacity_known, "The capacity need not be measured", OPERATION,
                public=True, internal=Internal.ONLY, content_type="text/plain", response=text,
            ),
        ) if service.status.capacity is not None else ()),
    )  # fmt: skip
