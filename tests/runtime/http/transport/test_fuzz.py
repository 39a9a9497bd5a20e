"""Valid and invalid requests from the OpenAPI document: no 5xx, no undocumented answer, valid ones are answered.

`PENSTOCK_FUZZ_EXAMPLES` changes the number of requests for each route (10 keep this under a minute).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from penstock.tasks import TaskName
from tests.examples import examples
from tests.runtime.http.serving import Endpoint

EndpointOf = Callable[[TaskName], Endpoint]
EXAMPLES = int(os.environ.get("PENSTOCK_FUZZ_EXAMPLES", str(examples(40))))


def no_internal_error(context: Any, response: Any, case: Any) -> None:
    """5xx is an internal error, unless the request had a deadline of its own."""
    if response.status_code != 504 or "x-deadline-ms" not in (case.headers or {}):
        not_a_server_error(context, response, case)


CHECKS: list[Any] = [
    no_internal_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
THE_SAME = {"/", "/v2/rerank", "/v2/models/{name}/versions/{version}/infer"}
"""Routes with the handler and the schema of another one."""
WITHOUT_A_TASK = {"/tokenize", "/decode"}
"""Routes with the same handler and schema for every task."""
WITH_A_TASK_ONLY = set(TaskName) - {TaskName.FEATURE_EXTRACTION, TaskName.TEXT_GENERATION}
"""Tasks for which these are not tried again: an encoder and a language model are enough."""
BEYOND_THE_SCHEMA = re.compile(
    r"is both next to 'inputs' and in 'parameters'"
    r"|elements, but its shape"
    r"|is given twice|has no tensor|fit into a tensor|not one|questions and \d+ contexts"
    r"|there is no prompt|has no prompts|asks for sparse|windows of this model have|there is no stride"
    r"|the model has no label"
    r"|this model's tokens are|this model's vectors have|is for pooled vectors|; this model takes"
    r"|is not for this model: it has one kind of vectors|this model ranks none|is for a query with texts"
    r"|needs logprobs|chat template|is no token|must be a text|cannot be followed|must be a JSON schema"
    r"|mask|hypothesis|needs entities to merge|over the limit of \d+ rows|holds no label|no room"
    r"|two forms of one answer|fit into one request|not among the tools|no earlier function_call"
)
"""Rules that a JSON schema cannot express: how the fields of a request must fit together."""


def refused_for_a_reason(context: Any, response: Any, case: Any) -> None:
    """A request that matches the schema is answered, or refused by one of these rules."""
    if response.status_code == 422:
        assert BEYOND_THE_SCHEMA.search(response.text), response.text


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("task", list(TaskName))
def test_no_request_causes_an_internal_error(endpoint_of: EndpointOf, task: TaskName, mode: GenerationMode) -> None:
    endpoint = endpoint_of(task)
    checks = [*CHECKS, negative_data_rejection if mode is GenerationMode.NEGATIVE else refused_for_a_reason]
    schema = schemathesis.openapi.from_url(f"{endpoint.url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in THE_SAME or (operation.path in WITHOUT_A_TASK and task in WITH_A_TASK_ONLY):
            continue
        if operation.method != "post" and (task is not TaskName.FEATURE_EXTRACTION or mode is GenerationMode.NEGATIVE):
            continue  # the same for every task, and without a body
        count = EXAMPLES if operation.method == "post" else 5

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def fuzz(case: Any) -> None:
            case.call_and_validate(checks=checks)

        fuzz()
