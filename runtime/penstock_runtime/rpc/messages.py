"""The messages of the Open Inference Protocol v2 over gRPC, with the field numbers of its published definition.

The classes are made at the first call, in a separate pool: a client library in the same process may have registered
messages of the same names.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
FIELDS = """
InferParameter: bool? bool_param 1, int64? int64_param 2, string? string_param 3, double? double_param 4,
  uint64? uint64_param 5
InferTensorContents: bool* bool_contents 1, int32* int_contents 2, int64* int64_contents 3, uint32* uint_contents 4,
  uint64* uint64_contents 5, float* fp32_contents 6, double* fp64_contents 7, bytes* bytes_contents 8
ServerLiveRequest:
ServerLiveResponse: bool live 1
ServerReadyRequest:
ServerReadyResponse: bool ready 1
ModelReadyRequest: string name 1, string version 2
ModelReadyResponse: bool ready 1
ServerMetadataRequest:
ServerMetadataResponse: string name 1, string version 2, string* extensions 3
ModelMetadataRequest: string name 1, string version 2
TensorMetadata: string name 1, string datatype 2, int64* shape 3
ModelMetadataResponse: string name 1, string* versions 2, string platform 3, TensorMetadata* inputs 4,
  TensorMetadata* outputs 5
InferInputTensor: string name 1, string datatype 2, int64* shape 3, InferParameter% parameters 4,
  InferTensorContents contents 5
InferRequestedOutputTensor: string name 1, InferParameter% parameters 2
ModelInferRequest: string model_name 1, string model_version 2, string id 3, InferParameter% parameters 4,
  InferInputTensor* inputs 5, InferRequestedOutputTensor* outputs 6, bytes* raw_input_contents 7
InferOutputTensor: string name 1, string datatype 2, int64* shape 3, InferParameter% parameters 4,
  InferTensorContents contents 5
ModelInferResponse: string model_name 1, string model_version 2, string id 3, InferParameter% parameters 4,
  InferOutputTensor* outputs 5, bytes* raw_output_contents 6
"""
"""Each message with the type, name and number of its fields. `*`: repeated, `%`: a map from strings, `?`: one of."""
CALLS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
"""The calls of the service: each takes the message `…Request` and returns `…Response`."""


@cache
def message(name: str) -> Any:
    """The class of a message."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="open_inference.proto", package=PACKAGE, syntax="proto3")

    def add(to: Any, name: str, kind: str, number: int, *, repeated: bool = False) -> Any:
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        field = to.field.add(name=name, number=number, label=label)
        if kind[0].islower():
            field.type = getattr(kinds, f"TYPE_{kind.upper()}")
        else:
            field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
        return field

    for name, fields in re.findall(r"^(\w+):((?:.|\n )*)", FIELDS, re.MULTILINE):
        made = file.message_type.add(name=name)
        for kind, form, field_name, number in re.findall(r"(\w+)([*%?]?) (\w+) (\d+)", fields):
            if form == "%":
                entry = made.nested_type.add(name=f"{field_name.title()}Entry")
                entry.options.map_entry = True
                add(entry, "key", "string", 1)
                add(entry, "value", kind, 2)
                add(made, field_name, f"{name}.{entry.name}", int(number), repeated=True)
                continue
            field = add(made, field_name, kind, int(number), repeated=form == "*")
            if form == "?":
                if not made.oneof_decl:
                    made.oneof_decl.add(name="parameter_choice")
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool
