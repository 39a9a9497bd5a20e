"""Requests of the Open Inference Protocol v2: JSON, or with the binary extension, tritonclient's default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.api.core.bodies import missing_field, not_an_object, parse_json, read_json, refuse_compressed
from penstock_runtime.http.api.kserve.signatures import Signature
from penstock_runtime.http.api.kserve.tensors import LARGEST, MOST_DIMENSIONS, TensorSpec, read_texts
from penstock_runtime.http.transport.message import Request
from penstock_runtime.tasks.fields import JsonSchema

HEADER_LENGTH = b"inference-header-content-length"
LENGTH_DIGITS = 18
KINDS = frozenset({"application/json", "application/octet-stream"})
"""Content types of a body that is only JSON: tritonclient.http.aio uses the second for all bodies."""
PROTOCOL_PARAMETERS = frozenset(
    {
        "binary_data_output", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout",
        "content_type", "headers",
    }
)  # fmt: skip
"""Parameters of the protocol, not of the task. tritonclient sends some of them with their defaults; MLServer's codecs
send the last two."""


@dataclass(frozen=True)
class Inference:
    """A checked request of the protocol."""

    identifier: str | None
    tensors: Mapping[str, list[str]]
    """In the order of the request."""
    count: int
    """Texts of the tensor that decides the batch: the largest."""
    parameters: Mapping[str, Any]
    wanted: Mapping[str, bool]
    """Names of outputs, and whether each is to be binary."""


def read_inference(request: Request, signature: Signature) -> Inference:
    """The request's tensors and parameters; MalformedBody or InvalidInput name the field and the mistake."""
    body, binary = _split(request)
    if not isinstance(body, dict):
        raise not_an_object(body, "body", 'Send {"inputs": [...]}')
    if "inputs" not in body:
        raise missing_field("inputs", body)
    parameters = body.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise not_an_object(parameters, "parameters", "Leave it out")
    tensors = _tensors(body["inputs"], binary, signature.inputs)
    identifier = body.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise InvalidInput("id must be a text", field="id", remedy="Send a text, or leave it out")
    return Inference(
        identifier=identifier,
        tensors=tensors,
        count=max(len(texts) for texts in tensors.values())
        if len(tensors) != 2
        else len(tensors[_counting(signature)]),
        parameters={name: value for name, value in parameters.items() if name not in PROTOCOL_PARAMETERS},
        wanted=_wanted(body.get("outputs"), signature, binary=parameters.get("binary_data_output") is True),
    )


def _counting(signature: Signature) -> str:
    """The input with one element for each answer: the first of several that may have any size."""
    return next(spec.name for spec in signature.inputs if spec.shape == (-1,))


def _split(request: Request) -> tuple[Any, bytes]:
    """The JSON part and the binary part."""
    length = request.headers.get(HEADER_LENGTH)
    if length is None:
        return read_json(request, KINDS), b""
    refuse_compressed(request)
    # Not parsed if it has thousands of digits: int() would raise another error.
    if not length.isdigit() or len(length) > LENGTH_DIGITS or int(length) > len(request.body):
        raise InvalidInput(
            f"the header {HEADER_LENGTH.decode()} is no length within the body",
            field=HEADER_LENGTH.decode(),
            remedy="Give the size of the JSON part in bytes",
        )
    head, binary = request.body[: int(length)], request.body[int(length) :]
    return parse_json(head), binary


def _tensors(inputs: Any, binary: bytes, specs: Sequence[TensorSpec]) -> dict[str, list[str]]:
    names = [spec.name for spec in specs]
    if not isinstance(inputs, list) or not all(isinstance(tensor, dict) for tensor in inputs):
        raise InvalidInput("inputs must be a list of tensors", field="inputs", remedy=f"Send {', '.join(names)}")
    found: dict[str, list[str]] = {}
    position = 0
    for index, tensor in enumerate(inputs):
        where = f"inputs[{index}]"
        name = tensor.get("name")
        if not isinstance(name, str):
            path = f"{where}.name"
            raise InvalidInput(f"{path} must be a string", field=path, remedy=f"Send {', '.join(names)} once")
        # A model with one input accepts it under any name.
        if len(names) == len(inputs) == 1:
            name = names[0]
        if name not in names or name in found:
            problem = "is given twice" if name in found else f"is none of {', '.join(names)}"
            raise InvalidInput(f"{where}.name {problem}", field=f"{where}.name", remedy=f"Send {', '.join(names)} once")
        size = _binary_size(tensor, where)
        data = None
        if size is not None:
            data = binary[position : position + size]
            position += size
            if len(data) != size:
                raise InvalidInput(f"{where}: its binary data is cut off", field=where, remedy="Send all of it")
        found[name] = read_texts(tensor, data, where)
    if position != len(binary):
        raise InvalidInput(
            f"{len(binary) - position} bytes follow the last tensor", field="inputs", remedy="Check binary_data_size"
        )
    for name in names:
        if name not in found:
            raise InvalidInput(f"inputs has no tensor {name!r}", field="inputs", remedy=f"Send {', '.join(names)}")
        if not found[name]:
            raise InvalidInput(f"the tensor {name!r} is empty", field="inputs", remedy="Send at least one text")
    return found


def _binary_size(tensor: Mapping[str, Any], where: str) -> int | None:
    parameters = tensor.get("parameters") or {}
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        path = f"{where}.parameters.binary_data_size"
        raise InvalidInput(f"{path} must be a size in bytes", field=path, remedy="Give a whole number")
    return size


def _wanted(outputs: Any, signature: Signature, *, binary: bool) -> dict[str, bool]:
    names = [spec.name for spec in signature.outputs]
    if outputs is None or outputs == []:
        return dict.fromkeys(names, binary)
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise InvalidInput("outputs must be a list of objects", field="outputs", remedy="Leave it out to get all")
    wanted = {}
    for index, output in enumerate(outputs):
        name = output.get("name")
        if name not in names:
            path = f"outputs[{index}].name"
            raise InvalidInput(
                f"{path} is none of {', '.join(names)}", field=path, remedy="Leave outputs out to get all"
            )
        parameters = output.get("parameters") or {}
        given = parameters.get("binary_data") if isinstance(parameters, dict) else None
        wanted[name] = binary if given is None else given is True
    return wanted


def request_schema(signature: Signature, parameters: JsonSchema) -> JsonSchema:
    """The schema of the body. `parameters`: the schema of the task's parameters."""
    example = [{"name": spec.name, "datatype": "BYTES", "shape": [1], "data": ["a text"]} for spec in signature.inputs]
    size = {"type": "integer", "minimum": 1, "maximum": LARGEST}
    tensor = {
        "type": "object",
        "properties": {
            # A single input is accepted under any name.
            "name": {"type": "string"}
            if len(signature.inputs) == 1
            else {"enum": [spec.name for spec in signature.inputs]},
            "datatype": {"const": "BYTES"},
            "shape": {"type": "array", "items": size, "minItems": 1, "maxItems": MOST_DIMENSIONS},
            "data": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            "parameters": {"type": "object"},
        },
        "required": ["name", "datatype", "shape", "data"],
    }
    output = {
        "type": "object",
        "properties": {
            "name": {"enum": [spec.name for spec in signature.outputs]},
            "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
        },
        "required": ["name"],
    }
    return {
        "type": "object",
        "description": "Tensors of texts. The shape must hold as many elements as there are texts.",
        "properties": {
            "id": {"type": "string"},
            "parameters": _parameters_schema(parameters, signature),
            "inputs": {
                "type": "array",
                "items": tensor,
                "minItems": len(signature.inputs),
                "maxItems": len(signature.inputs),
            },
            "outputs": {"type": "array", "items": output, "description": "Empty or absent: all."},
        },
        "required": ["inputs"],
        "examples": [{"inputs": example}],
    }


def _parameters_schema(task: JsonSchema, signature: Signature) -> JsonSchema:
    """The task's parameters and the protocol's own, less those that come as tensors."""
    tensors = {spec.name for spec in signature.inputs}
    properties = {name: schema for name, schema in task["properties"].items() if name not in tensors}
    own: JsonSchema = {name: {} for name in sorted(PROTOCOL_PARAMETERS)} | {"binary_data_output": {"type": "boolean"}}
    return {
        "type": ["object", "null"],
        "description": "The task's parameters.",
        "properties": properties | own,
        "additionalProperties": False,
    }
