"""What hosting platforms send to a container: KServe's V1 protocol and SageMaker."""

from __future__ import annotations

from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.api.bodies import (
    answer_response,
    fields_named,
    missing_field,
    not_an_object,
    read_json,
    unknown_field,
)
from penstock_runtime.http.api.health import HealthRoutes
from penstock_runtime.http.api.predict import Envelope
from penstock_runtime.http.api.service import ModelService
from penstock_runtime.http.api.tei import Tei
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.factory import request_schema, response_schema
from penstock_runtime.tasks.fields import JsonSchema

KSERVE = "KServe V1"
SAGEMAKER = "SageMaker"
ONE_OBJECT = frozenset({TaskName.SENTENCE_SIMILARITY, TaskName.TEXT_RANKING})
"""Tasks whose inputs may be one object with several texts."""
RANKING = frozenset({TaskName.FEATURE_EXTRACTION, TaskName.TEXT_RANKING})
"""Tasks with models that rank texts."""


class KServe:
    """The handler of `/v1/models/{name}:predict`."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        self._task = request_schema(service.status.task, limits)

    async def predict(self, request: Request) -> Response:
        """A prediction for each instance: what `/predict` answers to a list of them."""
        self._service.require_name(request.parameters["name"])
        body = read_json(request)
        if not isinstance(body, dict):
            raise not_an_object(body, "body", 'Send {"instances": [...]}')
        # The protocol takes the instances under either name.
        field = "inputs" if "instances" not in body and "inputs" in body else "instances"
        if field not in body:
            raise missing_field(field, (name for name in body if name != "parameters"))
        for name in body:
            if name not in {field, "parameters"}:
                raise unknown_field(name, ["parameters"], [field, "parameters"])
        parameters = body.get("parameters")
        if parameters is None:
            parameters = {}
        elif not isinstance(parameters, dict):
            raise not_an_object(parameters, "parameters", "Give an object of parameters, or leave it out")
        instances = body[field]
        if not isinstance(instances, list) or not instances:
            raise InvalidInput(f"{field} must be a list with an entry", field=field, remedy="Send a list of inputs")
        if self._service.status.task in ONE_OBJECT and isinstance(instances[0], dict):
            if len(instances) > 1:
                raise InvalidInput(
                    f"{field} has {len(instances)} objects; this task takes one in a request",
                    field=field,
                    remedy="Send one, with all its texts",
                )
            with fields_named({"inputs": f"{field}[0]"}):
                answer = await self._service.predict(request, instances[0], parameters)
            return answer_response(answer, {"predictions": [answer.value]})
        with fields_named({"inputs": field}):
            answer = await self._service.predict(request, instances, parameters)
        return answer_response(answer, {"predictions": answer.value})

    def request(self) -> JsonSchema:
        """The schema of the body."""
        properties, required = self._task["properties"], self._task["required"]
        inputs = properties["inputs"]
        kinds = inputs.get("anyOf", [inputs])
        lists = [kind for kind in kinds if kind["type"] == "array"]
        single = [
            {"type": "array", "items": kind, "minItems": 1, "maxItems": 1} for kind in kinds if kind["type"] == "object"
        ]
        instances = [*lists, *(single if self._service.status.task in ONE_OBJECT else ())]
        others = [name for name in required if name != "inputs"]
        example = self._task["examples"][0]
        given = {name: value for name, value in example.items() if name != "inputs"}
        first = example["inputs"]
        return {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {field: {"anyOf": instances}, "parameters": properties["parameters"]},
                    "required": [field, *others],
                    "additionalProperties": False,
                }
                for field in ("instances", "inputs")
            ],
            "examples": [{"instances": first if isinstance(first, list) else [first], **given}],
        }


class SageMaker:
    """The handler of `/invocations`."""

    def __init__(self, service: ModelService, limits: RequestLimits) -> None:
        self._service = service
        self._tei = Tei(service, limits)
        self._envelope = Envelope(request_schema(service.status.task, limits))

    async def invoke(self, request: Request) -> Response:
        """The bodies of the two containers of Hugging Face for SageMaker, by task.

        Vectors, similarities and rankings are answered as text-embeddings-inference does; all others, and rankings of
        `inputs`, as `/predict`, without the outer list for one text of a text-classification.
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

    def request(self) -> JsonSchema:
        """The schema of the body."""
        match self._service.status.task:
            case TaskName.FEATURE_EXTRACTION:
                bodies = [self._tei.embed_body.schema(), self._tei.rerank_body.schema()]
                return {"anyOf": bodies, "examples": [{"inputs": ["a text", "another one"]}]}
            case TaskName.SENTENCE_SIMILARITY:
                return self._tei.similarity_body.schema() | {"examples": self._envelope.document()["examples"]}
            case TaskName.TEXT_RANKING:
                whole = self._envelope.document()
                return {"anyOf": [self._tei.rerank_body.schema(), whole], "examples": whole["examples"]}
            case _:
                return self._envelope.document()

    def response(self) -> JsonSchema:
        """The schema of the answer."""
        task = self._service.status.task
        whole = response_schema(task)
        if task is TaskName.FEATURE_EXTRACTION:
            return {"anyOf": [whole, response_schema(TaskName.TEXT_RANKING)]}
        return {"anyOf": [whole, whole["items"]]} if task is TaskName.TEXT_CLASSIFICATION else whole


def routes(service: ModelService, health: HealthRoutes, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    kserve, sagemaker = KServe(service, limits), SageMaker(service, limits)
    predictions: JsonSchema = {
        "type": "object",
        "properties": {"predictions": {"type": "array"}},
        "required": ["predictions"],
    }
    return (
        Route(
            "POST", "/v1/models/{name}:predict", kserve.predict, "Ask the model", KSERVE, inference=True,
            request=kserve.request(), response=predictions,
        ),
        Route(
            "POST", "/invocations", sagemaker.invoke, "Ask the model", SAGEMAKER, inference=True,
            request=sagemaker.request(), response=sagemaker.response(),
        ),
        Route(
            "GET", "/ping", health.ready, "Are requests welcome?", SAGEMAKER, public=True,
            content_type="text/plain", response={"type": "string"},
        ),
    )  # fmt: skip
