"""The documents match the code: routes, metrics, labels, the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema_rs import Draft202012Validator, meta
from prometheus_client.metrics_core import Metric

from penstock.resources.endpoint_parts.guard_policy import GuardPolicy, LabelRule
from penstock.tasks import TaskName
from tests.runtime.http.serving import REQUESTS, Endpoint
from tests.runtime.serving.test_metrics import full_metrics
from tools import runtime_tables as manual
from tools.runtime_tables import METRIC_LABELS

EndpointOf = Callable[[TaskName], Endpoint]
DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.parametrize("part", list(manual.PARTS))
def test_a_generated_part_is_fresh(part: str) -> None:
    document, make = manual.PARTS[part]

    text = (DOCS.parent / document).read_text(encoding="utf-8")
    found = text.partition(f"<!-- begin {part} -->")[2].partition(f"<!-- end {part} -->")[0].strip()
    assert make() == found, "run `make docs`"


def test_the_labels_of_metrics_are_the_documented_ones() -> None:
    families: list[Metric] = list(full_metrics().collect())

    for family in families:
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(METRIC_LABELS.get(family.name, ())), family.name
    assert set(METRIC_LABELS) <= {family.name for family in families}


@pytest.mark.parametrize("task", list(TaskName))
def test_requests_and_answers_match_the_openapi_document(
    endpoint_of: EndpointOf, task: TaskName, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = endpoint_of(task)
    policy = GuardPolicy(labels={"anger": LabelRule()})
    monkeypatch.setattr(endpoint.server.status, "guard_policy", policy)
    monkeypatch.setattr(endpoint.server.status, "limits", {"max_input_tokens": 64})
    document: dict[str, Any] = httpx.get(f"{endpoint.url}/openapi.json").json()

    for path, operations in document["paths"].items():
        operation = operations.get("post")
        if operation is None:
            continue
        request = operation["requestBody"]["content"]["application/json"]
        contents = operation["responses"]["200"]["content"]
        if "application/json" not in contents:
            assert list(contents) == ["text/event-stream"]
            continue
        response = contents["application/json"]
        meta.validate(request["schema"])
        meta.validate(response["schema"])
        for example in request["examples"].values():
            Draft202012Validator(request["schema"]).validate(example["value"])
            answer = httpx.post(endpoint.url + path.format(name="emotion", version="1"), json=example["value"])
            if answer.status_code == 200:
                Draft202012Validator(response["schema"]).validate(answer.json())
                headers = operation["responses"]["200"].get("headers", {})
                assert {name for name, one in headers.items() if one["required"]} <= set(answer.headers)
            else:
                # The example does not fit this model (another mask token, no such prompt), and gets an error.
                assert answer.status_code == 422
                assert str(answer.status_code) in operation["responses"]


def test_the_openapi_document_has_the_binary_answers(endpoint_of: EndpointOf) -> None:
    endpoint = endpoint_of(TaskName.FEATURE_EXTRACTION)
    paths: dict[str, Any] = httpx.get(f"{endpoint.url}/openapi.json").json()["paths"]
    infer = "/v2/models/{name}/infer"
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a text"]}
    body = {"inputs": [tensor], "parameters": {"binary_data_output": True}}

    answer = httpx.post(endpoint.url + infer.format(name="emotion"), json=body)

    assert answer.headers["content-type"] in paths[infer]["post"]["responses"]["200"]["content"]
    assert set(paths["/predict"]["post"]["responses"]["200"]["content"]) == {"application/json"}


@pytest.mark.parametrize("task", list(TaskName))
def test_every_task_has_its_routes_and_no_others(endpoint_of: EndpointOf, task: TaskName) -> None:
    endpoint = endpoint_of(task)
    paths = set(httpx.get(f"{endpoint.url}/openapi.json").json()["paths"])
    of_task = {route.path for route in manual.all_routes() if route.tasks is None or task in route.tasks}

    for route in manual.all_routes():
        here = route.path in of_task
        assert (route.path in paths) == here
        if not here:
            answer = httpx.request(route.method, endpoint.url + route.path, json=REQUESTS[task])
            assert answer.status_code == 404
