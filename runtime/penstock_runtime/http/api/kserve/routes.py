"""KServe's protocols: the Open Inference Protocol v2 (texts in as BYTES, answers out as FP32 and BYTES) and V1."""

from __future__ import annotations

from penstock import __version__
from penstock.tasks import TaskName
from penstock_runtime.errors import InvalidInput, UnsupportedRoute
from penstock_runtime.http.api.core.bodies import (
    answer_response,
    fields_named,
    json_response,
    missing_field,
    not_an_object,
    read_json,
    rename_field,
    unknown_field,
)
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.api.kserve.answers import PREDICTIONS, RESPONSE, VERSION, write_inference
from penstock_runtime.http.api.kserve.requests import read_inference
from penstock_runtime.http.api.kserve.requests import request_schema as inference_schema
from penstock_runtime.http.api.kserve.signatures import SIGNATURES
from penstock_runtime.http.transport.message import Request, Response, Route
from penstock_runtime.tasks.base import RequestLimits
from penstock_runtime.tasks.factory import request_schema
from penstock_runtime.tasks.fields import JsonSchema

TAG = "Open Inference Protocol"
TAG_OF_V1 = "KServe V1"
ONE_OBJECT = frozenset({TaskName.SENTENCE_SIMILARITY, TaskName.TEXT_RANKING})
"""Tasks that take one object with several texts as inputs."""


class V2:
    """The handlers."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._signature = SIGNATURES[service.status.task]

    def server(self, _: Request) -> Response:
        """`/v2`: name, version and extensions of the server."""
        return json_response({"name": "penstock", "version": __version__, "extensions": ["binary_tensor_data"]})

    def live(self, _: Request) -> Response:
        """`/v2/health/live`."""
        return json_response({"live": True})

    def ready(self, _: Request) -> Response:
        """`/v2/health/ready`."""
        self._service.require_ready()
        return json_response({"ready": True})

    def metadata(self, request: Request) -> Response:
        """`/v2/models/{name}`: its tensors."""
        self._check_model(request)
        return json_response(
            {
                "name": self._service.status.name,
                "versions": [VERSION],
                "platform": "penstock",
                "inputs": [spec.as_json() for spec in self._signature.inputs],
                "outputs": [spec.as_json() for spec in self._signature.outputs],
            }
        )

    def model_ready(self, request: Request) -> Response:
        """`/v2/models/{name}/ready`."""
        self._check_model(request)
        self._service.require_ready()
        return json_response({"name": self._service.status.name, "ready": True})

    async def infer(self, request: Request) -> Response:
        """`/v2/models/{name}/infer`."""
        self._check_model(request)
        inference = read_inference(request, self._signature)
        inputs, extra = self._signature.to_inputs(inference.tensors)
        try:
            answer = await self._service.predict(request, inputs, {**inference.parameters, **extra})
        except InvalidInput as error:
            rename_field(error, self._signature.place(error.field, list(inference.tensors)))
            raise
        return write_inference(answer, inference, self._signature, self._service.status.name)

    def _check_model(self, request: Request) -> None:
        self._service.require_name(request.parameters["name"])
        if request.parameters.get("version", VERSION) != VERSION:
            raise UnsupportedRoute("there is no such version", remedy=f"The only version is {VERSION}")


class V1:
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


def routes(service: ModelService, limits: RequestLimits) -> tuple[Route, ...]:
    """Their table."""
    v1, v2 = V1(service, limits), V2(service)
    signature = SIGNATURES[service.status.task]
    parameters = request_schema(service.status.task, limits)["properties"]["parameters"]
    request = inference_schema(signature, parameters)
    schema: JsonSchema = {"type": "object"}
    model = tuple(
        route
        for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
        for route in (
            Route("GET", path, v2.metadata, "The model's tensors", TAG, response=schema),
            Route("GET", f"{path}/ready", v2.model_ready, "Are requests welcome?", TAG, public=True, response=schema),
            Route(
                "POST", f"{path}/infer", v2.infer, "Ask the model", TAG, inference=True, binary=True,
                request=request, response=RESPONSE,
            ),
        )
    )  # fmt: skip
    return (
        Route("GET", "/v2", v2.server, "What this server is", TAG, response=schema),
        Route("GET", "/v2/health/live", v2.live, "Is the process alive?", TAG, public=True, response=schema),
        Route("GET", "/v2/health/ready", v2.ready, "Are requests welcome?", TAG, public=True, response=schema),
        *model,
        Route(
            "POST",
            "/v1/models/{name}:predict",
            v1.predict,
            "Ask the model",
            TAG_OF_V1,
            inference=True,
            request=v1.request(),
            response=PREDICTIONS,
        ),
    )
