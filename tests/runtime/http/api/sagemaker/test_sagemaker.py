"""Requests as SageMaker sends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.tasks import ENCODER_TASKS, TaskName
from tests.runtime.http.serving import REQUESTS, Endpoint, serving

EndpointOf = Callable[[TaskName], Endpoint]


def predict(endpoint: Endpoint, body: Any) -> Any:
    return httpx.post(f"{endpoint.url}/predict", json=body).json()


class TestSageMaker:
    """`GET /ping` and `POST /invocations`."""

    def test_ping_is_200_when_ready(self, endpoint_of: EndpointOf) -> None:
        assert httpx.get(f"{endpoint_of(TaskName.FILL_MASK).url}/ping").status_code == 200

    def test_ping_is_503_while_the_model_loads(self) -> None:
        with serving(None) as endpoint:
            assert httpx.get(f"{endpoint.url}/ping").status_code == 503

    @pytest.mark.parametrize("task", [task for task in ENCODER_TASKS if task is not TaskName.TEXT_CLASSIFICATION])
    def test_a_body_of_the_inference_toolkit_is_answered_as_by_predict(
        self, endpoint_of: EndpointOf, task: TaskName
    ) -> None:
        endpoint = endpoint_of(task)

        answer = httpx.post(f"{endpoint.url}/invocations", json=REQUESTS[task])

        assert answer.status_code == 200, answer.text
        assert answer.json() == predict(endpoint, REQUESTS[task])

    def test_labels_of_one_text_are_one_list(self, endpoint_of: EndpointOf) -> None:
        endpoint = endpoint_of(TaskName.TEXT_CLASSIFICATION)
        url = f"{endpoint.url}/invocations"

        one = httpx.post(url, json={"inputs": "i like you"}).json()
        two = httpx.post(url, json={"inputs": ["i like you", "a dog"]}).json()

        assert one == two[0]
        assert two == predict(endpoint, {"inputs": ["i like you", "a dog"]})

    @pytest.mark.parametrize(
        ("task", "path", "body"),
        [
            (TaskName.FEATURE_EXTRACTION, "/embed", {"inputs": ["a text"], "normalize": False, "other": 1}),
            (TaskName.TEXT_RANKING, "/rerank", {"query": "a", "texts": ["b"], "return_text": True, "top_n": 1}),
        ],
    )
    def test_a_body_of_text_embeddings_inference_is_answered_as_by_its_route(
        self, endpoint_of: EndpointOf, task: TaskName, path: str, body: dict[str, Any]
    ) -> None:
        url = endpoint_of(task).url

        answer = httpx.post(f"{url}/invocations", json=body)

        assert answer.status_code == 200, answer.text
        assert answer.json() == httpx.post(url + path, json=body).json()
