"""Calls over gRPC as requests of the protocol's HTTP form, and their responses back. Pure.

A call becomes the HTTP request with the binary extension, so that both forms have the same checks, tokens, prompts,
limits, metrics and errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import orjson

from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.api.kserve.requests import HEADER_LENGTH
from penstock_runtime.http.api.kserve.tensors import LENGTH
from penstock_runtime.http.transport.message import Request, Response, identifier_of
from penstock_runtime.rpc.messages import message

PATHS = {
    "ServerLive": "/v2/health/live",
    "ServerReady": "/v2/health/ready",
    "ServerMetadata": "/v2",
    "ModelReady": "/v2/models/{}/ready",
    "ModelMetadata": "/v2/models/{}",
    "ModelInfer": "/v2/models/{}/infer",
}
"""The path of each call's HTTP form; {}: the model, with its version if the client names one."""
NOT_SERVING = {"ServerReady", "ModelReady"}
"""Calls that answer `ready: false` instead of an error while requests are not accepted."""
STATUS_CODES = {
    401: "UNAUTHENTICATED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED", 412: "FAILED_PRECONDITION",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 500: "INTERNAL", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
"""gRPC's status codes by HTTP status; any other is INVALID_ARGUMENT."""
HEADERS = frozenset(
    {"authorization", "x-request-id", "x-deadline-ms", "x-expect-vector-space", "traceparent", "tracestate"}
)
"""Metadata of a call that are headers of the request."""
TRAILERS = frozenset(
    {"x-compute-time", "x-queue-time", "x-tokenization-time", "x-inference-time", "x-compute-tokens", "x-truncated",
     "x-vector-space", "x-artefact", "retry-after"}
)  # fmt: skip
"""Headers of the response that are metadata of the call."""


def http_request(call: str, body: Any, metadata: Iterable[tuple[str, str | bytes]], seconds: float | None) -> Request:
    """The request of the HTTP form. `seconds`: the rest of the client's deadline; None: it has none.

    InvalidInput for numbers in `contents` where texts are expected.
    """
    path = PATHS[call]
    if call in {"ModelReady", "ModelMetadata", "ModelInfer"}:
        name, version = (body.model_name, body.model_version) if call == "ModelInfer" else (body.name, body.version)
        model = quote(name, safe="")
        path = path.format(f"{model}/versions/{quote(version, safe='')}" if version else model)
    known = {name: value for name, value in metadata if name in HEADERS}
    headers = {name.encode(): value.encode() if isinstance(value, str) else value for name, value in known.items()}
    if seconds is not None and b"x-deadline-ms" not in headers:
        headers[b"x-deadline-ms"] = b"%.3f" % max(seconds * 1000, 0.001)
    request = Request("POST" if call == "ModelInfer" else "GET", path, headers)
    request.identifier = identifier_of(headers)
    if call == "ModelInfer":
        request.body, length = _infer_body(body)
        headers[HEADER_LENGTH] = b"%d" % length
    return request


def _infer_body(body: Any) -> tuple[bytes, int]:
    """The body in the binary extension, and the length of its JSON."""
    raw = list(body.raw_input_contents)
    if raw and len(raw) != len(body.inputs):
        raise InvalidInput(
            f"raw_input_contents has {len(raw)} entries for {len(body.inputs)} inputs",
            field="raw_input_contents",
            remedy="Send one for each input, or none",
        )
    inputs, binary = [], []
    for index, tensor in enumerate(body.inputs):
        data = raw[index] if raw else _contents(tensor, f"inputs[{index}]")
        binary.append(data)
        parameters = {**_parameters(tensor.parameters), "binary_data_size": len(data)}
        described = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        inputs.append({**described, "parameters": parameters})
    value: dict[str, Any] = {
        "inputs": inputs,
        "outputs": [{"name": output.name} for output in body.outputs],
        "parameters": {**_parameters(body.parameters), "binary_data_output": True},
    }
    if body.id:
        value["id"] = body.id
    head = orjson.dumps(value)
    return b"".join((head, *binary)), len(head)


def _contents(tensor: Any, where: str) -> bytes:
    """Texts of `contents` in the binary form."""
    others = [field.name for field, _ in tensor.contents.ListFields() if field.name != "bytes_contents"]
    if others:
        raise InvalidInput(
            f"{where}.contents has {others[0]}, and texts are expected",
            field=f"{where}.contents",
            remedy="Send texts in bytes_contents, or in raw_input_contents",
        )
    return b"".join(part for text in tensor.contents.bytes_contents for part in (LENGTH.pack(len(text)), text))


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, parameter in given.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None:
            found[name] = getattr(parameter, choice)
    return found


def rpc_response(call: str, response: Response) -> Any:
    """The message of a response that is no error."""
    made = message(f"{call}Response")()
    if call in NOT_SERVING and response.status == 503:
        made.ready = False
        return made
    length = headers_of(response).get(HEADER_LENGTH.decode())
    head = response.body if length is None else response.body[: int(length)]
    value = orjson.loads(head)
    if call != "ModelInfer":
        return _fill(made, value)
    position = len(head)
    for output in value["outputs"]:
        size = output["parameters"]["binary_data_size"]
        made.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        made.raw_output_contents.append(response.body[position : position + size])
        position += size
    made.model_name, made.model_version, made.id = value["model_name"], value["model_version"], value.get("id", "")
    return made


def _fill(made: Any, value: Mapping[str, Any]) -> Any:
    """A message from JSON values, without fields that the message does not have."""
    for field in made.DESCRIPTOR.fields:
        given = value.get(field.name)
        if given is None:
            continue
        if isinstance(given, list):
            target = getattr(made, field.name)
            for one in given:
                if isinstance(one, Mapping):
                    _fill(target.add(), one)
                else:
                    target.append(one)
        else:
            setattr(made, field.name, given)
    return made


def headers_of(response: Response) -> dict[str, str]:
    """The response's header lines."""
    lines = response.headers.decode("latin-1").split("\r\n")
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


def failure(call: str, response: Response) -> tuple[str, str] | None:
    """The status code's name and the details of an error; None for a response that is none."""
    if response.status < 400 or (call in NOT_SERVING and response.status == 503):
        return None
    value = orjson.loads(response.body)
    words = f"{value['error']}. {value['remedy']}" if value.get("remedy") else value["error"]
    return STATUS_CODES.get(response.status, "INVALID_ARGUMENT"), words
