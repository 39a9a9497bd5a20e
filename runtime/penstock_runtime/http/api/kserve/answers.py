"""Answers of the Open Inference Protocol v2, as JSON or with the binary extension."""

from __future__ import annotations

from typing import Any

from penstock_runtime.http.api.core.bodies import dumps, timing_headers
from penstock_runtime.http.api.kserve.requests import HEADER_LENGTH, Inference
from penstock_runtime.http.api.kserve.signatures import Signature
from penstock_runtime.http.transport.message import Response
from penstock_runtime.serving.predictor import Answer
from penstock_runtime.tasks.fields import JsonSchema

VERSION = "1"
TENSOR: JsonSchema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "datatype": {"enum": ["BYTES", "FP32"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "data": {"type": "array"},
        "parameters": {"type": "object"},
    },
    "required": ["name", "datatype", "shape"],
}
RESPONSE: JsonSchema = {
    "type": "object",
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "outputs": {"type": "array", "items": TENSOR},
    },
    "required": ["model_name", "outputs"],
}
PREDICTIONS: JsonSchema = {
    "type": "object",
    "properties": {"predictions": {"type": "array"}},
    "required": ["predictions"],
}
"""Of V1."""


def write_inference(answer: Answer, inference: Inference, signature: Signature, name: str) -> Response:
    """The answer's tensors, as JSON or behind it."""
    outputs, tail = [], []
    for output in signature.to_outputs(answer.value, inference.count):
        if output.name not in inference.wanted:
            continue
        if inference.wanted[output.name]:
            header, data = output.as_binary()
            outputs.append(header)
            tail.append(data)
        else:
            outputs.append(output.as_json())
    value: dict[str, Any] = {"model_name": name, "model_version": VERSION, "outputs": outputs}
    if inference.identifier is not None:
        value["id"] = inference.identifier
    body = dumps(value)
    headers = timing_headers(answer)
    if not tail:
        return Response(body, headers=headers)
    headers += b"%b: %d\r\n" % (HEADER_LENGTH, len(body))
    return Response(b"".join((body, *tail)), content_type=b"application/octet-stream", headers=headers)
