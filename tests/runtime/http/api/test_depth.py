"""JSON of any depth gets an answer of each route, or a refusal as the client's error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from penstock.tasks import TaskName
from penstock_runtime.http.api.core.bodies import MOST_LEVELS
from penstock_runtime.http.api.core.service import ModelService
from penstock_runtime.http.route_table import routes
from penstock_runtime.serving.metrics import ServerMetrics
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import Settings
from penstock_runtime.tasks.base import DEFAULT_LIMITS
from tests.runtime.http.serving import Endpoint

EndpointOf = Callable[[TaskName], Endpoint]


def cases() -> Iterator[Any]:
    """Each route of each task, with the example of its documentation."""
    for task in TaskName:
        status = ServerStatus("emotion", task)
        service = ModelService(status, Settings(), ServerMetrics(status))
        for route in routes(service, DEFAULT_LIMITS):
            if route.request is not None and (route.tasks is None or task in route.tasks):
                path = route.path.format(name="emotion", model="emotion", version="1")
                yield pytest.param(task, path, route.request["examples"][0], id=f"{task} {path}")


def nested(levels: int) -> Any:
    """A list of this many levels."""
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


def with_fields(value: Any, levels: int) -> Any:
    """The value, with another field of unknown meaning in each object. It has `levels` levels."""
    if isinstance(value, list):
        return [with_fields(one, levels - 1) for one in value]
    if isinstance(value, dict):
        changed = {name: with_fields(one, levels - 1) for name, one in value.items()}
        return {**changed, "more": nested(levels - 1), "metadata": {"a": nested(levels - 2)}}
    return value


@pytest.mark.parametrize(("task", "path", "example"), list(cases()))
def test_a_body_is_answered_or_refused_whatever_its_depth(
    endpoint_of: EndpointOf, task: TaskName, path: str, example: Any
) -> None:
    def answer(body: Any) -> httpx.Response:
        url = endpoint_of(task).url + path
        return httpx.post(url, content=json.dumps(body), headers={"content-type": "application/json"}, timeout=60)

    repeating = {"return_documents": True} if "documents" in example else {}
    deepest = with_fields(example, MOST_LEVELS) | repeating

    assert answer(deepest).status_code < 500
    assert answer({**example, "metadata": {"a": nested(MOST_LEVELS - 2)}, **repeating}).status_code < 500
    for levels in (MOST_LEVELS + 1, 300, 900):
        refused = answer(with_fields(example, levels) | repeating)
        assert refused.status_code == 400
        assert "nested too deeply: more than 200 levels" in refused.text
