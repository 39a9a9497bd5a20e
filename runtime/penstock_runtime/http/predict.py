"""`POST /predict` and `POST /`: the shape of Hugging Face's tasks, {"inputs", "parameters"?, "options"?}."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock_runtime.errors import InvalidInput
from penstock_runtime.http.body import kind_of, missing_field, read_json, unknown_field
from penstock_runtime.http.message import Request, Response
from penstock_runtime.http.replies import answer_response
from penstock_runtime.http.service import Service

OPTIONS = ("use_cache", "wait_for_model", "use_gpu", "dont_load_model")
"""Of Hugging Face's hosted API. Its clients send them; they mean nothing here."""


def envelope(body: Any, names: frozenset[str]) -> tuple[Any, Mapping[str, Any]]:
    """Inputs and parameters of a body; `names` are the task's parameters.

    A bare string is the inputs (an old form of the hosted API). Parameters may also stand beside `inputs`: the official
    client puts those of feature-extraction there. InvalidInput for anything else.
    """
    if isinstance(body, str):
        return body, {}
    if not isinstance(body, dict):
        raise InvalidInput(f"the body is {kind_of(body)}, not an object", remedy='Send {"inputs": …}')
    if "inputs" not in body:
        raise missing_field("inputs", (name for name in body if name not in names))
    if len(body) == 1:
        return body["inputs"], {}
    parameters = body.get("parameters")
    if parameters is None:
        parameters = {}
    elif not isinstance(parameters, dict):
        raise InvalidInput(
            f"'parameters' is {kind_of(parameters)}, not an object",
            field="parameters",
            remedy="Give an object of parameters, or leave it out",
        )
    beside = {}
    for name, value in body.items():
        if name in {"inputs", "parameters"}:
            continue
        if name == "options":
            _check_options(value)
        elif name in names:
            if name in parameters:
                raise InvalidInput(
                    f"'{name}' stands beside 'inputs' and in 'parameters'", field=name, remedy="Give one"
                )
            beside[name] = value
        else:
            raise unknown_field(name, [n for n in ("parameters", "options") if n not in body], _known(names))
    return body["inputs"], {**parameters, **beside} if beside else parameters


def _known(names: Iterable[str]) -> list[str]:
    return ["inputs", "parameters", "options", *sorted(names)]


def _check_options(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise InvalidInput(f"'options' is {kind_of(value)}, not an object", field="options", remedy="Leave it out")
    for name in value:
        if name not in OPTIONS:
            raise unknown_field(name, [n for n in OPTIONS if n not in value], OPTIONS, what="option")


class Predict:
    """The handlers."""

    def __init__(self, service: Service, parameter_names: frozenset[str]) -> None:
        self._service = service
        self._names = parameter_names

    async def pipeline(self, request: Request) -> Response:
        """`/predict`: the answer of transformers' pipeline."""
        inputs, parameters = envelope(read_json(request), self._names)
        answer = await self._service.predict(request, inputs, parameters)
        return answer_response(answer, answer.value)
